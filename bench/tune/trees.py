"""`python -m bench.tune.trees`: when a tree of candidates beats a chain, for Qwen3-32B.

gain = tokens of a step / (draft passes + one target pass over N rows), in target passes over one row, all simulated.
For every depth k and N the tree is grown by the candidate that is most likely kept; k and N are chosen for the largest
gain, as a chain's k is. How often a drafter's best draft is right is published or assumed, as in bench.tune.drafters.
How often its r-th best one is, when no better one was, is taken over from the demo's drafters on open prompts
(demo/trees.json), which is an assumption. A pass that draws several candidates of a row is billed for one.

A tree's pass is billed as it is built (docs/drafters.md): attention over a sequence of k + 1 rows for each path, whose
kernel is simulated at a few sizes and taken between them by straight lines; everything else over N rows; and the
transfers that bring the kept rows into the caches of all paths. Trees that the kernels do not take are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import nkisim
from bench.kernels.layer import BF16, Shard, attention_case
from bench.provenance import header
from bench.tune import choose, passes, published
from bench.tune.drafters import Known, draft_us
from model.drafting import ANY_TREE, KINDS
from model.errors import run_cli
from model.progress import progress
from model.tree import Tree
from nki_kernels.limits import ROWS, SEQUENCES
from nkisim.timeline.chip import Chip
from nkisim.timeline.schedule import schedule

_RANKS = Path(__file__).resolve().parents[2] / "demo/trees.json"
# depths over which a drafter's shares are averaged, and rows of a target's pass that are simulated
_DEPTHS, _ROWS = 4, 16
# paths of a step, and rows of a path, at which attention is simulated
_PATHS, _FEWEST = (4, 8, 16, 32), 2


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


@cache
def _attended(tp: int, lnc: int, sequences: int, rows: int) -> tuple[Any, ...]:
    """What the attention half of the target's layer does over so many sequences of so many rows."""
    case = attention_case(Shard(choose.TARGET, tp, sequences, rows), lnc)
    recorded = nkisim.run(case.kernel[lnc], case.arguments(), policy=nkisim.Policy(recording=True))
    return tuple(recorded.recording.events)


@cache
def _attention_at(setup: choose.Setup, sequences: int, rows: int, chip: Chip) -> float:
    return schedule(_attended(setup.tp, setup.lnc, sequences, rows), chip, band=False).latency_ns / 1e3


def _between(at: float, low: tuple[float, float], high: tuple[float, float]) -> float:
    """The value at a place on the straight line through two points (place, value)."""
    return low[1] + (at - low[0]) / (high[0] - low[0]) * (high[1] - low[1])


def attention_us(setup: choose.Setup, sequences: int, rows: int, chip: Chip) -> float:
    """Microseconds of one layer's attention half over so many sequences of so many rows."""
    places = [p for p in (setup.batch, *_PATHS) if p >= setup.batch]
    high = next(p for p in places if p >= sequences)
    low = max((p for p in places if p < high), default=high)

    def of(place: int) -> float:
        most = min(ROWS // place, _ROWS)
        ends = ((r, _attention_at(setup, place, r, chip)) for r in (_FEWEST, most))
        return _between(rows, *ends)

    return of(high) if low == high else _between(sequences, (low, of(low)), (high, of(high)))


def kept_us(setup: choose.Setup, tree: Tree, chip: Chip) -> float:
    """Microseconds of the transfers that write the kept rows to the caches of all paths, in all layers: a descriptor a
    dimension of keys and a row of values, on all DMA engines of the rank."""
    shard, rows = Shard(choose.TARGET, setup.tp, 1, 1), tree.k + 1
    caches = setup.batch * len(tree.branches) * shard.heads.kv_per_rank * shard.config.num_hidden_layers
    dim, n = shard.config.head_dim, chip.at("nominal")
    busy_ns = (dim + rows) * n.dma_descriptor_ns + 2 * rows * dim * BF16 / n.dma_bytes_per_ns
    return float(caches * busy_ns / (n.dma_engines * setup.lnc)) / 1e3


def fits(setup: choose.Setup, tree: Tree) -> bool:
    """Whether the kernels take the paths of a step."""
    sequences = setup.batch * len(tree.branches)
    return sequences <= SEQUENCES and sequences * (tree.k + 1) <= ROWS


def target_us(setup: choose.Setup, tree: Tree, chip: Chip) -> float:
    """Microseconds of the target's pass over a tree's rows: a chain's, whose attention is over paths."""
    chain, paths = choose.Simulated(chip).target(setup, tree.rows), len(tree.branches)
    if paths == 1:
        return chain
    layers = Shard(choose.TARGET, setup.tp, 1, 1).config.num_hidden_layers
    more = attention_us(setup, setup.batch * paths, tree.k + 1, chip) - attention_us(
        setup, setup.batch, tree.rows, chip
    )
    return chain + layers * more + kept_us(setup, tree, chip)


def rows_of(case: Case, setup: choose.Setup) -> list[dict[str, Any]]:
    """The best chain of a drafter and the best tree, with the band of their gains."""
    latencies, leaves = choose.band(), KINDS[case.drafter].tree != ANY_TREE
    misses = caught(case.drafter)

    def gain(tree: Tree, tokens: float, end: str) -> float:
        known = Known(case.drafter, case.model, tree.k, tokens, "", True, "")
        step = target_us(setup, tree, passes.CHIPS[end]) + draft_us(known, setup, passes.CHIPS[end])
        return tokens * latencies[end].target(setup, 1) / step

    chains = [grown(case.rates[:k], (), k + 1, leaves) for k in case.depths]
    trees = [grown(case.rates[:k], misses, rows, leaves) for k in case.depths for rows in range(k + 1, _ROWS + 1)]
    found = []
    for what, tried in (("chain", chains), ("tree", trees)):
        tree, tokens = max((t for t in tried if fits(setup, t[0])), key=lambda t: gain(t[0], t[1], "nominal"))
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
