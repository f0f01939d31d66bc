"""Verification attention against its law in fp64 and the model: causal rows, block drafts, and the bits of a row."""

from __future__ import annotations

from pathlib import Path
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
from nki_kernels.attention.pipeline import DRAIN, PREFETCH_DISTANCE, STAGES
from nki_kernels.limits import POOL_ROWS, TABLE_ENTRIES, attention_limit_error
from tests.close import is_close
from tests.nki_kernels.attention.inputs import (
    DROPPED,
    SPLITS,
    Dims,
    Inputs,
    as_torch,
    check_dropped,
    check_places,
    check_splits,
    draw,
    exact,
    model_attention,
    naive,
    others,
    pooled,
    same,
    slices,
    unpooled,
    without_pages,
)

# odd first; two chunks, packs within a sequence, three scatters of new rows, scatters that begin within a sequence
SHAPES = [
    Dims(3, 2, 1, 3, 257, 128), Dims(3, 6, 3, 5, 515, 64), Dims(1, 1, 1, 1, 5, 64), Dims(5, 2, 1, 7, 513, 128, "bf16"),
    Dims(2, 16, 2, 8, 1030, 64, "bf16"), Dims(2, 4, 1, 32, 129, 128, "bf16"), Dims(2, 2, 1, 3, 2305, 64),
    Dims(2, 6, 6, 32, 64, 64), Dims(1, 6, 6, 7, 1024, 64), Dims(17, 2, 1, 8, 24, 64),
]  # fmt: skip
LONG = [
    Dims(32, 2, 2, 5, 24, 64), Dims(40, 2, 1, 4, 40, 64, "bf16"), Dims(9, 2, 1, 8, 1100, 128, "bf16"),
    Dims(1, 2, 1, 32, 3073, 128, "bf16"),
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


# the limit minus the position of the block's last row: rows attend all of the block, a part, nothing, more
@pytest.mark.parametrize("beyond", [0, -2, -40, 3])
@pytest.mark.parametrize("dims", [Dims(3, 4, 2, 6, 700, 64), Dims(5, 2, 1, 8, 1045, 128, "bf16")], ids=str)
def test_rows_of_a_block_attend_up_to_its_limit(dims: Dims, beyond: int) -> None:
    x = draw(dims, first=[dims.S - dims.N - 3, 1020, 509, 60, 200][: dims.B] if dims.S > 1024 else [600, 40, 509])
    limit = x.positions[:, -1:] + np.int32(beyond)
    check(x, dims, 1 + (beyond < 0), limit)
    assert not is_close(x.run(), naive(x, limit), exact(x, limit)[0])


@pytest.mark.parametrize("size", [60.0, 1e-3])
def test_extreme_scores(size: float) -> None:
    """Large scores need the running max, tiny ones give equal weights."""
    x = draw(Dims(4, 4, 1, 8, 1100, 64))
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


DIMS = Dims(1, 2, 1, 32, 1100, 64)


# rows within a chunk, and in two chunks
@pytest.mark.parametrize("splits", SPLITS, ids=len)
@pytest.mark.parametrize(("first", "dtype"), [(500, "bf16"), (1000, "fp32")])
def test_every_n_and_split(first: int, dtype: str, splits: Any) -> None:
    check_splits(draw(DIMS._replace(dtype=dtype), first=[first]), splits, axis=2)


def test_a_block_draft_s_rows() -> None:
    """With a limit, a row's bits depend on the keys up to it, not on its position, N or the number of cores."""
    x = draw(DIMS._replace(N=8, dtype="bf16"), first=[1020])
    pages, limit = pooled(x.keys, x.values), x.positions[:, -1:]
    full = x.run(pages, limit)
    for split in ((1, 3, 4), (7, 1)):
        parts = [x.part(slice(1), rows).run(pages, limit) for rows in slices(split)]
        assert same(np.concatenate(parts, 2), full)
    assert same(x.run(limit=limit, lnc=2), full)
    last = slice(7, 8)
    assert same(x.run()[:, :, last].copy(), full[:, :, last].copy())


@pytest.mark.parametrize(("heads", "dtype"), [((2, 1), "bf16"), ((6, 3), "fp32"), ((16, 1), "bf16")])
def test_neighbours_and_place_in_the_batch(heads: tuple[int, int], dtype: str) -> None:
    """A single sequence, and the same one in a batch of 3, on one core and on two."""
    x = draw(Dims(3, *heads, 4, 700, 64, dtype), first=[650, 0, 511])
    together = [x.run(), x.run(lnc=2)]
    for b in range(3):
        one = slice(b, b + 1)
        assert all(same(x.part(one, slice(None)).run(), out[one]) for out in together)


def test_length_and_pages() -> None:
    """Longer tables and another order of pages do not change the bits; attended keys and values do."""
    x = draw(Dims(2, 4, 2, 3, 3072, 64, "bf16"), first=[1020, 3])
    full = x.run()
    assert same(x.run(pooled(x.keys[:, :, :2048], x.values[:, :, :2048], seed=2)), full)
    (pools, table), (other, _) = pooled(x.keys, x.values), pooled(x.keys, x.values)
    assert not same(x.run((pools, table[::-1].copy())), full)
    assert not same(x.run((other[::-1], table)), full)
    x.values[0, :, 640] *= 2
    assert [same(*pair) for pair in zip(x.run(), full, strict=True)] == [False, True]


def test_the_chart_of_stages() -> None:
    """docs/kernels.md has a line for each stage: its lag is the column, its place within an iteration the number."""
    lags = range(-PREFETCH_DISTANCE, DRAIN + 1)
    stages = sorted((lag, place + 1, stage.__name__) for place, (lag, stage) in enumerate(STAGES))
    chart = [f"{'iteration':<14}" + "".join(f"{lag:>+4}" if lag else "   0" for lag in lags)]
    chart += [f"{name:<14}" + " " * 4 * (lag + PREFETCH_DISTANCE) + f"{place:>4}" for lag, place, name in stages]
    assert "\n".join(chart) in Path("docs/kernels.md").read_text(encoding="utf-8")
