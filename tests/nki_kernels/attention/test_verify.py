"""Verification attention against its law in fp64 and the model: odd shapes, causal rows and block drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from model.cache import AttentionMetadata, Cache
from model.context import ONE_RANK
from model.errors import UserError
from model.nki.context import NkiContext
from model.nki.simulated import serve
from nki_kernels.limits import POOL_ROWS, TABLE_ENTRIES, attention_misfit
from tests.close import is_close
from tests.nki_kernels.attention.inputs import Dims, Inputs, draw, exact, model_attention, naive, pooled, unpooled

# odd first; two chunks, packs within a sequence, new rows in three scatters and in scatters that begin within one
SHAPES = [
    Dims(3, 2, 1, 3, 257, 128),
    Dims(3, 6, 3, 5, 515, 64),
    Dims(1, 1, 1, 1, 5, 64),
    Dims(5, 2, 1, 7, 513, 128, "bf16"),
    Dims(2, 16, 2, 8, 1030, 64, "bf16"),
    Dims(2, 4, 1, 32, 129, 128, "bf16"),
    Dims(2, 2, 1, 3, 2305, 64),
    Dims(2, 6, 6, 32, 64, 64),
    Dims(1, 6, 6, 7, 1024, 64),
    Dims(17, 2, 1, 8, 24, 64),
]
LONG = [
    Dims(32, 2, 2, 5, 24, 64),
    Dims(40, 2, 1, 4, 40, 64, "bf16"),
    Dims(9, 2, 1, 8, 1100, 128, "bf16"),
    Dims(1, 2, 1, 32, 3073, 128, "bf16"),
]
WAYS = [
    *((dims, 1 + n % 2) for n, dims in enumerate(SHAPES)),
    *(pytest.param(dims, 2 - n % 2, marks=pytest.mark.slow) for n, dims in enumerate(SHAPES)),
    *(pytest.param(dims, lnc, marks=pytest.mark.slow) for dims in LONG for lnc in (1, 2)),
]


def check(x: Inputs, dims: Dims, lnc: int, limit: Any = None) -> None:
    """Output and cache: at most twice as far from the law as the textbook; no other page is written."""
    pools, table = pages = pooled(x.keys, x.values)
    outside = np.setdiff1d(np.arange(len(pools[0])), table)
    before = [pool[outside].copy() for pool in pools]
    out = x.run(pages, limit, lnc=lnc)
    expected, written = exact(x, limit)
    assert out.dtype == x.q.dtype
    assert is_close(out, naive(x, limit), expected)
    for pool, cache, kept in zip(pools, written, before, strict=True):
        assert np.array_equal(unpooled(pool, table, dims.S).astype(np.float64), cache)
        assert np.array_equal(pool[outside], kept)
        assert not pool[0].any()


@pytest.mark.parametrize(("dims", "lnc"), WAYS, ids=str)
def test_as_exact_as_the_textbook(dims: Dims, lnc: int) -> None:
    check(draw(dims), dims, lnc)


# positions of the limit from the block's last row: all of its rows, some of them, none of them, garbage after them
@pytest.mark.parametrize("beyond", [0, -2, -40, 3])
@pytest.mark.parametrize("dims", [Dims(3, 4, 2, 6, 700, 64), Dims(5, 2, 1, 8, 1045, 128, "bf16")], ids=str)
def test_rows_of_a_block_see_its_limit(dims: Dims, beyond: int) -> None:
    x = draw(dims, first=[dims.S - dims.N - 3, 1020, 509, 60, 200][: dims.B] if dims.S > 1024 else [600, 40, 509])
    limit = x.positions[:, -1:] + np.int32(beyond)
    check(x, dims, 1 + (beyond < 0), limit)
    assert not is_close(x.run(), naive(x, limit), exact(x, limit)[0])


def test_a_row_too_far_is_not_the_textbook_s() -> None:
    """Negative control: seeing one position more or less breaks the bound."""
    x = draw(SHAPES[0], first=[10, 100, 200])
    for beyond in (1, -1):
        outs = [exact(x, x.positions[:, n : n + 1] + beyond)[0][:, :, n : n + 1] for n in range(3)]
        assert not is_close(np.concatenate(outs, 2), naive(x), exact(x)[0])


@pytest.mark.parametrize("size", [60.0, 1e-3])
def test_extreme_scores(size: float) -> None:
    """Large scores need the maximum, tiny ones make all weights equal."""
    x = draw(Dims(4, 4, 1, 8, 1100, 64))
    x.q = (x.q * size).astype(np.float32)
    assert is_close(x.run(), naive(x), exact(x)[0])


@pytest.mark.parametrize("lnc", [1, 2])
def test_rows_without_a_page_are_dropped(lnc: int) -> None:
    """At page 0, beyond the table and at negative positions; a row at exactly S is not the next sequence's."""
    x = draw(Dims(5, 2, 1, 3, 1024, 64), first=[100, 127, 1023, 5, -2])
    (pools, table), right = pooled(x.keys, x.values), x.run()
    table[1], table[2, 0] = 0, 0
    before = [pool.copy() for pool in pools]
    out = x.run((pools, table), lnc=lnc)
    assert np.array_equal(out[0], right[0])
    written = {0: [100, 101, 102], 2: [1023], 3: [5, 6, 7], 4: [0]}
    expected = sorted((table[b, p // 128], p % 128) for b, positions in written.items() for p in positions)
    for pool, kept in zip(pools, before, strict=True):
        assert sorted(map(tuple, np.argwhere((pool != kept).any((1, 3))))) == expected


@pytest.mark.parametrize("beyond", [None, 0, -2])
def test_the_model_s_attention_with_both_backings(beyond: int | None) -> None:
    """model/attention.py and the kernel behind the seam, causal and with limits other than the last row's position."""
    x = draw(Dims(3, 4, 2, 5, 256, 64), first=[0, 130, 251])
    limit = None if beyond is None else x.positions[:, -1:] + np.int32(beyond)
    expected, written = exact(x, limit)
    for attend in (ONE_RANK.attention, NkiContext(launch=serve).attention):
        out, cache = model_attention(attend, x, limit)
        assert is_close(out, naive(x, limit), expected)
        assert all(np.array_equal(*pair) for pair in zip(cache, written, strict=True))


def test_sizes_that_no_launch_takes() -> None:
    assert not attention_misfit(4, 128, 32768, POOL_ROWS - 1)
    assert not attention_misfit(64, 16, 32768, 1)
    assert "raise tp or lower k" in attention_misfit(1, 129, 128, 1)
    assert "lower the batch or max-len" in attention_misfit(1 + TABLE_ENTRIES // 8, 1, 1000, 1)
    assert "use fewer pages" in attention_misfit(4, 1, 1024, POOL_ROWS)
    pool = torch.zeros(2, 1, 128, 64)
    meta = AttentionMetadata(torch.zeros(TABLE_ENTRIES + 1, 1, dtype=torch.int32), torch.ones(TABLE_ENTRIES + 1, 1))
    with pytest.raises(UserError, match="lower the batch or max-len, or use --kernels reference"):
        NkiContext(launch=serve).attention(torch.zeros(1, 1, 1, 64), pool, pool, Cache(pool, pool), meta)
