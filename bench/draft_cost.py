"""`python -m bench.draft_cost [--json]`: what a draft step costs against a target pass, and the k that it makes best.

Every time is simulated: the two fused kernels of a layer on nkisim's timeline, and for each of the two all-reduces
of a layer the latency and rate that the chip description assumes. A step is all layers and the head, which
streams its vocabulary shard at the HBM's rate; sampling, the host and launches are not in it.

c = draft step / target pass over one row per sequence, v = what each further row adds to that pass, relative to it;
tokens = (1 - a^(k+1)) / (1 - a) per pass at acceptance rate a, speed-up = tokens / (1 + k c + k v)
(Leviathan et al. 2023, section 3, with v added).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import Any

from bench.kernels.__main__ import simulate
from bench.kernels.layer import BF16, Shard, attention_case, mlp_case
from model.errors import UserError, run_cli
from model.progress import progress
from nkisim.timeline.trn2 import TRN2

DEGREES = (4, 8, 32)
DRAFTS = ("1.7B", "0.6B")
RATES = (0.6, 0.7, 0.8, 0.9, 0.95)
LONGEST = 24
# rows per sequence of the pass from which v is read
VERIFIED = 8


@dataclass(frozen=True)
class Step:
    """Microseconds of one pass over all layers by part, all simulated or assumed from the chip description."""

    attention: float
    mlp: float
    collectives: float
    head: float

    @property
    def total(self) -> float:
        """The whole pass."""
        return self.attention + self.mlp + self.collectives + self.head


# the target verifies eight rows a sequence, and a launch holds 128
_MOST_SEQUENCES = 16


def all_reduce_us(size_bytes: int, case: str = "nominal") -> float:
    """One all-reduce by nkisim's law: a latency, the least certain constant there, and a rate."""
    n = TRN2.at(case)
    return (n.collective_latency_ns + size_bytes / n.collective_bytes_per_ns) / 1e3


def head_us(shard: Shard, lnc: int) -> float:
    """The rank's part of the vocabulary at the rate that its cores draw from HBM."""
    weights = shard.config.vocab_size // shard.tp * shard.config.hidden_size * BF16
    rate = min(lnc * TRN2.dma_engines.value * TRN2.dma_bytes_per_ns.value, TRN2.hbm_bytes_per_ns.value)
    return weights / rate / 1e3


def step(shard: Shard, lnc: int, case: str = "nominal") -> Step:
    """Simulate both halves of one layer and add up a pass."""
    layers = shard.config.num_hidden_layers
    rows = shard.rows * shard.config.hidden_size * BF16
    attention, mlp = (simulate(make(shard, lnc))["us"] for make in (attention_case, mlp_case))
    return Step(layers * attention, layers * mlp, 2 * layers * all_reduce_us(rows, case), head_us(shard, lnc))


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
    targets, drafts = {}, {}
    for tp in DEGREES:
        one, many = (step(Shard("32B", tp, batch, n), lnc, case) for n in (1, VERIFIED))
        targets[tp] = one, (many.total - one.total) / (VERIFIED - 1) / one.total
        for name in DRAFTS:
            drafts[name, tp] = step(Shard(name, tp, batch, 1), lnc, case)
    return [
        _row((name, draft_tp, tp), drafts[name, draft_tp], *targets[tp])
        for tp in DEGREES
        for name in DRAFTS
        for draft_tp in DEGREES
        if draft_tp <= tp
    ]


def _row(key: tuple[str, int, int], draft: Step, target: Step, v: float) -> dict[str, Any]:
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
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Print the table, or one JSON row per pair."""
    parser = argparse.ArgumentParser(prog="python -m bench.draft_cost", description=__doc__)
    parser.add_argument("--batch", type=int, default=4, help="sequences in a pass")
    parser.add_argument("--lnc", type=int, default=1, choices=(1, 2), help="cores per rank")
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
