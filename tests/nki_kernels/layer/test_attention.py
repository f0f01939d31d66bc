"""The fused attention half against its law in fp64 and the model, and its bits."""

from __future__ import annotations

import pytest

from tests.close import is_close
from tests.nki_kernels.attention.inputs import (
    DROPPED,
    check_dropped,
    combine,
    others,
    same,
    unpooled,
)
from tests.nki_kernels.layer.inputs import AttentionDims, draw_attention, exact_attention, naive_attention

# odd first; then the heads of drafts and target on a rank of TP 4, 8 and 32; a block of one head
SHAPES = [
    AttentionDims(*dims)
    for dims in ((3, 5, 384, 3, 1, 301), (1, 1, 256, 2, 1, 96), (2, 3, 256, 4, 2, 700), (4, 1, 256, 1, 1, 256),
                 (4, 8, 256, 2, 1, 1100), (1, 7, 256, 16, 2, 200), (3, 11, 4096, 2, 1, 150), (2, 3, 256, 3, 3, 96))
]  # fmt: skip
# 128 rows; one k head with 126 columns precedes a block of four heads
LARGE = [AttentionDims(8, 16, 256, 2, 2, 130), AttentionDims(9, 14, 256, 18, 3, 60)]
WAYS = [*combine(SHAPES), *(pytest.param(dims, "bf16", 1 + n, marks=pytest.mark.slow) for n, dims in enumerate(LARGE))]


@pytest.mark.parametrize(("dims", "dtype", "lnc"), WAYS, ids=str)
def test_law_and_model(dims: AttentionDims, dtype: str, lnc: int) -> None:
    """The errors of output and caches are at most twice those of the model's attention in the same dtype."""
    a = draw_attention(dims, dtype)
    pools, table = pages = a.pages()
    before = others(pools, table)
    out = a.run(pages, lnc=lnc)
    exact, written = exact_attention(a)
    naive, naive_cache = naive_attention(a)
    # two ulps for the row's 1 / rms, which is one number
    assert is_close(out, naive, exact, ulps=2)
    for pool, cache, expected in zip(pools, naive_cache, written, strict=True):
        assert is_close(unpooled(pool, table, dims.S), cache, expected, ulps=2)
    assert all(map(same, others(pools, table), before))


@pytest.mark.parametrize("lnc", [1, 2])
def test_rows_without_a_page_change_spare_pages_only(lnc: int) -> None:
    a = draw_attention(AttentionDims(5, 3, 256, 2, 1, 1024), "fp32", first=DROPPED)
    check_dropped(a, a.pages(), lnc)
