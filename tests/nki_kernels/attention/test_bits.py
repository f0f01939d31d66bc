"""The bits of a row: the same for every N, row index, neighbour, order of pages, core count and split into calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.nki_kernels.attention.inputs import SPLITS, Dims, Inputs, draw, pooled, same, slices

DIMS = Dims(1, 2, 1, 32, 1100, 64)
ALL = slice(None)


def calls(x: Inputs, split: Sequence[int], pages: Any, limit: Any = None) -> Any:
    """The rows in calls of these sizes."""
    return np.concatenate([x.part(ALL, rows).run(pages, limit) for rows in slices(split)], 2)


# rows within a chunk, and over the border of two
@pytest.mark.parametrize("splits", SPLITS, ids=len)
@pytest.mark.parametrize(("first", "dtype"), [(500, "bf16"), (1000, "fp32")])
def test_every_n_and_split(first: int, dtype: str, splits: Any) -> None:
    """32 rows in one call, and in calls of other sizes: the same bits, the same cache."""
    x = draw(replace(DIMS, dtype=dtype), first=[first])
    whole_pages = pooled(x.keys, x.values)
    whole = x.run(whole_pages)
    for split in splits:
        pages = pooled(x.keys, x.values)
        assert same(calls(x, split, pages), whole), split
        assert all(same(a, b) for a, b in zip(pages[0], whole_pages[0], strict=True))


def test_a_block_draft_s_rows() -> None:
    """With a limit, a row's bits depend on the keys up to it: not on its own position, N or the number of cores."""
    x = draw(replace(DIMS, N=8, dtype="bf16"), first=[1020])
    pages, limit = pooled(x.keys, x.values), x.positions[:, -1:]
    whole = x.run(pages, limit)
    for split in ((1, 3, 4), (7, 1)):
        assert same(calls(x, split, pages, limit), whole)
    assert same(x.run(limit=limit, lnc=2), whole)
    last = slice(7, 8)
    assert same(x.run()[:, :, last].copy(), whole[:, :, last].copy())


@pytest.mark.parametrize(("heads", "dtype"), [((2, 1), "bf16"), ((6, 3), "fp32"), ((16, 1), "bf16")])
def test_neighbours_and_place_in_the_batch(heads: tuple[int, int], dtype: str) -> None:
    """A sequence alone, and at any place of a batch of 3, on one core and on two."""
    x = draw(Dims(3, *heads, 4, 700, 64, dtype), first=[650, 0, 511])
    together = [x.run(), x.run(lnc=2)]
    for b in range(3):
        one = slice(b, b + 1)
        assert all(same(x.part(one, ALL).run(), out[one]) for out in together)


def test_length_and_pages() -> None:
    """Longer tables and another order of pages do not affect the bits; keys and values that a row sees do."""
    x = draw(Dims(2, 4, 2, 3, 3072, 64, "bf16"), first=[1020, 3])
    whole = x.run()
    for length in (2048,):
        pages = pooled(x.keys[:, :, :length], x.values[:, :, :length], seed=length)
        assert same(x.run(pages), whole), f"S={length}"
    (pools, table), (other, _) = pooled(x.keys, x.values), pooled(x.keys, x.values)
    assert not same(x.run((pools, table[::-1].copy())), whole)
    assert not same(x.run((other[::-1], table)), whole)
    x.values[0, :, 640] *= 2
    assert [same(*pair) for pair in zip(x.run(), whole, strict=True)] == [False, True]


def test_what_a_row_cannot_see_does_not_affect_it() -> None:
    """Stale keys after the row, and the neighbour's cache, may be any finite number."""
    x = draw(Dims(2, 2, 1, 3, 700, 64), first=[100, 600])
    before = x.run()
    x.keys[0, :, 103:], x.values[0, :, 103:] = 1e30, -1e30
    x.keys[1], x.values[1] = 7.0, 9.0
    after = x.run()
    assert same(after[:1], before[:1])
    assert not same(after[1:], before[1:])
