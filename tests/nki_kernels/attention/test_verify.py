"""Verification attention against its law in fp64: odd shapes, both dtypes, both caches, one and two cores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from nki_kernels.attention.host import Candidates, verify_attention

from model.attention import verify_attention as torch_attention
from model.cache import Cache, Placement
from model.ops import EAGER
from nki_kernels.attention import law
from tests.close import is_close
from tests.nki_kernels.attention.inputs import Dims, Inputs, draw, exact, naive, pooled, unpooled

SHAPES = [
    Dims(3, 2, 1, 3, 257, 128),
    Dims(3, 6, 3, 5, 515, 64),
    Dims(1, 1, 1, 1, 5, 64),
    Dims(5, 2, 1, 7, 513, 128, "bf16"),
    Dims(2, 16, 2, 8, 1030, 64, "bf16"),
    Dims(2, 4, 1, 32, 129, 128, "bf16"),
    Dims(33 - 1, 2, 1, 2, 40, 64, "bf16"),
    Dims(2, 2, 1, 3, 2305, 64),
    Dims(9, 2, 1, 8, 1100, 128, "bf16"),
    Dims(1, 2, 1, 32, 3073, 128, "bf16"),
    # new rows in three scatters, and in scatters that begin inside of a sequence
    Dims(32, 2, 2, 5, 24, 64),
    Dims(2, 6, 6, 32, 64, 64),
]

PAGED = [
    Dims(3, 4, 2, 5, 96, 64),
    Dims(2, 2, 1, 8, 640, 128, "bf16"),
    Dims(2, 4, 2, 3, 2048, 64),
    Dims(5, 2, 1, 8, 2192, 128, "bf16"),
    # new rows in two scatters, and of one sequence
    Dims(32, 2, 2, 5, 24, 64),
    Dims(1, 6, 6, 7, 1024, 64),
]


def run(x: Inputs, lnc: int = 1, **rows: Any) -> tuple[Any, tuple[Any, Any]]:
    """The kernel's output and the cache after it."""
    cache = x.fresh()
    return verify_attention(x.q, x.new, cache, Candidates(x.positions, **rows), lnc=lnc), cache


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("dims", SHAPES, ids=str)
def test_as_exact_as_the_textbook(dims: Dims, lnc: int) -> None:
    x = draw(dims)
    out, cache = run(x, lnc)
    expected, _, written = exact(x)
    assert out.dtype == x.q.dtype
    assert is_close(out, naive(x), expected)
    assert all(np.array_equal(a.astype(np.float64), b) for a, b in zip(cache, written, strict=True))


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("dims", PAGED, ids=str)
def test_blocks_as_exact_as_the_textbook(dims: Dims, lnc: int) -> None:
    x = draw(dims)
    pools, table = pooled(x.keys.swapaxes(2, 3), x.values)
    outside = np.setdiff1d(np.arange(len(pools[0])), table)
    before = pools[0][outside].copy()
    out = verify_attention(x.q, x.new, pools, Candidates(x.positions, block_table=table), lnc=lnc)
    expected, _, written = exact(x)
    assert is_close(out, naive(x), expected)
    keys, values = (unpooled(pool, table, dims.S) for pool in pools)
    assert np.array_equal(keys.swapaxes(2, 3).astype(np.float64), written[0])
    assert np.array_equal(values.astype(np.float64), written[1])
    assert np.array_equal(pools[0][outside], before)
    assert not pools[0][0].any()


def test_a_row_too_far_is_no_textbook() -> None:
    """Negative control: seeing one slot too many breaks the bound that the kernel keeps."""
    x = draw(SHAPES[0], first=[10, 100, 200])
    expected, _, _ = exact(x)
    wrong = law.verify_attention(
        x.q.astype(np.float64),
        tuple(n.astype(np.float64) for n in x.new),  # type: ignore[arg-type]
        (x.keys.swapaxes(2, 3).astype(np.float64), x.values.astype(np.float64)),
        x.positions,
        np.tile((4 << np.arange(3)) - 1, (3, 1)),
    )[0]
    assert not is_close(wrong, naive(x), expected)


@pytest.mark.parametrize("size", [60.0, 1e-3])
def test_extreme_scores(size: float) -> None:
    """Large scores need the maximum, tiny ones make all weights equal."""
    x = draw(Dims(4, 4, 1, 8, 1100, 64))
    x.q = (x.q * size).astype(np.float32)
    out, _ = run(x)
    assert is_close(out, naive(x), exact(x)[0])


def test_the_law_is_the_model_s() -> None:
    """The law equals model/attention.py in fp64-exact inputs, caches included."""
    x = draw(Dims(3, 4, 2, 5, 256, 64))
    new = tuple(torch.from_numpy(n) for n in x.new)
    cache = Cache(torch.from_numpy(x.keys.swapaxes(2, 3).copy()), torch.from_numpy(x.values.copy()))
    placement = Placement(torch.from_numpy(x.positions), torch.arange(256, dtype=torch.int32))
    out, after = torch_attention(EAGER, torch.from_numpy(x.q), new, cache, placement)  # type: ignore[arg-type]
    expected, _, written = exact(x)
    assert is_close(out.numpy(), naive(x), expected)
    assert np.array_equal(after.k.numpy().swapaxes(2, 3), written[0])
    assert np.array_equal(after.v.numpy(), written[1])
