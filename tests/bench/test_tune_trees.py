"""The tree of so many rows that keeps the most tokens, by search over all of them."""

from __future__ import annotations

import itertools

import pytest

from bench.tune.trees import grown
from model.tree import Tree

RATES, MISSES = (0.7, 0.6, 0.5), (0.4, 0.2)


def _tokens(tree: Tree, leaves: bool) -> float:
    """What a tree keeps a step; nothing if it may not be."""
    chances = [1.0]
    for row, parent in enumerate(tree.parents, 1):
        depth, rank = tree.depths[row] - 1, tree.ranks[row]
        if depth >= len(RATES) or rank > len(MISSES) or (leaves and not tree.leaves_only):
            return 0.0
        chances.append(chances[parent] * (RATES[depth] if not rank else (1 - RATES[depth]) * MISSES[rank - 1]))
    return sum(chances)


@pytest.mark.parametrize("leaves", [False, True], ids=["any", "leaves"])
def test_no_tree_of_as_many_rows_keeps_more(leaves: bool) -> None:
    for rows in range(2, 7):
        every = (Tree(parents) for parents in itertools.product(*(range(n) for n in range(1, rows))))
        tree, tokens = grown(RATES, MISSES, rows, leaves)
        assert tokens == pytest.approx(_tokens(tree, leaves))
        assert tokens == pytest.approx(max(_tokens(t, leaves) for t in every))


def test_a_chain_is_the_tree_of_a_sure_drafter() -> None:
    assert grown((1.0,) * 5, MISSES, 6, False)[0] == Tree((0, 1, 2, 3, 4))
    # without candidates beside the best one a tree ends at its depth
    assert grown(RATES, (), 10, False)[0] == Tree((0, 1, 2))
