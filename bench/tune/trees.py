"""`python -m bench.tune.trees`: when a tree of candidates beats a chain, for Qwen3-32B.

gain = tokens of a step / (draft passes + one target pass over N rows), in target passes over one row, all simulated.
For every depth k and N the tree is grown by the candidate that is most likely kept; k and N are chosen for the largest
gain, as a chain's k is. How often a drafter's best draft is right is published or assumed, as in bench.tune.drafters.
How often its r-th best one is, when no better one was, is taken over from the demo's drafters on open prompts
(demo/trees.json), which is an assumption. A pass that draws several candidates of a row is billed for one.

No kernel serves trees yet (docs/drafters.md): the target's pass is billed as one over N rows of a chain.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.provenance import header
from bench.tune import choose, passes, published
from bench.tune.drafters import Known, draft_us
from model.drafting import ANY_TREE, KINDS
from model.errors import run_cli
from model.progress import progress
from model.tree import Tree

_RANKS = Path(__file__).resolve().parents[2] / "demo/trees.json"
# depths over which a drafter's shares are averaged, and rows of a target's pass that are simulated
_DEPTHS, _ROWS = 4, 16


@dataclass(frozen=True)
class Case:
    """A drafter: how often its best draft is right at each depth, and the depths that are tried."""

    drafter: str
    model: str
    rates: tuple[float, ...]
    depths: tuple[int, ...]
    source: str


def _alike(tokens: float, k: int) -> float:
    """The rate, the same at each of k positions, at which a step keeps so many tokens."""
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**i for i in range(k + 1)) < tokens else (low, rate)
    return low


def cases() -> tuple[Case, ...]:
    """The published draft, and the parallel one as it is assumed."""
    shares = [more - less for less, more in pairwise((0.0, 1.0, *published.MT_BENCH_LENGTHS))]
    rates = tuple(share / before for before, share in pairwise(shares))
    assumed = ((3.0, "low"), (3.4, "high"))
    return (
        Case("chain", "1.7B", rates, (1, 2, 3, 4, 5, 6), f"MT-Bench, {published.SOURCE}"),
        *(
            Case("parallel", "0.6B", (_alike(tokens, 7),) * 15, (2, 3, 5, 7, 11, 15),
                 f"MT-Bench, {tokens} tokens at k = 7, the {end} end of what is assumed")
            for tokens, end in assumed
        ),
    )  # fmt: skip


def caught(drafter: str) -> list[float]:
    """The share of the best draft's misses that the demo's next best ones catch, in order: greedy, open prompts."""
    ranks = json.loads(_RANKS.read_text(encoding="utf-8"))["ranks"]
    (of,) = (r for r in ranks if (r["drafter"], r["entropy"], r["way"]) == (drafter, "open", "greedy"))
    places = list(zip(of["anchors"], of["shares"], strict=True))[:_DEPTHS]
    missed = sum(count * (1 - shares[0]) for count, shares in places)
    return [sum(count * s[r] for count, s in places) / missed for r in range(1, len(of["shares"][0]))]


def grown(rates: Sequence[float], misses: Sequence[float], rows: int, leaves: bool) -> tuple[Tree, float]:
    """The tree of so many rows that keeps the most tokens, no deeper than the rates, and these tokens.

    With `leaves`, second best drafts have no children.
    """
    parents, depths, chances, best = list[int](), [0], [1.0], [True]
    while len(depths) < rows:
        found = (0.0, 0, 0)
        for at, depth in enumerate(depths):
            rank = parents.count(at)
            if depth == len(rates) or (leaves and not best[at]) or rank > len(misses):
                continue
            rate = rates[depth] if not rank else (1 - rates[depth]) * misses[rank - 1]
            found = max(found, (chances[at] * rate, -at, rank))
        chance, at, rank = found[0], -found[1], found[2]
        if not chance:
            break
        parents.append(at)
        depths.append(depths[at] + 1)
        chances.append(chance)
        best.append(best[at] and not rank)
    return Tree(tuple(parents)), sum(chances)


def rows_of(case: Case, setup: choose.Setup) -> list[dict[str, Any]]:
    """The best chain of a drafter and the best tree, with the band of their gains."""
    latencies, leaves = choose.band(), KINDS[case.drafter].tree != ANY_TREE
    misses = caught(case.drafter)

    def gain(tree: Tree, tokens: float, end: str) -> float:
        known = Known(case.drafter, case.model, tree.k, tokens, "", True, "")
        step = latencies[end].target(setup, tree.rows) + draft_us(known, setup, passes.CHIPS[end])
        return tokens * latencies[end].target(setup, 1) / step

    chains = [grown(case.rates[:k], (), k + 1, leaves) for k in case.depths]
    trees = [grown(case.rates[:k], misses, rows, leaves) for k in case.depths for rows in range(k + 1, _ROWS + 1)]
    found = []
    for what, tried in (("chain", chains), ("tree", trees)):
        tree, tokens = max(tried, key=lambda t: gain(t[0], t[1], "nominal"))
        ends = sorted(gain(tree, tokens, end) for end in latencies)
        found.append(
            {"drafter": case.drafter, "model": case.model, "what": what, "k": tree.k, "rows": tree.rows,
             "tree": str(tree), "tokens": tokens, "gain": gain(tree, tokens, "nominal"), "gain_low": ends[0],
             "gain_high": ends[-1], "source": case.source}
        )  # fmt: skip
    return found


def main(arguments: list[str]) -> None:
    """Print two rows for each drafter."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune.trees", description=__doc__)
    parser.add_argument("--tp", type=int, default=32, help="ranks of the target (default: 32)")
    parser.add_argument("--draft-tp", type=int, default=32, help="ranks of the draft (default: 32)")
    parser.add_argument("--batch", type=int, default=4, choices=(1, 2, 4), help="sequences together (default: 4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    setup = choose.Setup("", options.tp, options.draft_tp, options.batch)
    with progress("simulating the passes of every depth"):
        rows = [row for case in cases() for row in rows_of(case, setup)]
    if options.json:
        print(json.dumps(header("simulated") | {"tp": setup.tp, "draft_tp": setup.draft_tp, "rows": rows}))
        return
    print("| drafter | candidates | k | rows | tokens a step (assumed) | gain [band] (simulated) | best drafts from |")
    print("|---|---|---|---|---|---|---|")
    for r in rows:
        of = f"tree {r['tree']}" if r["what"] == "tree" else "chain"
        band = f"{r['gain']:.2f} [{r['gain_low']:.2f}, {r['gain_high']:.2f}]"
        print(f"| {r['drafter']} {r['model']} | {of} | {r['k']} | {r['rows']} | {r['tokens']:.2f} | {band} "
              f"| {r['source']} |")  # fmt: skip


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
