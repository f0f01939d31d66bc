"""`python -m bench.draft_cost [--json]`: what a draft step costs against a target pass, and the k that it makes best.

Every time is simulated: a step is a pass as `bench.tune.passes` has it, with the defaults of `bench.tune`.

c = draft step / target pass over one row per sequence, v = what each further row adds to that pass, relative to it;
tokens = (1 - a^(k+1)) / (1 - a) per pass at acceptance rate a, speed-up = tokens / (1 + k c + k v)
(Leviathan et al. 2023, section 3, with v added).
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from bench.kernels.layer import Shard
from bench.tune.passes import Pass, chip_with, simulated_pass
from model.errors import UserError, run_cli
from model.progress import progress

DEGREES = (4, 8, 32)
DRAFTS = ("1.7B", "0.6B")
RATES = (0.6, 0.7, 0.8, 0.9, 0.95)
LONGEST = 24
# rows per sequence of the pass from which v is read
VERIFIED = 8
_LEGEND = (
    "c: a draft pass in target passes over one row; v: what each further row adds to that pass, in such passes; "
    "a=0.6 4 (1.79): where 0.6 of the drafts are accepted, 4 drafts a step are best, 1.79 times the target alone"
)

# the target verifies eight rows a sequence, and a launch holds 128
_MOST_SEQUENCES = 16
# what an all-reduce between chips is uncertain in
_ALL_REDUCE = ("collective_start_ns", "collective_hop_ns", "collective_ring_share", "collective_bytes_per_ns")


def tokens(rate: float, k: int) -> float:
    """Expected tokens of one pass over k drafted ones."""
    return sum(rate**i for i in range(k + 1))


def best(rate: float, c: float, v: float) -> tuple[int, float]:
    """The k from 0, no speculation, to LONGEST with the largest speed-up, and that speed-up."""
    ups = [tokens(rate, k) / (1 + k * c + k * v) for k in range(LONGEST + 1)]
    k = max(range(len(ups)), key=ups.__getitem__)
    return k, ups[k]


def rows(batch: int, lnc: int, case: str = "nominal") -> list[dict[str, Any]]:
    """One row per target degree, draft and draft degree; `case` is the end of the all-reduce's band."""
    chip = chip_with(case, *_ALL_REDUCE)
    targets, drafts = {}, {}
    for tp in DEGREES:
        one, many = (simulated_pass(Shard("32B", tp, batch, n), lnc, chip) for n in (1, VERIFIED))
        targets[tp] = one, (many.total - one.total) / (VERIFIED - 1) / one.total
        for name in DRAFTS:
            drafts[name, tp] = simulated_pass(Shard(name, tp, batch, 1), lnc, chip)
    return [
        _row((name, draft_tp, tp), drafts[name, draft_tp], *targets[tp])
        for tp in DEGREES
        for name in DRAFTS
        for draft_tp in DEGREES
        if draft_tp <= tp
    ]


def _row(key: tuple[str, int, int], draft: Pass, target: Pass, v: float) -> dict[str, Any]:
    c = draft.total / target.total
    chosen = {rate: best(rate, c, v) for rate in RATES}
    return {
        "draft": key[0], "draft_tp": key[1], "tp": key[2], "source": "simulated", "c": c, "v": v,
        "draft_us": draft.total, "draft_collectives_us": draft.collectives,
        "target_us": target.total, "target_collectives_us": target.collectives,
        "best_k": {str(rate): k for rate, (k, _) in chosen.items()},
        "speed_up": {str(rate): up for rate, (_, up) in chosen.items()},
    }  # fmt: skip


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: a cell is the best k and the speed-up that it gives."""
    heads = ["target 32B", "draft", "draft pass ms (simulated)", "of it all-reduces", "target pass ms (simulated)",
             "of it all-reduces", "c", "v", *(f"a={rate}" for rate in RATES)]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in found:
        cells = [
            f"TP{row['tp']}", f"{row['draft']} TP{row['draft_tp']}", f"{row['draft_us'] / 1e3:.2f}",
            f"{row['draft_collectives_us'] / 1e3:.2f}", f"{row['target_us'] / 1e3:.2f}",
            f"{row['target_collectives_us'] / 1e3:.2f}", f"{row['c']:.3f}", f"{row['v']:.4f}",
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
