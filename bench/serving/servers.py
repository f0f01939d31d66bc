"""OpenAI-compatible servers: requests to an endpoint, and `vllm serve` on loopback, its token count and CPU time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from model.errors import UserError
from trnspec.engine.request import Params

_START_S, _REQUEST_S, _STOP_S = 600, 600, 120
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NPROC": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
               "VLLM_CPU_KVCACHE_SPACE": "1"}  # fmt: skip
_GENERATED = re.compile(r"^vllm:generation_tokens_total\{.*\} (\S+)$", re.M)


class Endpoint(NamedTuple):
    """A server's address without /v1, its model's name, and its process id if it was started here.

    OPENAI_API_KEY is sent if it is set.
    """

    address: str
    model: str
    pid: int = 0

    def complete(self, prompt: str, params: Params, tokens: int) -> list[Any]:
        """The new token ids of a prompt, or the characters of the output if the server returns no ids."""
        key = os.environ.get("OPENAI_API_KEY")
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "return_token_ids": True, "seed": params.seed,
            "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k, "min_p": params.min_p,
        }  # fmt: skip
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        try:
            posted = urllib.request.Request(f"{self.address}/v1/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(posted, timeout=_REQUEST_S) as response:
                choice = json.load(response)["choices"][0]
            return list(choice.get("token_ids") or choice["text"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.address}/v1/completions gave no completion ({error}); check the address and the model's name"
            ) from None

    def generated_tokens(self) -> float:
        """Tokens that the server has generated since its start, from its metrics."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=_REQUEST_S) as response:
            return sum(map(float, _GENERATED.findall(response.read().decode())))

    def cpu_seconds(self) -> float:
        """CPU seconds of the server's running processes."""
        ticks, children = dict[int, int](), defaultdict[int, list[int]](list)
        for stat in Path("/proc").glob("[0-9]*/stat"):
            # a process may end meanwhile
            with suppress(OSError):
                fields = stat.read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
                children[int(fields[1])].append(int(stat.parent.name))
                ticks[int(stat.parent.name)] = int(fields[11]) + int(fields[12])
        total, tree = 0, [self.pid]
        while tree:
            pid = tree.pop()
            total, tree = total + ticks.get(pid, 0), tree + children[pid]
        return total / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(vllm: Path, port: int, arguments: Sequence[str], log: Path, **environment: str) -> Iterator[Endpoint]:
    """Start `vllm serve` on one thread without prefix caching and yield its endpoint once it answers.

    Compiled graphs are cached next to the log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = {"JAX_COMPILATION_CACHE_DIR": str(log.parent.resolve() / "compiled")} | os.environ | _ONE_THREAD
    variables |= {"PATH": f"{vllm.parent}:{os.environ['PATH']}"} | environment
    command = [str(vllm), "serve", *arguments, "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m",
               "--no-enable-prefix-caching"]  # fmt: skip
    with log.open("w") as out, subprocess.Popen(command, env=variables, stdout=out, stderr=out) as process:
        endpoint = Endpoint(f"http://127.0.0.1:{port}", "m", process.pid)
        try:
            _wait(process, endpoint, log)
            yield endpoint
        finally:
            process.terminate()
            process.wait(timeout=_STOP_S)


def _wait(process: subprocess.Popen[bytes], endpoint: Endpoint, log: Path) -> None:
    for _ in range(_START_S):
        if process.poll() is not None:
            raise UserError(f"the server ended while it started; see {log}")
        with suppress(OSError), urllib.request.urlopen(f"{endpoint.address}/health", timeout=5):
            return
        time.sleep(1)
    raise UserError(f"the server did not answer in {_START_S} s; see {log}")
