"""`python -m bench.mixed_load`: a mixed load with switching against every fixed k, wall time, side by side.

Structured prompts are answered greedily; beside them stand open ones, sampled at `--open-temperature`, or with `--hard`
those of 64 prompts of random letters whose drafts are rejected most. Every way serves the same requests in the same
order; the ways run in random order, several times. A fixed k has a bundle of its own, compiled for it: more than
switching has, which runs the graphs of one bundle. Describes the demo pair on this machine and says nothing about
Qwen3-32B.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.mixed_load.requests import Load, kinds, ordered
from bench.pair import read_pair
from bench.provenance import header, said, write_result
from model.bundle.manifest import DECODE, FUSED, PREFILL
from model.errors import UserError, run_cli
from model.progress import each
from model.serving.engine import Engine
from model.serving.ready import shape_of
from model.serving.request import Request, Result
from model.serving.runtime import Graphs
from model.serving.switching import Table, find_table

_RESAMPLES = 2000
SWITCHING = "switching"


@dataclass(frozen=True)
class Way:
    """One way to serve: the graphs of a bundle, with or without speculation, with or without a table."""

    name: str
    graphs: Graphs
    speculative: bool
    table: Table | None = None


@dataclass(frozen=True)
class Row:
    """One pass of the load: milliseconds per token over all sequences, and whether the tokens are the target's.

    The process's own processor time is beside the wall time: other load on the machine hardly lengthens it.
    """

    way: str
    active: int
    repeat: int
    order: str
    tokens: int
    ms_per_token: float
    cpu_ms_per_token: float | None
    steps: int
    refreshes: int
    identical: bool
    source: str = "wall"


def run(way: Way, requests: Sequence[Request], active: int) -> tuple[list[Result], float, float]:
    """Serve the requests, so many at a time; the results, the wall seconds and the processor's."""
    engine = Engine(way.graphs, shape_of(way.graphs.bundle), way.speculative, way.table)
    begin, busy = time.perf_counter(), time.process_time()
    results = [r for at in range(0, len(requests), active) for r in engine.run(requests[at : at + active])]
    return results, time.perf_counter() - begin, time.process_time() - busy


def measure(
    ways: Sequence[Way], loads: dict[str, list[Request]], counts: Sequence[int], repeats: int, rng: random.Random
) -> list[Row]:
    """Every way on every load with each count of active sequences, in random order, after each graph has run once."""
    rows = list[Row]()
    for way in ways:
        for graph in way.graphs.bundle.graphs:
            if graph.tag in (PREFILL, DECODE, FUSED):
                way.graphs.prepare(graph.tag, graph.bucket)
    alone = next(w for w in ways if not w.speculative)
    expected = {order: [r.ids for r in run(alone, requests, 1)[0]] for order, requests in loads.items()}
    cells = [(order, active, repeat) for repeat in range(repeats) for order in loads for active in counts]
    # all ways of a cell run one after the other, so that they share the machine's other load
    passes = [(way, *cell) for cell in rng.sample(cells, len(cells)) for way in rng.sample(list(ways), len(ways))]
    for way, order, active, repeat in each(passes, "passes"):
        results, seconds, busy = run(way, loads[order], active)
        tokens = sum(len(r.ids) for r in results)
        rows.append(
            Row(way.name, active, repeat, order, tokens, round(1e3 * seconds / tokens, 5),
                round(1e3 * busy / tokens, 5), sum(r.steps for r in results), sum(r.refreshes for r in results),
                [r.ids for r in results] == expected[order])
        )  # fmt: skip
    return rows


def ratio(
    rows: Sequence[Row], way: str, other: str, order: str, figure: str = "ms_per_token"
) -> tuple[float, float, float]:
    """Time of the other way over the time of this way, and its 95 % bootstrap interval.

    A ratio is of two passes of one cell, which ran side by side; cells are drawn again.
    """
    cells = {(r.way, r.active, r.repeat): getattr(r, figure) for r in rows if r.order == order}
    found = [cells[other, active, repeat] / ms for (own, active, repeat), ms in cells.items() if own == way]
    rng = random.Random(0)
    drawn = sorted(statistics.mean(rng.choices(found, k=len(found))) for _ in range(_RESAMPLES))
    return statistics.mean(found), drawn[int(0.025 * _RESAMPLES)], drawn[int(0.975 * _RESAMPLES)]


