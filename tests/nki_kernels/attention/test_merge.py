"""Merging shards of the sequence: against the law, and against attention over the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nki_kernels.attention.host import Candidates, verify_attention
from nki_kernels.attention.merge import merge_attention_kernel

import nkisim
from nki_kernels.attention import law
from nkisim.pytest_plugin import KernelRuns
from tests.close import is_close
from tests.nki_kernels.attention.inputs import Dims, draw, exact, naive


def merge(part: Any, lse: Any) -> tuple[Any, Any]:
    merged: tuple[Any, Any] = nkisim.simulate(merge_attention_kernel)(part, lse)
    return merged


def exact_merge(part: Any, lse: Any) -> tuple[Any, Any]:
    """The law in fp64."""
    merged: tuple[Any, Any] = law.merge_attention(part.astype(np.float64), lse.astype(np.float64))
    return merged


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize(("shards", "rows", "dim"), [(3, 131, 64), (1, 1, 128), (4, 64, 128), (7, 257, 64)])
def test_law(nki_kernel: KernelRuns, shards: int, rows: int, dim: int, lnc: int) -> None:
    """Also at large and tiny numbers, with a NaN, and where all are equal."""
    lse = (20 * np.random.default_rng(shards).standard_normal((shards, rows))).astype(np.float32)
    inputs = [f"float32:{shards}x{rows}x{dim}", lse]
    eps = float(np.finfo(np.float32).eps)
    nki_kernel.check(merge_attention_kernel, exact_merge, inputs, of_largest=4 * shards * eps, lnc=lnc)


@pytest.mark.nki_latency(max_us=10)
def test_time_of_four_shards_of_64_rows(nki_kernel: KernelRuns) -> None:
    nki_kernel.run(merge_attention_kernel, "float32:4x64x128", "float32:4x64", lnc=2)


def test_a_shard_without_visible_keys_does_not_affect_the_result() -> None:
    part = np.stack([np.full((5, 64), 3.0), np.full((5, 64), -1e30)]).astype(np.float32)
    lse = np.stack([np.full(5, 2.0), np.full(5, -3e37)]).astype(np.float32)
    out, merged = merge(part, lse)
    assert np.array_equal(out, part[0])
    assert np.array_equal(merged, lse[0])


def test_the_order_of_rows_does_not_affect_them() -> None:
    rng = np.random.default_rng(0)
    part, lse = rng.standard_normal((3, 200, 64)).astype(np.float32), rng.standard_normal((3, 200)).astype(np.float32)
    order = rng.permutation(200)
    for a, b in zip(merge(part, lse), merge(part[:, order].copy(), lse[:, order].copy()), strict=True):
        assert np.array_equal(a[order], b)


def test_shards_are_added_in_ascending_order() -> None:
    """The large numbers of shards 0 and 1 cancel before the small ones come; in descending order these are lost."""
    part = np.array([2.0**26, -(2.0**26), 1, 1], np.float32)[:, None, None] * np.ones((4, 3, 64), np.float32)
    out, _ = merge(part, np.zeros((4, 3), np.float32))
    assert np.array_equal(out, np.full((3, 64), 0.5))


def test_shards_of_the_prefix_make_the_whole() -> None:
    """The prefix on one rank and the rows themselves on another, merged, are attention over all."""
    x = draw(Dims(2, 4, 2, 3, 600, 64), first=[500, 500])
    whole, logs, _ = exact(x)
    q = x.q.reshape(2, 4, 3, 64)
    parts, lses = [], []
    for low, high in ((0, 256), (256, 600)):
        out, lse = np.zeros(q.shape, np.float32), np.zeros(q.shape[:3], np.float32)
        keys, values = x.fresh()
        if high < 600:
            # every row sees the whole shard: its last slots are rewritten with what they hold
            last = slice(high - 3, high)
            new = keys[..., last].swapaxes(2, 3).copy(), values[:, :, last].copy()
            words = np.tile(np.full(3, 7, np.int32), (2, 1))
            rows = Candidates(np.tile(np.arange(high - 3, high, dtype=np.int32), (2, 1)), words)
        else:
            new, rows = x.new, Candidates(x.positions - low)
        cache = keys[..., low:high].copy(), values[:, :, low:high].copy()
        out, lse = verify_attention(x.q, new, cache, rows, with_lse=True)
        parts.append(out.reshape(-1, 64))
        lses.append(lse.reshape(-1))
    out, merged = merge(np.stack(parts), np.stack(lses))
    assert is_close(out.reshape(q.shape), naive(x), whole)
    assert np.abs(merged.reshape(logs.shape) - logs).max() <= 4 * np.finfo(np.float32).eps * np.abs(logs).max()
    assert not is_close(parts[1].reshape(q.shape), naive(x), whole)
