"""The tree of so many rows that keeps the most tokens, by search over all of them."""

from __future__ import annotations

import itertools

import pytest

from bench.tune import choose, passes, trees
from bench.tune.trees import grown
from model.tree import Tree, parse_tree

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


SETUP = choose.Setup("", 32, 32, 4)


def _bilinear(setup: choose.Setup, sequences: int, rows: int, chip: object) -> float:
    return 3.0 + 2 * sequences + 0.5 * rows + 0.1 * sequences * rows


def test_attention_lies_between_simulated_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "_attention_at", _bilinear)
    for sequences, rows in ((4, 2), (4, 7), (12, 5), (20, 6), (32, 4)):
        found = trees.attention_us(SETUP, sequences, rows, passes.CHIPS["nominal"])
        assert found == pytest.approx(_bilinear(SETUP, sequences, rows, None))


def test_a_tree_pays_for_its_paths_and_a_chain_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "_attention_at", _bilinear)
    monkeypatch.setattr(choose.Simulated, "target", lambda self, setup, rows: 1000.0 + rows)
    chip, tree = passes.CHIPS["nominal"], parse_tree("0,0,1,1")
    assert trees.target_us(SETUP, parse_tree("0,1,2"), chip) == 1004
    more = _bilinear(SETUP, 12, 3, None) - _bilinear(SETUP, 4, 5, None)
    kept = trees.kept_us(SETUP, tree, chip)
    assert trees.target_us(SETUP, tree, chip) == pytest.approx(1005 + 64 * more + kept)
    # as many descriptors as dimensions of keys and rows of values, of each of 12 caches in 64 layers, on 32 engines
    n = chip.at("nominal")
    busy_ns = 131 * n.dma_descriptor_ns + 2 * 3 * 128 * 2 / n.dma_bytes_per_ns
    assert kept == pytest.approx(12 * 64 * busy_ns / 32e3)


@pytest.mark.parametrize(
    ("tree", "batch", "taken"), [("0,0,1,1", 4, True), ("0,0,1,1", 12, False), ("0,1,2,0", 4, True)]
)
def test_a_tree_of_more_paths_than_the_kernels_take_does_not_fit(tree: str, batch: int, taken: bool) -> None:
    assert trees.fits(choose.Setup("", 32, 32, batch), parse_tree(tree)) == taken
