"""OpenAI-compatible servers: one request to an endpoint, and a `vllm serve` on loopback while a comparison runs."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from model.errors import UserError
from trnspec.engine.request import Params

_START_SECONDS, _ASK_SECONDS = 600, 600
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NPROC": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
               "VLLM_CPU_KVCACHE_SPACE": "1"}  # fmt: skip


class Endpoint(NamedTuple):
    """A server's address, without /v1, and the name of its model; OPENAI_API_KEY is sent where it is set."""

    address: str
    model: str

    def complete(self, prompt: str | Sequence[int], params: Params, tokens: int, ignore_eos: bool = False) -> list[Any]:
        """The new ids of a prompt, or the text's characters where the server returns no ids."""
        p, key = params, os.environ.get("OPENAI_API_KEY")
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "return_token_ids": True, "seed": p.seed,
            "temperature": p.temperature, "top_p": p.top_p, "top_k": p.top_k, "min_p": p.min_p,
            "ignore_eos": ignore_eos,
        }  # fmt: skip
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        try:
            posted = urllib.request.Request(f"{self.address}/v1/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(posted, timeout=_ASK_SECONDS) as response:
                choice = json.load(response)["choices"][0]
            return list(choice.get("token_ids") or choice["text"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.address}/v1/completions gave no completion ({error}); check the address and the model's name"
            ) from None


class Server(NamedTuple):
    """The command of an environment with vLLM, a port, arguments of `vllm serve`; `own_engine`: vLLM's, not ours.

    Without `caching` a prompt that comes again is computed again.
    """

    vllm: Path
    port: int
    arguments: Sequence[str]
    own_engine: bool = False
    caching: bool = False


def vllm_command(file: Path | None) -> Path:
    """The command of an environment with vLLM, if it is there."""
    if file is None or not file.is_file():
        raise UserError(f"{file} is not a command of vLLM; make one with make serve-environment, name it with --vllm")
    return file


@contextmanager
def serving(server: Server, log: Path) -> Iterator[str]:
    """Start the server on one thread and yield its address once it answers; its model is named m.

    Compiled graphs are kept beside the log, for the next one that runs them.
    """
    address = f"http://127.0.0.1:{server.port}"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {"JAX_COMPILATION_CACHE_DIR": str(log.parent.resolve() / "compiled")} | os.environ
    environment |= _ONE_THREAD | {"PATH": f"{server.vllm.parent}:{os.environ['PATH']}"}
    if server.own_engine:
        environment["VLLM_TARGET_DEVICE"] = "cpu"
    command = [str(server.vllm), "serve", *server.arguments, "--host", "127.0.0.1", "--port", str(server.port)]
    command += [
        "--served-model-name",
        "m",
        "--enable-prefix-caching" if server.caching else "--no-enable-prefix-caching",
    ]
    with log.open("w") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as process:
        try:
            _wait(process, f"{address}/health", log)
            yield address
        finally:
            process.terminate()
            process.wait(timeout=120)


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    for _ in range(_START_SECONDS):
        if process.poll() is not None:
            raise UserError(f"the server ended while it started; see {log}")
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(1)
    raise UserError(f"the server did not answer in {_START_SECONDS} s; see {log}")
