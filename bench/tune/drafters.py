"""`python -m bench.tune.drafters`: what a step costs and gains with each drafter that a build takes, for Qwen3-32B.

gain = tokens of a step / (draft passes + one target pass over k + 1 rows), in target passes over one row. The passes
are those that `model/drafting.py` declares, their times simulated with a band; tokens of a step are published or
assumed, and each row says which. A pass that draws fewer ids than it has rows is billed for all of them. n-gram look-up
has no pass, and no published tokens a step for this target: its row is the gain of one draft a step.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from bench.kernels.layer import Shard
from bench.provenance import header
from bench.tune import choose, passes, published
from model.drafting import KINDS
from model.errors import run_cli
from model.progress import progress
from nkisim.timeline.chip import CASES


@dataclass(frozen=True)
class Known:
    """Tokens that a step of k drafts keeps, for a drafter and the size of its model, and where the number is from."""

    drafter: str
    model: str
    k: int
    tokens: float
    workload: str
    assumed: bool
    source: str


_PARD = "no acceptance of PARD with a 32B target is published; "
_PARD_2 = "PARD-2 with Qwen3-8B, k = 15 (arXiv 2605.08632), taken over"
_LOOK_UP = "one draft a step; gains of 2 to 4 are reported for suffix and n-gram look-up"
KNOWN = (
    *(
        Known("chain", "1.7B", k, tokens, "MT-Bench", False, published.SOURCE)
        for k, tokens in enumerate(published.MT_BENCH_LENGTHS, 1)
    ),
    Known("parallel", "0.6B", 3, 2.4, "MT-Bench", True, _PARD + "between a chain's 2.80 of 1.7B and less of 0.6B"),
    Known("parallel", "0.6B", 7, 3.0, "MT-Bench", True, _PARD + "the low end of what is assumed"),
    Known("parallel", "0.6B", 7, 3.4, "MT-Bench", True, _PARD + "the high end of what is assumed"),
    Known("parallel", "0.6B", 15, 4.02, "MT-Bench", True, _PARD_2),
    Known("ngram", "", 7, 2.0, "edits", True, _LOOK_UP),
)  # fmt: skip


def draft_us(known: Known, setup: choose.Setup, case: str) -> float:
    """Microseconds of the passes of a drafter's model in a step, simulated."""
    total = 0.0
    for made in KINDS[known.drafter].passes(known.k, known.k):
        shard = Shard(known.model, setup.draft_tp, setup.batch, made.rows)
        took = passes.simulated_pass(shard, setup.lnc, passes.CHIPS[case])
        total += took.total if made.drawn else took.total - took.head - took.sampling
    return total


def row(known: Known, setup: choose.Setup) -> dict[str, Any]:
    """A known drafter's step in target passes, and its gain with the band of all uncertain constants."""
    gains, steps = {}, {}
    for case, latency in choose.band().items():
        one, step = latency.target(setup, 1), latency.target(setup, known.k + 1) + draft_us(known, setup, case)
        steps[case], gains[case] = step / one, known.tokens * one / step
    low, high = min(gains.values()), max(gains.values())
    return asdict(known) | {"step": steps["nominal"], "gain": gains["nominal"], "gain_low": low, "gain_high": high}


def main(arguments: list[str]) -> None:
    """Print a row for each known drafter."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune.drafters", description=__doc__)
    parser.add_argument("--tp", type=int, default=32, help="ranks of the target (default: 32)")
    parser.add_argument("--draft-tp", type=int, default=32, help="ranks of the draft (default: 32)")
    parser.add_argument("--batch", type=int, default=4, choices=(1, 2, 4), help="sequences together (default: 4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    setup = choose.Setup("", options.tp, options.draft_tp, options.batch)
    with progress(f"simulating the passes of {len(KNOWN)} rows, {len(CASES)} ends of the band"):
        rows = [row(known, setup) for known in KNOWN]
    if options.json:
        print(json.dumps(header("simulated") | {"tp": setup.tp, "draft_tp": setup.draft_tp, "rows": rows}))
        return
    print("| drafter | k | step, target passes (simulated) | tokens a step | gain [band] | tokens from |")
    print("|---|---|---|---|---|---|")
    for r in rows:
        name = f"{r['drafter']} {r['model']}".strip()
        tokens = f"{r['tokens']:.2f}{' (assumed)' if r['assumed'] else ''}"
        band = f"{r['gain']:.2f} [{r['gain_low']:.2f}, {r['gain_high']:.2f}]"
        print(f"| {name} | {r['k']} | {r['step']:.2f} | {tokens} | {band} | {r['workload']}: {r['source']} |")


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
