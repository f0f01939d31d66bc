"""`python -m bench.mixed_load`: a mixed load with switching against every fixed k, wall time, side by side.

Structured prompts are answered greedily, open ones sampled at `--open-temperature`. Every way serves the same requests
in the same order with 1, 2, ... active sequences; the ways run in random order, several times. A fixed k has a bundle
of its own, compiled for it: more than switching has, which runs the graphs of one bundle. Describes the demo pair on
this machine and says nothing about Qwen3-32B.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import track

from bench.quality import PROMPTS, load_prompts
from model.artifact import DECODE, FUSED, PREFILL, read_bundle
from model.engine import Engine, Params, Request, Result
from model.errors import UserError, run_cli
from model.generate import shape_of
from model.runtime import Graphs
from model.switching import Table, find_table
from model.text import load_tokenizer

_RESAMPLES = 2000


@dataclass(frozen=True)
class Way:
    """One way to serve: the graphs of a bundle, with or without speculation, with or without a table."""

    name: str
    graphs: Graphs
    speculative: bool
    table: Table | None = None


@dataclass(frozen=True)
class Row:
    """One pass of the load: wall milliseconds per token over all sequences, and whether the tokens are the target's."""

    way: str
    active: int
    repeat: int
    order: str
    tokens: int
    ms_per_token: float
    steps: int
    refreshes: int
    identical: bool
    source: str = "wall"


def load(graphs: Graphs, options: argparse.Namespace, order: str) -> list[Request]:
    """The requests of the prompt file; `grouped` keeps the kinds together, `mixed` takes them in turns."""
    tokenizer, stops = load_tokenizer(graphs.bundle.path), graphs.bundle.config("target").eos_token_ids
    kinds = [[p for p in load_prompts(PROMPTS) if p[1] == kind][:: options.every] for kind in ("structured", "open")]
    turns = [p for pair in zip(*kinds, strict=True) for p in pair]
    prompts = turns if order == "mixed" else [*kinds[0], *kinds[1]]
    params = {"structured": 0.0, "open": options.open_temperature}
    return [
        Request(tuple(tokenizer.encode(text).ids), Params(params[kind], seed=i), options.tokens, stops)
        for i, (_, kind, text) in enumerate(prompts)
    ]


def run(way: Way, requests: Sequence[Request], active: int) -> tuple[list[Result], float]:
    """Serve the requests, so many at a time; the results and the wall seconds."""
    engine = Engine(way.graphs, shape_of(way.graphs.bundle), way.speculative, way.table)
    begin = time.perf_counter()
    results = [r for at in range(0, len(requests), active) for r in engine.run(requests[at : at + active])]
    return results, time.perf_counter() - begin


def measure(ways: Sequence[Way], loads: dict[str, list[Request]], repeats: int, seed: int) -> list[Row]:
    """Every way on every load with 1 to 4 active sequences, in random order, after each graph has run once."""
    rng, rows = random.Random(seed), list[Row]()
    for way in ways:
        for bucket in way.graphs.bundle["buckets"]:
            for tag in (PREFILL, DECODE, FUSED):
                way.graphs.prepare(tag, bucket)
    alone = next(w for w in ways if not w.speculative)
    expected = {order: [r.ids for r in run(alone, requests, 1)[0]] for order, requests in loads.items()}
    most = min(w.graphs.bundle["batch"] for w in ways)
    cells = [(way, order, active) for way in ways for order in loads for active in range(1, most + 1)]
    passes = [(cell, repeat) for repeat in range(repeats) for cell in rng.sample(cells, len(cells))]
    for (way, order, active), repeat in track(passes, "passes", transient=True):
        results, seconds = run(way, loads[order], active)
        tokens = sum(len(r.ids) for r in results)
        rows.append(
            Row(way.name, active, repeat, order, tokens, 1e3 * seconds / tokens, sum(r.steps for r in results),
                sum(r.refreshes for r in results), [r.ids for r in results] == expected[order])
        )  # fmt: skip
    return rows


def total(rows: Sequence[Row], way: str, order: str, pick: Callable[[list[float]], float]) -> float:
    """Milliseconds per token, each count of active sequences weighing the same."""
    own = [r for r in rows if (r.way, r.order) == (way, order)]
    counts = sorted({r.active for r in own})
    return statistics.mean(pick([r.ms_per_token for r in own if r.active == n]) for n in counts)


def ratio(rows: Sequence[Row], way: str, other: str, order: str) -> tuple[float, float, float]:
    """Time of the other way over the time of this way, and its 95 % bootstrap interval over repeats."""
    rng = random.Random(0)

    def resampled(values: list[float]) -> float:
        return statistics.mean(rng.choices(values, k=len(values)))

    drawn = sorted(total(rows, other, order, resampled) / total(rows, way, order, resampled) for _ in range(_RESAMPLES))
    plain = total(rows, other, order, statistics.mean) / total(rows, way, order, statistics.mean)
    return plain, drawn[int(0.025 * _RESAMPLES)], drawn[int(0.975 * _RESAMPLES)]


def table(rows: Sequence[Row]) -> str:
    """A line per order and way; no time is shown beside tokens that differ from the target's."""
    lines = ["| order | way | ms/token by active sequences, p50 (wall) | all | its time over switching's | identical |"]
    lines.append("|---|---|---|---|---|---|")
    for order in dict.fromkeys(r.order for r in rows):
        for way in sorted({r.way for r in rows}):
            own = [r for r in rows if (r.way, r.order) == (way, order)]
            if not all(r.identical for r in own):
                lines.append(f"| {order} | {way} | - | - | - | no |")
                continue
            counts = sorted({r.active for r in own})
            each = [statistics.median(r.ms_per_token for r in own if r.active == n) for n in counts]
            value, low, high = ratio(rows, "switching", way, order)
            shown = " ".join(f"{v:.2f}" for v in each)
            mean = total(rows, way, order, statistics.mean)
            lines.append(f"| {order} | {way} | {shown} | {mean:.2f} | {value:.3f} [{low:.3f}, {high:.3f}] | yes |")
    return "\n".join(lines)


def _ways(options: argparse.Namespace) -> list[Way]:
    own = Graphs(read_bundle(options.bundle))
    tuned = find_table(options.bundle, options.tuning)
    if tuned is None:
        raise UserError(f"{options.bundle} has no tuning table; make one with python -m bench.step_costs")
    k = own.bundle["k"]
    ways = [Way("switching", own, True, tuned), Way("k 0, target alone", own, False), Way(f"k {k}", own, True)]
    for other in options.fixed:
        graphs = Graphs(read_bundle(other))
        ways.append(Way(f"k {graphs.bundle['k']}", graphs, True))
    return ways


def main(arguments: list[str]) -> None:
    """Print the table; write the rows if a file is given."""
    parser = argparse.ArgumentParser(prog="python -m bench.mixed_load", description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True, help="bundle that switches, with a batch of several")
    parser.add_argument("--fixed", type=Path, nargs="*", default=[], help="bundles of other k to compare with")
    parser.add_argument("--tuning", type=Path, help="table (default: the bundle's)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt")
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt of each kind")
    parser.add_argument("--open-temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the passes")
    parser.add_argument("--rows", type=Path, help="file for the rows, JSON lines")
    options = parser.parse_args(arguments)
    ways = _ways(options)
    loads = {order: load(ways[0].graphs, options, order) for order in ("grouped", "mixed")}
    rows = measure(ways, loads, options.repeats, options.seed)
    if options.rows:
        options.rows.write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