def _over(rows: Sequence[Row], way: str, order: str, figure: str) -> str:
    if any(getattr(r, figure) is None for r in rows):
        return "-"
    value, low, high = ratio(rows, SWITCHING, way, order, figure)
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _rank(way: str) -> tuple[bool, int]:
    return (False, 0) if way == SWITCHING else (True, int(way.removeprefix("k ")))


def table(rows: Sequence[Row]) -> str:
    """A line per order and way; no time is shown beside tokens that differ from the target's."""
    counts = sorted({r.active for r in rows})
    shown_counts = ", ".join(map(str, counts))
    lines = [
        f"| order | way | ms/token with {shown_counts} active, p50 (wall) | its time over switching's (wall) "
        "| the same (processor) | identical |",
        "|---|---|---|---|---|---|",
    ]
    for order in sorted({r.order for r in rows}):
        for way in sorted({r.way for r in rows}, key=_rank):
            own = [r for r in rows if (r.way, r.order) == (way, order)]
            if not all(r.identical for r in own):
                lines.append(f"| {order} | {way} | - | - | - | no |")
                continue
            each = [statistics.median(r.ms_per_token for r in own if r.active == n) for n in counts]
            over = " | ".join(_over(rows, way, order, figure) for figure in ("ms_per_token", "cpu_ms_per_token"))
            shown = ", ".join(f"{v:.2f}" for v in each)
            lines.append(f"| {order} | {way} | {shown} | {over} | yes |")
    return "\n".join(lines)


def show(result: dict[str, Any]) -> str:
    """A file of results as text: where it comes from, what was served, and the table."""
    return f"{said(result)}; {result['load']}\n\n{table([Row(**row) for row in result['rows']])}"


def _ways(options: argparse.Namespace) -> list[Way]:
    own = Graphs(read_pair(options.bundle))
    tuned = find_table(options.bundle, options.tuning)
    if tuned is None:
        raise UserError(f"{options.bundle} has no tuning table; make one with python -m bench.step_costs")
    ways = [Way(SWITCHING, own, True, tuned), Way("k 0", own, False), Way(f"k {own.bundle['k']}", own, True)]
    for other in options.fixed:
        graphs = Graphs(read_pair(other))
        ways.append(Way(f"k {graphs.bundle['k']}", graphs, True))
    return ways


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.mixed_load", description=__doc__)
    parser.add_argument("--show", type=Path, help="print the table of this file of results, and measure nothing")
    parser.add_argument("--bundle", type=Path, help="bundle that switches, with a batch of several")
    parser.add_argument("--fixed", type=Path, nargs="*", default=[], help="bundles of other k to compare with")
    parser.add_argument("--tuning", type=Path, help="table (default: the bundle's)")
    parser.add_argument("--active", type=int, nargs="+", default=[1, 4], help="active sequences (default: 1 4)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt")
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt of each kind")
    parser.add_argument("--open-temperature", type=float, default=1.0)
    parser.add_argument("--hard", type=int, default=0, help="so many hard prompts instead of the open ones")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the passes")
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    options = parser.parse_args(arguments)
    if not (options.bundle or options.show):
        raise UserError("there is nothing to do; give --bundle, or --show with a file of results")
    if min(options.tokens, options.every, options.repeats) < 1 or options.hard < 0:
        raise UserError("--tokens, --every and --repeats are counts of at least 1, and --hard of at least 0")
    return options


def main(arguments: list[str]) -> None:
    """Print the table; write the results if a file is given."""
    options = _options(arguments)
    if options.show:
        try:
            print(show(json.loads(options.show.read_text(encoding="utf-8"))))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UserError(f"{options.show} is no result of this command ({type(error).__name__}: {error})") from error
        return
    result, ways = header("wall"), _ways(options)
    most = min(w.graphs.bundle["batch"] for w in ways)
    if not all(1 <= n <= most for n in options.active):
        raise UserError(f"--active is {options.active}; these bundles serve 1 to {most} sequences at once")
    load = Load(options.tokens, options.every, options.open_temperature, options.hard)
    of_kinds = kinds(ways[0].graphs, load)
    loads = {order: ordered(of_kinds, order) for order in ("grouped", "mixed")}
    others = f"the hardest of 64 prompts: {len(of_kinds[1])}" if load.hard else f"open: {len(of_kinds[1])}"
    result["load"] = f"structured: {len(of_kinds[0])}, {others}; {load}; switching on the graphs of {ways[2].name}"
    rows = measure(ways, loads, options.active, options.repeats, random.Random(options.seed))
    result["rows"] = [asdict(r) for r in rows]
    if options.out:
        write_result(options.out, result)
    print(show(result))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
