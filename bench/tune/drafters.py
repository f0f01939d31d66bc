"""`python -m bench.tune.drafters`: what a step costs and gains with each drafter that a build takes, for Qwen3-32B.

gain = tokens of a step / (draft passes + one target pass over k + 1 rows), in target passes over one row. The passes
are those that `model/drafting.py` declares, their times simulated with a band; tokens of a step are published or
assumed, and each row says which. A pass that draws fewer ids than it has rows is billed for all of them. n-gram look-up
has no pass, and no published tokens a step for this target: its row is the gain of one draft a step.

The answer: the drafter, k and ranks of the draft with the largest gain for each workload, from published tokens alone
and with what is assumed, in each of the three regimes of collectives (`bench.tune.regimes`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.provenance import header
from bench.tune import choose, heads, passes, published
from bench.tune.regimes import REGIMES
from bench.tune.text import markdown
from model.drafting import KINDS
from model.errors import run_cli
from model.progress import progress
from nkisim.timeline.chip import CASES, Chip


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
_EAGLE3 = "RedHatAI/Qwen3-32B-speculator.eagle3; " + published.SOURCE
_MEDUSA = "no heads for Qwen3-32B are published; below EAGLE-3's 2.39, for they do not see each other's drafts"
_LOOK_UP = "one draft a step; gains of 2 to 4 are reported for suffix and n-gram look-up"
KNOWN = (
    *(
        Known("chain", "1.7B", k, tokens, "MT-Bench", False, published.SOURCE)
        for k, tokens in enumerate(published.MT_BENCH_LENGTHS, 1)
    ),
    *(
        Known("eagle3", "head", k, tokens, "MT-Bench", False, _EAGLE3)
        for k, tokens in enumerate(published.EAGLE3_MT_BENCH_LENGTHS, 1)
    ),
    Known("medusa", "heads", 4, 1.9, "MT-Bench", True, _MEDUSA),
    Known("parallel", "0.6B", 3, 2.4, "MT-Bench", True, _PARD + "between a chain's 2.80 of 1.7B and less of 0.6B"),
    Known("parallel", "0.6B", 7, 3.0, "MT-Bench", True, _PARD + "the low end of what is assumed"),
    Known("parallel", "0.6B", 7, 3.4, "MT-Bench", True, _PARD + "the high end of what is assumed"),
    Known("parallel", "0.6B", 15, 4.02, "MT-Bench", True, _PARD_2),
    Known("ngram", "", 7, 2.0, "edits", True, _LOOK_UP),
)  # fmt: skip


def draft_us(known: Known, setup: choose.Setup, chip: Chip) -> float:
    """Microseconds of the passes of a drafter's model in a step, simulated."""
    total = 0.0
    for number, made in enumerate(KINDS[known.drafter].passes(known.k, known.k)):
        if known.drafter == "medusa":
            total += heads.medusa_us(setup, chip, made.drawn)
        elif known.drafter == "eagle3":
            total += heads.eagle3_us(setup, chip, made.rows, first=not number)
        else:
            took = choose.draft_pass(replace(setup, draft=known.model), chip, made.rows)
            total += took.total if made.drawn else took.total - took.head - took.sampling
    return total


def gain(known: Known, setup: choose.Setup, chip: Chip) -> tuple[float, float]:
    """A step in target passes over one row, and the tokens that it keeps over them."""
    latency = choose.Simulated(chip)
    one = latency.target(setup, 1)
    step = (latency.target(setup, known.k + 1) + draft_us(known, setup, chip)) / one
    return step, known.tokens / step


def row(known: Known, setup: choose.Setup, chip: Chip | None = None) -> dict[str, Any]:
    """A known drafter's step in target passes, and its gain: with the band of all uncertain constants, or on a chip."""
    chips = passes.CHIPS if chip is None else {"nominal": chip}
    found = {case: gain(known, setup, one) for case, one in chips.items()}
    gains = sorted(g for _, g in found.values())
    step, nominal = found["nominal"]
    about = asdict(known) | {"draft_tp": setup.draft_tp, "step": step, "gain": nominal}
    return about | {"gain_low": gains[0], "gain_high": gains[-1]}


