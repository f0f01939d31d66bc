"""Verification attention against its law in fp64 and the model: causal rows, block drafts, and the bits of a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from model.attention import append
from model.cache import AttentionMetadata, Cache
from model.errors import UserError
from model.nki.context import NkiContext
from model.nki.simulated import serve
from model.ops import EAGER
from nki_kernels.limits import POOL_ROWS, TABLE_ENTRIES, attention_limit_error
from tests.close import is_close
from tests.nki_kernels.attention.inputs import (
    DROPPED,
    Dims,
    Inputs,
    as_torch,
    check_dropped,
    check_places,
    draw,
    exact,
    model_attention,
    naive,
    others,
    pooled,
    same,
    unpooled,
    without_pages,
)

# odd first; two chunks, packs within a sequence, three scatters of new rows, scatters that begin within a sequence, two
# key groups
SHAPES = [
    Dims(3, 2, 1, 3, 257, 128), Dims(3, 6, 3, 5, 515, 64), Dims(1, 1, 1, 1, 5, 64), Dims(5, 2, 1, 7, 513, 128, "bf16"),
    Dims(2, 16, 2, 8, 1030, 64, "bf16"), Dims(2, 4, 1, 32, 129, 128, "bf16"), Dims(2, 2, 1, 3, 2305, 64),
    Dims(2, 6, 6, 32, 64, 64), Dims(1, 6, 6, 7, 1024, 64), Dims(17, 2, 1, 8, 24, 64), Dims(3, 4, 2, 3, 2100, 256),
]  # fmt: skip
LONG = [
    Dims(32, 2, 2, 5, 24, 64), Dims(40, 2, 1, 4, 40, 64, "bf16"), Dims(9, 2, 1, 8, 1100, 128, "bf16"),
    Dims(1, 2, 1, 32, 4097, 128, "bf16"), Dims(2, 4, 2, 5, 5200, 256, "bf16"),
]  # fmt: skip
WAYS = [
    *((dims, 1 + n % 2) for n, dims in enumerate(SHAPES)),
    *(pytest.param(dims, 2 - n % 2, marks=pytest.mark.slow) for n, dims in enumerate(SHAPES)),
    *(pytest.param(dims, lnc, marks=pytest.mark.slow) for dims in LONG for lnc in (1, 2)),
]


def check(x: Inputs, dims: Dims, lnc: int, limit: Any = None) -> None:
    """The error is at most twice the model's, the cache is the law's, and no other page is written."""
    pools, table = pages = pooled(x.keys, x.values)
    before = others(pools, table)
    out = x.run(pages, limit, lnc=lnc)
    expected, written = exact(x, limit)
    assert out.dtype == x.q.dtype
    assert is_close(out, naive(x, limit), expected)
    for pool, cache in zip(pools, written, strict=True):
        assert np.array_equal(unpooled(pool, table, dims.S).astype(np.float64), cache)
    assert all(map(same, others(pools, table), before))


@pytest.mark.parametrize(("dims", "lnc"), WAYS, ids=str)
def test_as_exact_as_the_model(dims: Dims, lnc: int) -> None:
    check(draw(dims), dims, lnc)


@pytest.mark.parametrize("size", [60.0, 1e-3])
def test_extreme_scores(size: float) -> None:
    """Large scores need the running max, tiny ones give equal weights."""
    x = draw(Dims(4, 4, 1, 8, 2100, 64))
    x.q = (x.q * size).astype(np.float32)
    assert is_close(x.run(), naive(x), exact(x)[0])


@pytest.mark.parametrize("lnc", [1, 2])
def test_rows_without_a_page_change_spare_pages_only(lnc: int) -> None:
    x = draw(Dims(5, 2, 1, 3, 1024, 64), first=DROPPED)
    check_dropped(x, pooled(x.keys, x.values), lnc)


def test_rows_without_a_page_change_spare_pages_only_in_hlo() -> None:
    x = draw(Dims(5, 2, 1, 3, 1024, 64), first=DROPPED)
    pools, table = pooled(x.keys, x.values)
    before = without_pages(pools, table)
    meta = AttentionMetadata(torch.from_numpy(x.positions), torch.from_numpy(table))
    after = append(EAGER, *map(as_torch, x.new), Cache(*map(as_torch, pools)), meta)
    check_places([pool.numpy() for pool in after], before, table)


@pytest.mark.parametrize("beyond", [None, 0, -2])
def test_the_model_s_attention_with_both_contexts(beyond: int | None) -> None:
    """The reference and the kernel through a context, causal and with limits."""
    x = draw(Dims(3, 4, 2, 5, 256, 64), first=[0, 130, 251])
    limit = None if beyond is None else x.positions[:, -1:] + np.int32(beyond)
    (out, cache), (expected, written) = model_attention(x, limit, NkiContext(launch=serve).attention), exact(x, limit)
    assert is_close(out, naive(x, limit), expected)
    for after in (cache, model_attention(x, limit)[1]):
        assert all(np.array_equal(*pair) for pair in zip(after, written, strict=True))


def test_sizes_beyond_a_launch() -> None:
    assert not attention_limit_error(64, 128, 32768, POOL_ROWS - 1)
    assert "raise tp or lower k" in attention_limit_error(1, 129, 128, 1)
    assert "lower the batch or max-len" in attention_limit_error(1 + TABLE_ENTRIES // 8, 1, 1000, 1)
    assert "use fewer pages" in attention_limit_error(4, 1, 1024, POOL_ROWS)
    pool, meta = torch.zeros(2, 1, 128, 64), AttentionMetadata(torch.zeros(0, 1), torch.ones(TABLE_ENTRIES + 1, 1))
    with pytest.raises(UserError, match="lower the batch or max-len, or use --kernels reference"):
        NkiContext(launch=serve).attention(torch.zeros(1, 1, 1, 64), pool, pool, Cache(pool, pool), meta)
