"""`python -m bench.step_costs --bundle DIR --out FILE`: what this machine pays for a step, as a table for switching.

Times every step graph and the prompt's graph of a bundle side by side, by bucket and by count of active sequences,
and turns the ratios into expected gains: tokens of a step at an acceptance rate, times the time of a step of the
target alone, over the time of a fused step. The times are wall times of this machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.pair import read_pair
from bench.provenance import header, write_result
from model.bundle.manifest import DECODE, PREFILL
from model.bundle.schema import step_tag
from model.errors import UserError, run_cli
from model.graph_io import StepInputs, StepOutputs
from model.progress import each
from model.serving.engine import Engine, Runner
from model.serving.ready import shape_of
from model.serving.request import Params, Request, Shape
from model.serving.runtime import Graphs
from model.serving.slots import Slot
from model.serving.switching import FORMAT, TABLE_FILE, Decision, expected_tokens

_STEPS = 8
_ALPHAS = tuple(i / 10 for i in range(11))


@dataclass
class Timed:
    """A runner that notes the seconds of each run by graph."""

    graphs: Runner
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def run(self, tag: str, bucket: int, inputs: StepInputs) -> StepOutputs:
        begin = time.perf_counter()
        outputs = self.graphs.run(tag, bucket, inputs)
        # reading waits for the graph's end
        np.asarray(outputs.accepted)
        self.seconds[tag].append(time.perf_counter() - begin)
        return outputs

    def draft(self, tag: str, bucket: int, inputs: StepInputs) -> Any:
        return self.graphs.draft(tag, bucket, inputs)


@dataclass(frozen=True)
class Cost:
    """Least wall milliseconds of a run of each graph, at one bucket with so many active sequences.

    The least, because other load on the machine only adds. `fused_ms` is by the k of the graph.
    """

    bucket: int
    active: int
    alone_ms: float
    fused_ms: dict[int, float]
    prefill_ms: float


class _OneGraph(Engine):
    """An engine whose steps run the graph of one k, and emit one token each: the cost does not depend on how many."""

    def __init__(self, runner: Runner, shape: Shape, k: int) -> None:
        super().__init__(runner, shape)
        self.k = k

    def _decide(self, seated: list[Slot], most: int) -> Decision:
        return Decision((0,) * len(seated), k=self.k)


def measure(graphs: Graphs, repeats: int, seed: int) -> list[Cost]:
    """The costs of every bucket and every count of active sequences, each pair of graphs in random order."""
    shape, rng = shape_of(graphs.bundle), random.Random(seed)
    for bucket in shape.buckets:
        for tag in (PREFILL, *(step_tag(k, shape.k) for k in (0, *shape.ks))):
            graphs.prepare(tag, bucket)
    cells, lower = [], 0
    for bucket in shape.buckets:
        cells += [(bucket, (lower + bucket) // 2, active) for active in range(1, shape.batch + 1)]
        lower = bucket
    times = {cell: Timed(graphs) for cell in cells}
    for _ in each(range(repeats), "step costs, rounds"):
        for cell in rng.sample(cells, len(cells)):
            _, length, active = cell
            for k in rng.sample((0, *shape.ks), len(shape.ks) + 1):
                _OneGraph(times[cell], shape, k).run(_requests(graphs, length, active, rng))
    return [_cost(cell[0], cell[2], timed, shape) for cell, timed in times.items()]


def _requests(graphs: Graphs, length: int, count: int, rng: random.Random) -> list[Request]:
    vocabulary, params = graphs.bundle.config("target").vocab_size, Params(temperature=rng.choice([0.0, 1.0]))
    return [Request(tuple(rng.randrange(vocabulary) for _ in range(length)), params, _STEPS + 1) for _ in range(count)]


def _cost(bucket: int, active: int, timed: Timed, shape: Shape) -> Cost:
    least_ms = {tag: 1e3 * min(seconds) for tag, seconds in timed.seconds.items()}
    fused_ms = {k: least_ms[step_tag(k, shape.k)] for k in shape.ks}
    return Cost(bucket, active, least_ms[DECODE], fused_ms, least_ms[PREFILL])


def tuning(costs: list[Cost]) -> dict[str, object]:
    """The table for model.serving.switching: buckets weigh the same, and few drafts run on the smallest graph."""
    rows: list[dict[str, float]] = []
    ks = sorted(costs[0].fused_ms)
    for active in sorted({c.active for c in costs}):
        for few in range(1, ks[-1] + 1):
            graph = next(k for k in ks if k >= few)
            ratio = statistics.mean(c.alone_ms / c.fused_ms[graph] for c in costs if c.active == active)
            rows += [
                {"batch": active, "alpha": alpha, "k": few, "gain": round(ratio * expected_tokens(alpha, few), 5)}
                for alpha in _ALPHAS
            ]
    refresh = statistics.mean(c.prefill_ms / c.alone_ms for c in costs)
    return {"format": FORMAT, **header("wall"), "refresh": round(refresh, 4), "rows": rows}


def main(arguments: list[str]) -> None:
    """Measure, print the costs, write the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.step_costs", description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True, help="folder of the bundle")
    parser.add_argument("--out", type=Path, help=f"file of the table (default: {TABLE_FILE} in the bundle)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, each of some steps per graph")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the measurements")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        raise UserError(f"repeats is {options.repeats}; give at least 1")
    graphs = Graphs(read_pair(options.bundle))
    costs = measure(graphs, options.repeats, options.seed)
    out = options.out or options.bundle / TABLE_FILE
    write_result(out, tuning(costs))
    fused = "".join(f" k {k} ms |" for k in costs[0].fused_ms)
    print(f"| bucket | active | target alone ms |{fused} prompt ms (wall, least) |")
    print("|---" * (4 + len(costs[0].fused_ms)) + "|")
    for c in costs:
        fused = "".join(f" {ms:.2f} |" for ms in c.fused_ms.values())
        print(f"| {c.bucket} | {c.active} | {c.alone_ms:.2f} |{fused} {c.prefill_ms:.2f} |")
    print(out)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
