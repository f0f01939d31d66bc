"""Random operands of verification attention, in a cache (B, G, S, D) and as pools of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from model.cache import AttentionMetadata, Cache
from nki_kernels.attention import law
from nki_kernels.attention.paged_kv import PAGE
from nki_kernels.attention.verify import verify_attention
from nki_kernels.limits import CHUNK

DTYPES = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16}
# 32 rows in calls of these sizes; every size is slow
SPLITS = [
    ((1, 2, 7, 16, 6), (31, 1)),
    pytest.param([[n] * (32 // n) + [32 % n] * (32 % n > 0) for n in range(1, 32)], marks=pytest.mark.slow),
]


@dataclass(frozen=True)
class Dims:
    """B sequences, H query and G kv heads, N rows, S positions, D."""

    B: int
    H: int
    G: int
    N: int
    S: int
    D: int
    dtype: str = "fp32"

    def __str__(self) -> str:
        return f"B{self.B}-H{self.H}-G{self.G}-N{self.N}-S{self.S}-D{self.D}-{self.dtype}"


@dataclass
class Inputs:
    """q (B, H, N, D), new keys and values (B, G, N, D), a cache (B, G, S, D) and positions (B, N)."""

    q: Any
    new: tuple[Any, Any]
    keys: Any
    values: Any
    positions: Any

    def part(self, b: slice, n: slice) -> Inputs:
        """Some rows of some sequences as a pass of their own."""
        new = self.new[0][b, :, n].copy(), self.new[1][b, :, n].copy()
        cache = self.keys[b].copy(), self.values[b].copy()
        return Inputs(self.q[b, :, n].copy(), new, *cache, self.positions[b, n].copy())

    def operands(self, pages: Any = None, limit: Any = None) -> tuple[Any, ...]:
        """Those of the kernel."""
        (keys, values), table = pages or pooled(self.keys, self.values)
        return self.q, *self.new, keys, values, self.positions, table, limit

    def run(self, pages: Any = None, limit: Any = None, **options: Any) -> Any:
        """The kernel's output from pages, which it changes."""
        return verify_attention(*self.operands(pages, limit), **options)


def normal(rng: Any, dtype: str, *shape: int, size: float = 1.0) -> Any:
    """Uniform numbers of a standard deviation, from integers: no function of a library is between seed and bits."""
    return (rng.integers(-(2**16), 2**16, shape) * (1.7320508 * size / 2**16)).astype(DTYPES[dtype])


def as_torch(array: Any) -> torch.Tensor:
    """The same bits as a tensor."""
    if array.dtype == DTYPES["bf16"]:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def draw(dims: Dims, seed: int = 0, first: Any = None) -> Inputs:
    """Sequences end at different places, the first at the cache's end, unless `first` says where."""
    rng = np.random.default_rng(seed)
    heads = (dims.H, dims.G, dims.G)
    q, k_new, v_new = (normal(rng, dims.dtype, dims.B, count, dims.N, dims.D) for count in heads)
    keys, values = (normal(rng, dims.dtype, dims.B, dims.G, dims.S, dims.D) for _ in range(2))
    if first is None:
        first = rng.integers(0, dims.S - dims.N + 1, dims.B)
        first[0] = dims.S - dims.N
    positions = (np.asarray(first)[:, None] + np.arange(dims.N)).astype(np.int32)
    return Inputs(q, (k_new, v_new), keys, values, positions)


def exact(x: Inputs, limit: Any = None) -> tuple[Any, tuple[Any, Any]]:
    """The law's output in fp64, and the cache after the call."""
    q, k_new, v_new, keys, values = (a.astype(np.float64) for a in (x.q, *x.new, x.keys, x.values))
    return law.verify_attention(q, (k_new, v_new), (keys, values), x.positions, limit), (keys, values)


def naive(x: Inputs, limit: Any = None) -> Any:
    """The textbook: one product with all keys, one softmax in fp32, weights rounded to the cache's dtype."""
    keys, values, out = x.keys.copy(), x.values.copy(), np.zeros(x.q.shape, x.q.dtype)
    group, scale = x.q.shape[1] // keys.shape[1], np.float32(x.q.shape[-1] ** -0.5)
    for b, positions in enumerate(x.positions):
        keys[b, :, positions], values[b, :, positions] = (rows[b].swapaxes(0, 1) for rows in x.new)
        ends = positions if limit is None else np.repeat(limit[b], len(positions))
        hidden = np.arange(keys.shape[2]) > ends[:, None]
        for h in range(x.q.shape[1]):
            scores = x.q[b, h].astype(np.float32) @ keys[b, h // group].astype(np.float32).T * scale
            scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(1, keepdims=True))
            rounded = weights.astype(values.dtype).astype(np.float32)
            out[b, h] = rounded @ values[b, h // group].astype(np.float32) / weights.sum(1, keepdims=True)
    return out


def model_attention(attend: Any, x: Inputs, limit: Any = None) -> tuple[Any, Any]:
    """Output and cache of model/attention.py's function, or of a backing's, on the same numbers."""
    pools, table = pooled(x.keys, x.values)
    limit_B1 = None if limit is None else torch.from_numpy(limit)
    meta = AttentionMetadata(torch.from_numpy(x.positions), torch.from_numpy(table), limit_B1)
    out, after = attend(as_torch(x.q), *map(as_torch, x.new), Cache(*map(as_torch, pools)), meta)
    return out.float().numpy(), tuple(unpooled(pool.float().numpy(), table, x.keys.shape[2]) for pool in after)


def pooled(keys: Any, values: Any, seed: int = 1) -> tuple[tuple[Any, Any], Any]:
    """Pools (pages, G, 128, D) of a cache (B, G, S, D), and its block table, in random order.

    Other pages are garbage, but for page 0, with which the table is filled up to whole chunks.
    """
    (batch, kv_heads, length, dim), rng = values.shape, np.random.default_rng(seed)
    per = -(-length // PAGE)
    count = batch * per + 4
    table = 1 + rng.permutation(count - 1)[: batch * per].reshape(batch, per).astype(np.int32)
    pools = []
    for cache in (keys, values):
        pool = normal(rng, "fp32", count, kv_heads, PAGE, dim).astype(cache.dtype)
        pool[0] = 0
        padded = np.pad(cache, ((0, 0), (0, 0), (0, per * PAGE - length), (0, 0)))
        pool[table] = padded.reshape(batch, kv_heads, per, PAGE, dim).swapaxes(1, 2)
        pools.append(pool)
    return (pools[0], pools[1]), np.pad(table, ((0, 0), (0, -per % (CHUNK // PAGE))))


def unpooled(pool: Any, table: Any, length: int) -> Any:
    """The cache (B, G, S, D) of a pool and a table."""
    cache = pool[table].swapaxes(1, 2)
    return cache.reshape(*cache.shape[:2], -1, cache.shape[-1])[:, :, :length]


def slices(sizes: Sequence[int]) -> list[slice]:
    """Consecutive slices of these sizes."""
    return [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]


def same(a: Any, b: Any) -> bool:
    """Whether two arrays have the same bits."""
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
