"""`python -m bench.filter_cost`: what a step costs more when a row filters, before and since the draft guesses.

Every time is simulated: a step is composed of the passes of `bench.tune.passes`, of the launches of weights_above that
its draws ask for, and of the collectives that join their sums. Exact, a draw is searched for four bits a launch, top-k
and top-p one after the other (`model/nki/filter_floor.py`); guessed, it takes two launches (`model/filters.py`).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from bench.kernels.__main__ import simulate
from bench.kernels.case import Case, normal
from bench.kernels.layer import Shard
from bench.kernels.sampling import FP32, THRESHOLDS, VOCABULARY, above_arguments
from bench.tune.choose import Setup, draft_pass
from bench.tune.passes import collective_us, simulated_pass
from model.errors import UserError, run_cli
from model.filters import GUESSED_STEPS
from model.nki.filter_floor import ALL_GATHERS, GUESS_GATHERS
from model.progress import progress
from nki_kernels import roofline
from nki_kernels.sampling.weights_above import weights_above_kernel
from nkisim.timeline.chip import Chip
from nkisim.timeline.trn2 import TRN2

TP, BATCH = 32, 4


@dataclass(frozen=True)
class StepCost:
    """Microseconds (simulated): a step of which no row filters, and what a filtered one adds."""

    unfiltered: float
    target: float
    draft_exact: float
    draft_guessed: float

    def added(self, draft: float) -> float:
        """The share that filters add with this draft."""
        return (self.target + draft) / self.unfiltered


@cache
def above_us(rows: int, thresholds: int, lnc: int, ranks: int = TP) -> float:
    """One launch of weights_above on the ids of one of so many ranks."""
    columns = VOCABULARY // ranks

    def arguments() -> tuple[Any, ...]:
        return *above_arguments(rows, columns)[:-1], normal((rows, thresholds), FP32)

    cost = partial(roofline.weights_above, rows, columns, itemsize=FP32)
    row = simulate(Case(f"R{rows}-J{thresholds}", weights_above_kernel, arguments, cost, lnc))
    return float(row["us"])


def _gather_us(rows: int, numbers: int, lnc: int, ranks: int = TP, chip: Chip = TRN2) -> float:
    return collective_us(chip, ranks, lnc, rows * numbers * FP32)


def exact_us(rows: int, lnc: int) -> float:
    """The exact filters of a pass over these rows: each row's best, two searches, and the mass between them."""
    searches = ALL_GATHERS - 2
    launch = searches * above_us(rows, THRESHOLDS, lnc) + above_us(rows, 1, lnc)
    return launch + searches * _gather_us(rows, THRESHOLDS, lnc) + 2 * _gather_us(rows, 1, lnc)


def guessed_us(rows: int, lnc: int, ranks: int = TP, chip: Chip = TRN2) -> float:
    """A draft's guess, its head on so many ranks: each row's best, then twice count and mass above the tried logits, as
    twice the rows."""
    tried, launches = len(GUESSED_STEPS), GUESS_GATHERS - 1
    each = above_us(2 * rows, tried, lnc, ranks) + _gather_us(2 * rows, tried, lnc, ranks, chip)
    return launches * each + _gather_us(rows, 1, lnc, ranks, chip)


def step_cost(k: int, lnc: int) -> StepCost:
    """A step of Qwen3-32B with Qwen3-1.7B."""
    target = simulated_pass(Shard("32B", TP, BATCH, k + 1), lnc)
    draft = draft_pass(Setup("1.7B", TP, TP, BATCH, lnc))
    return StepCost(
        target.total + k * draft.total,
        exact_us(BATCH * (k + 1), lnc),
        k * exact_us(BATCH, lnc),
        k * guessed_us(BATCH, lnc),
    )


def table(costs: dict[int, StepCost]) -> str:
    """Markdown, a line a number of cores."""
    lines = [
        "| cores a rank | unfiltered us | target's filters us | draft's, exact us | draft's, guessed us "
        "| filtered, before | filtered, now |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {lnc} | {c.unfiltered:.0f} | {c.target:.0f} | {c.draft_exact:.0f} | {c.draft_guessed:.0f} "
        f"| {c.added(c.draft_exact):+.1%} | {c.added(c.draft_guessed):+.1%} |"
        for lnc, c in costs.items()
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.filter_cost", description=__doc__)
    parser.add_argument("--k", type=int, default=7, help="draft tokens a step, 1 to 7")
    options = parser.parse_args(arguments)
    if not 1 <= options.k <= 7:
        raise UserError(f"k is {options.k}; a launch of weights_above takes 32 rows, so give 1 to 7 at batch {BATCH}")
    with progress("simulating the step"):
        costs = {lnc: step_cost(options.k, lnc) for lnc in (1, 2)}
    print(f"Qwen3-32B + 1.7B, tp {TP}, batch {BATCH}, k {options.k}, simulated, composed from kernels\n")
    print(table(costs))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
