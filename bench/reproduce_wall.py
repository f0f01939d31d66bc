"""The demo pair measured on this machine: k, draft and prompt class; wall time of stand-in models, nothing else."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.tune.acceptance import from_steps
from compile.build import build
from compile.spec import BuildSpec
from model.artifact import read_bundle
from model.engine import Engine, Request, Result, Step
from model.generate import serve_by, shape_of
from model.runtime import Graphs
from model.text import load_tokenizer

_DEMO = Path(__file__).resolve().parent.parent / "demo"
_MAX_LEN = 256
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Sweep:
    """What to measure: bundles as (draft folder, k), prompts of each class, new tokens, rounds, order's seed."""

    bundles: tuple[tuple[str, int], ...]
    prompts: int
    tokens: int
    rounds: int
    seed: int = 0


QUICK = Sweep((("draft", 3), ("draft", 7), ("draft", 15), ("draft_small", 7)), prompts=4, tokens=64, rounds=2)
FULL = Sweep((*(("draft", k) for k in range(1, 16)), *(("draft_small", k) for k in (3, 7, 15))), 12, 128, 3)


def _bundle(draft: str, k: int, folder: Path) -> Path:
    target, own = str(_DEMO / "target"), str(_DEMO / draft)
    return build(
        BuildSpec(target=target, draft=own, checkpoint=target, draft_checkpoint=own, tp=1, k=k, batch=1,
                  max_len=_MAX_LEN, dtype="fp32", out=str(folder / f"{draft}-k{k}"))
    )  # fmt: skip


def _requests(bundle: Path, sweep: Sweep, stop: tuple[int, ...]) -> list[tuple[str, str, Request]]:
    tokenizer = load_tokenizer(bundle)
    prompts = json.loads((_DEMO / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    chosen = []
    for entropy in ("structured", "open"):
        chosen += [p for p in prompts if p["entropy"] == entropy][: sweep.prompts]
    ids = [tuple(tokenizer.encode(p["text"]).ids) for p in chosen]
    return [
        (p["name"], p["entropy"], Request(i, max_new_tokens=sweep.tokens, stop_ids=stop))
        for p, i in zip(chosen, ids, strict=True)
    ]


@dataclass(frozen=True)
class _Timed:
    result: Result
    ttft_ms: float
    e2e_ms: float
    steps: tuple[tuple[int, int], ...]


def _timed(graphs: Graphs, request: Request, speculative: bool) -> _Timed:
    steps: list[tuple[int, int]] = []
    first: list[float] = []

    def record(step: Step) -> None:
        steps.append((step.drafted, step.accepted))

    def told(ids: list[int]) -> None:
        if not first:
            first.append(time.perf_counter())

    engine = Engine(graphs, shape_of(graphs.bundle), speculative, None, record if speculative else None)
    run = serve_by(engine, graphs, request, told)
    end = time.perf_counter()
    e2e = 1e3 * run.seconds
    return _Timed(run.result, e2e - 1e3 * (end - first[0]), e2e, tuple(steps))


def measure(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """One row per bundle, prompt, round and way; both ways run side by side in random order."""
    rng = random.Random(sweep.seed)
    with tempfile.TemporaryDirectory() as folder:
        for draft, k in sweep.bundles:
            graphs = Graphs(read_bundle(_bundle(draft, k, Path(folder))))
            requests = _requests(graphs.bundle.path, sweep, graphs.bundle.config("target").eos_token_ids)
            for speculative in (True, False):
                _timed(graphs, replace(requests[0][2], max_new_tokens=8), speculative)
            jobs = [(r, s, n) for r in requests for s in (True, False) for n in range(sweep.rounds)]
            rng.shuffle(jobs)
            texts: dict[str, tuple[int, ...]] = {}
            for (name, entropy, request), speculative, _ in jobs:
                timed = _timed(graphs, request, speculative)
                ids = tuple(timed.result.ids)
                # whichever way came first: every run of a prompt must give the same tokens
                same = texts.setdefault(name, ids) == ids
                yield {
                    "draft": draft, "k": k if speculative else 0, "bundle_k": k, "prompt": name, "entropy": entropy,
                    "source": "wall", "tokens": len(ids), "identical": same, "ttft_ms": timed.ttft_ms,
                    "e2e_ms": timed.e2e_ms, "itl_ms": (timed.e2e_ms - timed.ttft_ms) / max(1, len(ids) - 1),
                    "tokens_per_step": timed.result.tokens_per_step, "steps": timed.steps,
                }  # fmt: skip


def acceptance_tables(rows: Rows) -> Rows:
    """Acceptance by position of each draft and class, from the bundle with the longest k: input for bench.tune."""
    tables = []
    for draft, entropy in dict.fromkeys((r["draft"], r["entropy"]) for r in rows):
        mine = [r for r in rows if (r["draft"], r["entropy"]) == (draft, entropy) and r["k"]]
        longest = max(r["k"] for r in mine)
        steps = [tuple(s) for r in mine if r["k"] == longest for s in r["steps"]]
        found = from_steps(f"demo {entropy}", draft, [(d, a) for d, a in steps], "demo pair")
        tables.append({"name": found.name, "draft": draft, "unconditional": found.shares, "steps": found.steps,
                       "rate": found.rate, "k": longest})  # fmt: skip
    return tables
