"""Merging shards of the sequence: against the law, and against attention over the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nkisim
from nki_kernels.attention import law as reference
from nki_kernels.attention.host import Rows, verify_attention
from nki_kernels.attention.merge import merge_attention_kernel
from tests.nki_kernels.verify_attention_inputs import Dims, draw, exact, naive


def merge(part: Any, lse: Any, lnc: int = 1) -> tuple[Any, Any]:
    found: tuple[Any, Any] = nkisim.simulate(merge_attention_kernel[lnc])(part, lse)
    return found


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize(("shards", "rows", "dim"), [(3, 131, 64), (1, 1, 128), (4, 64, 128), (7, 257, 64)])
def test_law(shards: int, rows: int, dim: int, lnc: int) -> None:
    rng = np.random.default_rng(shards)
    part = rng.standard_normal((shards, rows, dim)).astype(np.float32)
    lse = (20 * rng.standard_normal((shards, rows))).astype(np.float32)
    out, merged = merge(part, lse, lnc)
    expected, logs = reference.merge_attention(part.astype(np.float64), lse.astype(np.float64))
    eps = np.finfo(np.float32).eps
    assert np.abs(out - expected).max() <= 4 * shards * eps * np.abs(part).max()
    assert np.abs(merged - logs).max() <= 4 * eps * np.abs(logs).max()


def test_a_shard_without_visible_keys_has_no_say() -> None:
    part = np.stack([np.full((5, 64), 3.0), np.full((5, 64), -1e30)]).astype(np.float32)
    lse = np.stack([np.full(5, 2.0), np.full(5, -3e37)]).astype(np.float32)
    out, merged = merge(part, lse)
    assert np.array_equal(out, part[0])
    assert np.array_equal(merged, lse[0])


def test_the_order_of_rows_has_no_say() -> None:
    rng = np.random.default_rng(0)
    part, lse = rng.standard_normal((3, 200, 64)).astype(np.float32), rng.standard_normal((3, 200)).astype(np.float32)
    order = rng.permutation(200)
    for a, b in zip(merge(part, lse), merge(part[:, order].copy(), lse[:, order].copy()), strict=True):
        assert np.array_equal(a[order], b)


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
            rows = Rows(np.tile(np.arange(high - 3, high, dtype=np.int32), (2, 1)), words)
        else:
            new, rows = x.new, Rows(x.positions - low)
        cache = keys[..., low:high].copy(), values[:, :, low:high].copy()
        out, lse = verify_attention(x.q, new, cache, rows, with_lse=True)
        parts.append(out.reshape(-1, 64))
        lses.append(lse.reshape(-1))
    out, merged = merge(np.stack(parts), np.stack(lses))
    error = np.abs(out.reshape(q.shape) - whole).max()
    assert error <= 2 * np.abs(naive(x) - whole).max()
    assert np.abs(merged.reshape(logs.shape) - logs).max() <= 4 * np.finfo(np.float32).eps * np.abs(logs).max()
    assert np.abs(parts[1].reshape(q.shape) - whole).max() > 100 * error
