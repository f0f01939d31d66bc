"""`python -m bench.side_by_side --vllm VLLM`: the demo pair behind `vllm serve`, our worker against vLLM's own.

The target alone, and with drafts (vLLM's method `draft_model`), greedy, fp32, one thread each, one server after the
other. A number is the wall milliseconds a token of one request: the best of some tries of a prompt, then the median.
It describes the demo pair on this machine.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.progress import track

from bench.provenance import header, write_result
from compile.build import build
from compile.spec import BuildSpec
from model.errors import UserError, run_cli

_DEMO = Path(__file__).resolve().parent.parent / "demo"
_K, _LENGTH, _START_SECONDS = 7, 512, 600
_ADDRESS = "http://127.0.0.1"


@dataclass(frozen=True)
class Way:
    """A server to start: ours serves a bundle of k drafts, vLLM's the checkpoints."""

    ours: bool
    k: int

    @property
    def name(self) -> str:
        return f"{'ours' if self.ours else 'vLLM'}, {f'{self.k} drafts' if self.k else 'target alone'}"

    def command(self, batch: int, folder: Path) -> list[str]:
        """What follows `vllm serve`; builds our bundle first if it is not there."""
        target, draft = str(_DEMO / "target"), str(_DEMO / "draft")
        if self.ours:
            out = str(folder / f"k{self.k}-b{batch}")
            spec = BuildSpec(
                target=target, checkpoint=target, tp=1, k=self.k, batch=batch, max_len=_LENGTH, dtype="fp32", out=out
            )
            return [str(build(replace(spec, draft=draft, draft_checkpoint=draft) if self.k else spec))]
        drafting = {"method": "draft_model", "model": draft, "num_speculative_tokens": self.k}
        options = ["--dtype", "float32", "--max-model-len", str(_LENGTH), "--max-num-seqs", str(batch)]
        options += ["--generation-config", "vllm", "--no-enable-prefix-caching"]
        return [target, *options, *(["--speculative-config", json.dumps(drafting)] if self.k else [])]


WAYS = (Way(True, 0), Way(False, 0), Way(True, _K), Way(False, _K))


@contextmanager
def _serving(way: Way, arguments: list[str], options: argparse.Namespace) -> Iterator[str]:
    """A server on loopback, one thread; yields the address of its completions."""
    vllm, port = options.vllm, options.port
    log = options.folder / f"{'ours' if way.ours else 'vllm'}-k{way.k}.log"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "NPROC": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PATH": f"{vllm.parent}:{os.environ['PATH']}",
    }
    if not way.ours:
        environment["VLLM_TARGET_DEVICE"] = "cpu"
    command = [str(vllm), "serve", *arguments, "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m"]
    with log.open("w") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as process:
        try:
            _wait(process, f"{_ADDRESS}:{port}/health", log)
            yield f"{_ADDRESS}:{port}/v1/completions"
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


def _ask(address: str, prompt: str, tokens: int) -> tuple[list[int], float]:
    """The new ids and the wall seconds of one greedy request."""
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    request = urllib.request.Request(address, json.dumps(body).encode(), {"content-type": "application/json"})
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as response:
        answer = json.load(response)
    return answer["choices"][0]["token_ids"], time.perf_counter() - begin


def _times(address: str, batch: int, options: argparse.Namespace, prompts: list[dict[str, str]]) -> list[Any]:
    """One row a prompt: the best milliseconds a token of `batch` equal requests at once, and the ids."""
    rows = []
    with concurrent.futures.ThreadPoolExecutor(batch) as pool:
        list(pool.map(lambda p: _ask(address, p["text"], 8), prompts[:batch] * 2))
        for prompt in prompts:
            tries = []
            for _ in range(options.tries):
                begin = time.perf_counter()
                answers = list(pool.map(lambda text: _ask(address, text, options.tokens), [prompt["text"]] * batch))
                tries.append(1e3 * (time.perf_counter() - begin) / len(answers[0][0]))
            rows.append(
                {"prompt": prompt["name"], "entropy": prompt["entropy"], "ms": min(tries), "ids": answers[0][0]}
            )
    return rows


def measure(options: argparse.Namespace, keep: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """A row for every round, batch, way and prompt; `keep` is given all rows so far after each server."""
    prompts = json.loads((_DEMO / "prompts.json").read_text(encoding="utf-8"))["prompts"][:: options.every]
    rows: list[dict[str, Any]] = []
    cells = [(r, b, w) for b in options.batches for r in range(options.rounds) for w in WAYS]
    for round_, batch, way in track(cells, "servers", transient=True):
        arguments = way.command(batch, options.folder)
        with _serving(way, arguments, options) as address:
            found = _times(address, batch, options, prompts)
        rows += [{"round": round_, "batch": batch, "way": way.name, "source": "wall", **row} for row in found]
        keep(rows)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Medians over prompts, each round by itself, and how many texts equal those of our target alone."""
    lines = [
        "| batch | prompts | way | ms/token p50, each round (wall) | same text as ours alone |",
        "|---|---|---|---|---|",
    ]
    alone = {(r["round"], r["batch"], r["prompt"]): r["ids"] for r in rows if r["way"] == WAYS[0].name}
    for batch in sorted({r["batch"] for r in rows}):
        for entropy in sorted({r["entropy"] for r in rows}):
            for way in WAYS:
                chosen = [r for r in rows if (r["batch"], r["entropy"], r["way"]) == (batch, entropy, way.name)]
                rounds = sorted({r["round"] for r in chosen})
                medians = [statistics.median(r["ms"] for r in chosen if r["round"] == one) for one in rounds]
                same = sum(r["ids"] == alone[r["round"], r["batch"], r["prompt"]] for r in chosen)
                shown = ", ".join(f"{m:.2f}" for m in medians)
                lines.append(f"| {batch} | {entropy} | {way.name} | {shown} | {same} of {len(chosen)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Measure, print the table, write the rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.side_by_side", description=__doc__)
    parser.add_argument(
        "--vllm", type=Path, required=True, help="the command of an environment with vLLM and this package"
    )
    parser.add_argument("--folder", type=Path, default=Path("bundles/side_by_side"), help="for bundles and logs")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt of the demo's")
    parser.add_argument("--port", type=int, default=8766)
    parser.add_argument("--out", type=Path, help="write the rows here, JSON")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    begun = header("wall")

    def keep(rows: list[dict[str, Any]]) -> None:
        if options.out:
            kept = [{k: v for k, v in r.items() if k != "ids"} for r in rows]
            write_result(options.out, begun | {"tokens": options.tokens, "rows": kept})

    rows = measure(options, keep)
    print(table(rows))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
