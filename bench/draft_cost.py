"""`python -m bench.draft_cost [--json]`: what a draft step costs against a target pass, and the k that it makes best.

Every time is simulated: passes, the best k and its speed-up are those of `bench.tune`, with its defaults, at acceptance
rates that are the same at every position. c = draft step / target pass over one row per sequence.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from bench.kernels.layer import Shard
from bench.tune.acceptance import at_rate
from bench.tune.choose import TARGET, Setup, Simulated, best_k, draft_pass
from bench.tune.passes import chip_with, simulated_pass
from model.errors import UserError, run_cli
from model.progress import progress
from nkisim.timeline.chip import Chip

DEGREES = (4, 8, 32)
DRAFTS = ("1.7B", "0.6B")
RATES = (0.6, 0.7, 0.8, 0.9, 0.95)
_LEGEND = (
    "c: a draft pass in target passes over one row; a=0.6 4 (1.79): where 0.6 of the drafts are accepted, 4 drafts a "
    "step are best, 1.79 times the target alone"
)

# eight rows a sequence, and a launch holds 128
_MOST_SEQUENCES = 16
# what an all-reduce between chips is uncertain in
_ALL_REDUCE = ("collective_start_ns", "collective_hop_ns", "collective_ring_share", "collective_bytes_per_ns")


def rows(batch: int, lnc: int, case: str = "nominal") -> list[dict[str, Any]]:
    """One row per target degree, draft and draft degree; `case` is the end of the all-reduce's band."""
    chip = chip_with(case, *_ALL_REDUCE)
    return [
        _row(Setup(name, tp, draft_tp, batch, lnc), chip)
        for tp in DEGREES
        for name in DRAFTS
        for draft_tp in DEGREES
        if draft_tp <= tp
    ]


def _row(at: Setup, chip: Chip) -> dict[str, Any]:
    draft, target = draft_pass(at, chip), simulated_pass(Shard(TARGET, at.tp, at.batch, 1), at.lnc, chip)
    latency = Simulated(chip)
    chosen = {str(rate): best_k(latency, at, at_rate(rate, latency.longest(at))) for rate in RATES}
    return {
        "draft": at.draft, "draft_tp": at.draft_tp, "tp": at.tp, "source": "simulated", "c": draft.total / target.total,
        "draft_us": draft.total, "draft_collectives_us": draft.collectives,
        "target_us": target.total, "target_collectives_us": target.collectives,
        "best_k": {rate: choice.k for rate, choice in chosen.items()},
        "speed_up": {rate: choice.gain for rate, choice in chosen.items()},
    }  # fmt: skip


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: a cell is the best k and the speed-up that it gives."""
    heads = ["target 32B", "draft", "draft pass ms (simulated)", "of it all-reduces", "target pass ms (simulated)",
             "of it all-reduces", "c", *(f"a={rate}" for rate in RATES)]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in found:
        cells = [
            f"TP{row['tp']}", f"{row['draft']} TP{row['draft_tp']}", f"{row['draft_us'] / 1e3:.2f}",
            f"{row['draft_collectives_us'] / 1e3:.2f}", f"{row['target_us'] / 1e3:.2f}",
            f"{row['target_collectives_us'] / 1e3:.2f}", f"{row['c']:.3f}",
            *(f"{row['best_k'][str(rate)]} ({row['speed_up'][str(rate)]:.2f})" for rate in RATES),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _LEGEND])


def main(arguments: list[str]) -> None:
    """Print the table, or one JSON row per pair."""
    parser = argparse.ArgumentParser(prog="python -m bench.draft_cost", description=__doc__)
    parser.add_argument("--batch", type=int, default=4, help="sequences in a pass")
    parser.add_argument("--lnc", type=int, default=2, choices=(1, 2), help="cores per rank")
    parser.add_argument("--all-reduce", default="nominal", choices=("low", "nominal", "high"),
                        help="which end of the all-reduce's assumed band")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON row per pair")
    options = parser.parse_args(arguments)
    if not 1 <= options.batch <= _MOST_SEQUENCES:
        raise UserError(
            f"batch is {options.batch}, 1 to {_MOST_SEQUENCES} sequences of 8 rows fit the kernels' 128 rows"
        )
    with progress("simulating the passes"):
        found = rows(options.batch, options.lnc, options.all_reduce)
    print("\n".join(map(json.dumps, found)) if options.json else table(found))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
