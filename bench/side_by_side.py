"""`python -m bench.side_by_side --vllm VLLM`: the demo pair behind `vllm serve`, our worker against vLLM's own.

The target alone, and with drafts (vLLM's method `draft_model`), greedy, fp32, one thread each. All four servers are up
and are asked in turn, each try of a prompt in a new order, so that what else the machine does meets all of them. A
number is the wall milliseconds a token of one request: the best of some tries of a prompt, then the median over
prompts. It describes the demo pair on this machine.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.progress import track

from bench.provenance import header, write_result
from compile.build import build
from compile.spec import BuildSpec
from model.errors import UserError, run_cli

DEMO = Path(__file__).resolve().parent.parent / "demo"
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
        target, draft = str(DEMO / "target"), str(DEMO / "draft")
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
def serving(way: Way, batch: int, options: argparse.Namespace) -> Iterator[str]:
    """A server on loopback, one thread; yields the address of its completions."""
    vllm, port = options.vllm, options.port + WAYS.index(way)
    log = options.folder / f"{'ours' if way.ours else 'vllm'}-k{way.k}.log"
    arguments = way.command(batch, options.folder)
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


def _together(address: str, pool: concurrent.futures.Executor, prompt: str, batch: int, tokens: int) -> Any:
    """The ids of a prompt and the wall milliseconds a token, of `batch` equal requests at once."""
    begin = time.perf_counter()
    answers = list(pool.map(lambda text: _ask(address, text, tokens), [prompt] * batch))
    return answers[0][0], 1e3 * (time.perf_counter() - begin) / len(answers[0][0])


def _rows(
    addresses: dict[Way, str], batch: int, prompt: dict[str, str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for every way: its best milliseconds a token of a prompt, of tries in turn with the other ways."""
    times: dict[Way, list[float]] = {way: [] for way in addresses}
    ids: dict[Way, list[int]] = {}
    order, rng = list(addresses), random.Random(prompt["name"])
    with concurrent.futures.ThreadPoolExecutor(batch) as pool:
        for _ in range(options.tries):
            rng.shuffle(order)
            for way in order:
                ids[way], ms = _together(addresses[way], pool, prompt["text"], batch, options.tokens)
                times[way].append(ms)
    shared = {"batch": batch, "prompt": prompt["name"], "entropy": prompt["entropy"], "source": "wall"}
    same = {way: ids[way] == ids[WAYS[0]] for way in WAYS}
    return [{**shared, "way": way.name, "ms": min(times[way]), "all_ms": times[way], "same": same[way]} for way in WAYS]


def measure(options: argparse.Namespace, keep: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """A row for every batch, prompt and way; `keep` is told all rows so far after each prompt."""
    prompts = json.loads((DEMO / "prompts.json").read_text(encoding="utf-8"))["prompts"][:: options.every]
    rows: list[dict[str, Any]] = []
    for batch in options.batches:
        with ExitStack() as stack:
            addresses = {way: stack.enter_context(serving(way, batch, options)) for way in WAYS}
            # what is compiled or cached at a first request
            for address in addresses.values():
                _ask(address, prompts[0]["text"], options.tokens)
            for prompt in track(prompts, f"batch {batch}", transient=True):
                rows += _rows(addresses, batch, prompt, options)
                keep(rows)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Medians over prompts of each way, how much faster ours is, and how many texts equal those of our target alone."""
    lines = [
        "| batch | prompts | way | ms/token p50 (wall) | vLLM's over ours | same text as ours alone |",
        "|---|---|---|---|---|---|",
    ]
    for batch in sorted({r["batch"] for r in rows}):
        for entropy in sorted({r["entropy"] for r in rows}):
            for way in WAYS:
                chosen, rival = (
                    [r for r in rows if (r["batch"], r["entropy"], r["way"]) == (batch, entropy, name)]
                    for name in (way.name, Way(not way.ours, way.k).name)
                )
                ratios = [theirs["ms"] / ours["ms"] for ours, theirs in zip(chosen, rival, strict=True)]
                shown = f"{statistics.median(ratios):.2f}" if way.ours else ""
                cells = [batch, entropy, way.name, f"{statistics.median(r['ms'] for r in chosen):.2f}", shown]
                same = sum(r["same"] for r in chosen)
                lines.append(f"| {' | '.join(map(str, cells))} | {same} of {len(chosen)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Measure, print the table, write the rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.side_by_side", description=__doc__)
    parser.add_argument(
        "--vllm", type=Path, required=True, help="the command of an environment with vLLM and this package"
    )
    parser.add_argument("--folder", type=Path, default=Path("bundles/side_by_side"), help="for bundles and logs")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt of the demo's")
    parser.add_argument("--port", type=int, default=8766, help="the first of four")
    parser.add_argument("--out", type=Path, help="write the rows here, JSON")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    begun = header("wall")

    def keep(rows: list[dict[str, Any]]) -> None:
        if options.out:
            write_result(options.out, begun | {"tokens": options.tokens, "tries": options.tries, "rows": rows})

    rows = measure(options, keep)
    print(table(rows))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
