"""Candidates that form a tree: which of them a row sees, in the chunk that holds them and in all others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nki_kernels.attention.host import Candidates, verify_attention

from tests.close import error, is_close
from tests.nki_kernels.attention.inputs import Dims, Inputs, draw, exact, naive

# the root's children are 1 and 2, those of 1 are 3 and 4, that of 2 is 5
PARENTS = [0, 0, 0, 1, 1, 2]


def run(x: Inputs, words: Any = None) -> Any:
    """The kernel's output; the cache stays as it is."""
    return verify_attention(x.q, x.new, x.fresh(), Candidates(x.positions, words))


def tree_of(parents: list[int], batch: int) -> Any:
    """Ancestor words (B, N) of a tree given by each candidate's parent."""
    words: list[int] = []
    for n, parent in enumerate(parents):
        words.append(1 << n | (words[parent] if n else 0))
    return np.tile(np.array(words, np.int32), (batch, 1))


@pytest.mark.parametrize("dims", [Dims(3, 4, 2, 6, 700, 64), Dims(5, 2, 1, 6, 515, 128, "bf16")], ids=str)
@pytest.mark.parametrize("first", [None, 0, 509])
def test_tree(dims: Dims, first: int | None) -> None:
    x = draw(dims, first=None if first is None else [first] * dims.B)
    words = tree_of(PARENTS, dims.B)
    candidates = Candidates(x.positions, words)
    out, lse = verify_attention(x.q, x.new, x.fresh(), candidates, with_lse=True)
    expected, logs, _ = exact(x, words)
    assert is_close(out, naive(x, words), expected)
    assert error(lse, logs) <= 4 * np.finfo(np.float32).eps * np.abs(logs).max()
    assert not is_close(out, naive(x), exact(x)[0])


def test_a_tree_of_32_rows_uses_the_sign_bit() -> None:
    x = draw(Dims(1, 2, 1, 32, 64, 64))
    words = np.array([[(2 << n) - 1 for n in range(32)]], np.int64).astype(np.uint32).view(np.int32)
    assert np.array_equal(run(x, words), run(x))


@pytest.mark.parametrize("first", [100, 1022])
def test_candidates_outside_of_a_chunk(first: int) -> None:
    """They lie before the last chunk, or on its border: a chunk that does not hold them must not change."""
    x = draw(Dims(1, 2, 1, 6, 1100, 64), first=[first])
    words = tree_of(PARENTS, 1)
    assert is_close(run(x, words), naive(x, words), exact(x, words)[0])


def test_scores_far_below_zero() -> None:
    """The maximum is that of the slots: with the margins' zeros among them every weight would underflow."""
    x, words = draw(Dims(1, 2, 1, 6, 300, 64), first=[200]), tree_of(PARENTS, 1)
    x.q = np.abs(x.q) * 8
    x.keys, x.new = -np.abs(x.keys) * 8, (-np.abs(x.new[0]) * 8, x.new[1])
    assert is_close(run(x, words), naive(x, words), exact(x, words)[0])


def test_a_hidden_candidate_of_any_score() -> None:
    """Candidate 1 scores thousands above all others in every row; rows that are not below it do not see it."""
    x, words = draw(Dims(1, 2, 1, 6, 300, 64), first=[200]), tree_of(PARENTS, 1)
    x.q = np.abs(x.q)
    x.new[0][:, :, 1] = 300
    assert is_close(run(x, words), naive(x, words), exact(x, words)[0])
