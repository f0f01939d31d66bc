"""The demo pair measured on this machine: k, draft and prompt class; wall time of stand-in models, nothing else."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.tune.acceptance import from_steps
from compile.build import build
from compile.spec import BuildSpec
from model.bundle.opening import open_bundle
from model.serving.engine import Engine, SpecStep
from model.serving.ready import compile_graphs, serve_by, shape_of
from model.serving.request import Request, Result
from model.serving.runtime import Graphs
from model.serving.text import load_tokenizer

_DEMO = Path(__file__).resolve().parents[2] / "demo"
_MAX_LEN = 256
Rows = list[dict[str, Any]]


ALONE = ("none", 0)


@dataclass(frozen=True)
class Sweep:
    """What to measure: bundles as (draft folder, k), prompts of each class, new tokens, rounds, order's seed."""

    bundles: tuple[tuple[str, int], ...]
    prompts: int
    tokens: int
    rounds: int
    seed: int = 0


QUICK = Sweep((ALONE, ("draft", 3), ("draft", 7), ("draft", 15), ("draft_small", 7)), prompts=4, tokens=64, rounds=2)
FULL = Sweep(
    (ALONE, *(("draft", k) for k in range(1, 16)), *(("draft_small", k) for k in (1, 3, 5, 7, 15))), 12, 128, 3
)


def _bundle(draft: str, k: int, folder: Path) -> Path:
    target, own = str(_DEMO / "target"), str(_DEMO / draft)
    spec = BuildSpec(target=target, checkpoint=target, tp=1, k=k, batch=1, max_len=_MAX_LEN, dtype="fp32",
                     out=str(folder / f"{draft}-k{k}"))  # fmt: skip
    return build(replace(spec, draft=own, draft_checkpoint=own) if k else spec)


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
    steps: tuple[tuple[int, int, int], ...]


def _timed(graphs: Graphs, request: Request) -> _Timed:
    steps: Counter[tuple[int, int]] = Counter()
    first: list[float] = []

    def record(step: SpecStep) -> None:
        steps[step.drafted, step.accepted] += 1

    def told(ids: list[int]) -> None:
        if not first:
            first.append(time.perf_counter())

    run = serve_by(Engine(graphs, shape_of(graphs.bundle), record=record), graphs, request, told)
    end = time.perf_counter()
    e2e = 1e3 * run.seconds
    return _Timed(run.result, e2e - 1e3 * (end - first[0]), e2e, tuple((*pair, n) for pair, n in sorted(steps.items())))


def _prepared(graphs: Graphs, requests: list[tuple[str, str, Request]]) -> Graphs:
    for _, _, request in requests:
        compile_graphs(graphs, request, Engine(graphs, shape_of(graphs.bundle)))
    _timed(graphs, replace(requests[0][2], max_new_tokens=8))
    return graphs


def measure(sweep: Sweep, say: Callable[[str], None] = lambda text: None) -> Iterator[dict[str, Any]]:
    """One row per round, prompt and bundle.

    A block is one prompt in one round: every bundle serves it there, in random order, so that what is compared ran
    within seconds of each other. Blocks are in random order too. Each bundle must give the same tokens to a prompt.
    """
    rng = random.Random(sweep.seed)
    with tempfile.TemporaryDirectory() as folder:
        ready: dict[tuple[str, int], Graphs] = {}
        for draft, k in sweep.bundles:
            say(f"building {draft} k {k}")
            graphs = Graphs(open_bundle(_bundle(draft, k, Path(folder))))
            requests = _requests(graphs.bundle.path, sweep, graphs.bundle.config("target").eos_token_ids)
            ready[draft, k] = _prepared(graphs, requests)
        blocks = [(n, *request) for n in range(sweep.rounds) for request in requests]
        texts: dict[str, list[int]] = {}
        say("measuring")
        for number, name, entropy, request in rng.sample(blocks, len(blocks)):
            for draft, k in rng.sample(list(ready), len(ready)):
                timed = _timed(ready[draft, k], request)
                ids = timed.result.ids
                yield {
                    "draft": draft, "k": k, "round": number, "prompt": name, "entropy": entropy, "source": "wall",
                    "tokens": len(ids), "identical": texts.setdefault(name, ids) == ids,
                    "ttft_ms": round(timed.ttft_ms, 4), "e2e_ms": round(timed.e2e_ms, 4),
                    "itl_ms": round((timed.e2e_ms - timed.ttft_ms) / max(1, len(ids) - 1), 5),
                    "tokens_per_step": round(timed.result.tokens_per_step, 4), "steps": timed.steps,
                }  # fmt: skip


def pairs(rows: Rows) -> list[tuple[int, int]]:
    """(drafted, accepted) of every step of the rows."""
    return [(drafted, accepted) for r in rows for drafted, accepted, times in r["steps"] for _ in range(times)]


def acceptance_tables(rows: Rows) -> Rows:
    """Acceptance by position of each draft and class, from the bundle with the longest k: input for bench.tune."""
    tables = []
    drafting = [r for r in rows if r["k"]]
    for draft, entropy in sorted({(r["draft"], r["entropy"]) for r in drafting}):
        mine = [r for r in drafting if (r["draft"], r["entropy"]) == (draft, entropy)]
        longest = max(r["k"] for r in mine)
        steps = pairs([r for r in mine if r["k"] == longest])
        found = from_steps(f"demo {entropy}", draft, steps, "demo pair")
        tables.append({"name": found.name, "draft": draft, "unconditional": found.shares, "steps": found.steps,
                       "rate": found.rate, "k": longest})  # fmt: skip
    return tables