def answers(setup: choose.Setup, degrees: Sequence[int]) -> list[dict[str, Any]]:
    """The row with the largest gain for each workload, regime and evidence: published tokens alone, or assumed ones."""
    setups, best = [replace(setup, draft_tp=degree) for degree in degrees], []
    # the law by hops is nkisim's own: its constants have the band
    chips = {name: None if name == "by hops" else chip for name, chip in REGIMES.items()}
    for regime, chip in chips.items():
        rows = [row(known, s, chip) for known in KNOWN for s in (setups if KINDS[known.drafter].has_model else [setup])]
        for workload in dict.fromkeys(known.workload for known in KNOWN):
            for evidence, assumed in (("published", (False,)), ("with assumptions", (False, True))):
                mine = [r for r in rows if r["workload"] == workload and r["assumed"] in assumed]
                if mine:
                    largest = max(mine, key=lambda r: r["gain"])
                    best.append({"regime": regime, "evidence": evidence} | largest)
    return best


def answers_as_text(best: Sequence[dict[str, Any]]) -> str:
    """A line for each workload, evidence and regime."""
    heads_of = ["workload", "tokens a step", "collectives", "drafter", "k", "draft-tp", "gain (simulated) [band]"]
    lines = []
    for r in sorted(best, key=lambda r: (r["workload"], r["evidence"])):
        band = f" [{r['gain_low']:.2f}, {r['gain_high']:.2f}]" if r["gain_low"] < r["gain_high"] else ""
        name, ranks = f"{r['drafter']} {r['model']}".strip(), str(r["draft_tp"]) if r["model"] else ""
        shown = [r["workload"], r["evidence"], r["regime"], name, str(r["k"]), ranks, f"{r['gain']:.2f}{band}"]
        lines.append(shown)
    return markdown(heads_of, lines)


def main(arguments: list[str]) -> None:
    """Print a row for each known drafter."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune.drafters", description=__doc__)
    parser.add_argument("--tp", type=int, default=32, help="ranks of the target (default: 32)")
    parser.add_argument("--draft-tp", type=int, default=32, help="ranks of the draft (default: 32)")
    parser.add_argument("--batch", type=int, default=4, choices=(1, 2, 4), help="sequences together (default: 4)")
    parser.add_argument("--degrees", type=int, nargs="+", default=[8, 32], help="ranks of the draft to choose among")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    setup = choose.Setup("", options.tp, options.draft_tp, options.batch)
    with progress(f"simulating the passes of {len(KNOWN)} rows, {len(CASES)} ends of the band"):
        rows = [row(known, setup) for known in KNOWN]
    with progress(f"the answer in {len(REGIMES)} regimes of collectives"):
        best = answers(setup, options.degrees)
    if options.json:
        made = header("simulated") | {"tp": setup.tp, "draft_tp": setup.draft_tp, "rows": rows}
        print(json.dumps(made | {"answers": best}))
        return
    print("| drafter | k | step, target passes (simulated) | tokens a step | gain [band] | tokens from |")
    print("|---|---|---|---|---|---|")
    for r in rows:
        name = f"{r['drafter']} {r['model']}".strip()
        tokens = f"{r['tokens']:.2f}{' (assumed)' if r['assumed'] else ''}"
        band = f"{r['gain']:.2f} [{r['gain_low']:.2f}, {r['gain_high']:.2f}]"
        print(f"| {name} | {r['k']} | {r['step']:.2f} | {tokens} | {band} | {r['workload']}: {r['source']} |")
    print("\nThe largest gain, for Qwen3-32B on 8 chips:\n")
    print(answers_as_text(best))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
