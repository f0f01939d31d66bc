"""Random operands of verification attention, and the same cache in a pool of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from nki_kernels.attention.blocks import BLOCK

from nki_kernels.attention import law
from nki_kernels.limits import CHUNK

DTYPES = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Dims:
    """B sequences, H query and G kv heads, N rows, S slots, D."""

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
    """Operands in the kernel's layouts; the cache may be changed by a run, so `fresh` copies it."""

    q: Any
    new: tuple[Any, Any]
    keys: Any
    values: Any
    positions: Any

    def fresh(self) -> tuple[Any, Any]:
        """A copy of the cache: keys (B, G, D, S), values (B, G, S, D)."""
        return self.keys.copy(), self.values.copy()


def draw(dims: Dims, seed: int = 0, first: Any = None) -> Inputs:
    """Normal numbers; sequences end at different places, the first at the cache's end, unless `first` says where."""
    rng, kind = np.random.default_rng(seed), DTYPES[dims.dtype]

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(kind)

    q, k_new, v_new = (normal(dims.B, heads, dims.N, dims.D) for heads in (dims.H, dims.G, dims.G))
    keys, values = normal(dims.B, dims.G, dims.D, dims.S), normal(dims.B, dims.G, dims.S, dims.D)
    if first is None:
        first = rng.integers(0, dims.S - dims.N + 1, dims.B)
        first[0] = dims.S - dims.N
    positions = (np.asarray(first)[:, None] + np.arange(dims.N)).astype(np.int32)
    return Inputs(q, (k_new, v_new), keys, values, positions)


def exact(x: Inputs, ancestors: Any = None) -> tuple[Any, Any, tuple[Any, Any]]:
    """out and lse of the law in fp64, and the cache after the call in the kernel's layouts."""
    q, k_new, v_new = (a.astype(np.float64) for a in (x.q, *x.new))
    cache = x.keys.astype(np.float64).swapaxes(2, 3).copy(), x.values.astype(np.float64)
    out, lse = law.verify_attention(q, (k_new, v_new), cache, x.positions, ancestors)
    return out, lse, (cache[0].swapaxes(2, 3), cache[1])


def naive(x: Inputs, ancestors: Any = None) -> Any:
    """The textbook: one product with all slots, one softmax in fp32, weights rounded to the cache's dtype."""
    (keys, values), out = x.fresh(), np.zeros(x.q.shape, x.q.dtype)
    group, scale = x.q.shape[1] // keys.shape[1], np.float32(x.q.shape[-1] ** -0.5)
    for b, positions in enumerate(x.positions):
        keys[b, :, :, positions] = x.new[0][b].swapaxes(0, 1)
        values[b, :, positions] = x.new[1][b].swapaxes(0, 1)
        hidden = np.arange(keys.shape[3]) > positions[:, None]
        if ancestors is not None:
            hidden[:, positions] = (ancestors[b][:, None] >> np.arange(len(positions)) & 1) == 0
        for h in range(x.q.shape[1]):
            scores = x.q[b, h].astype(np.float32) @ keys[b, h // group].astype(np.float32) * scale
            scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(1, keepdims=True))
            rounded = weights.astype(values.dtype).astype(np.float32)
            out[b, h] = rounded @ values[b, h // group].astype(np.float32) / weights.sum(1, keepdims=True)
    return out


def pooled(keys: Any, values: Any, seed: int = 1) -> tuple[tuple[Any, Any], Any]:
    """Pools of keys and values (blocks, G, 128, D) and the block table of the cache (B, G, S, D), in random order.

    Other blocks are garbage, but for block 0, with which the table is filled up to whole chunks.
    """
    (batch, kv_heads, slots, dim), rng = values.shape, np.random.default_rng(seed)
    per = -(-slots // BLOCK)
    count = batch * per + 4
    own = 1 + rng.permutation(count - 1)[: batch * per].reshape(batch, per).astype(np.int32)
    pools = []
    for cache in (keys, values):
        pool = rng.standard_normal((count, kv_heads, BLOCK, dim)).astype(cache.dtype)
        pool[0] = 0
        whole = np.pad(cache, ((0, 0), (0, 0), (0, per * BLOCK - slots), (0, 0)))
        pool[own] = whole.reshape(batch, kv_heads, per, BLOCK, dim).swapaxes(1, 2)
        pools.append(pool)
    return (pools[0], pools[1]), np.pad(own, ((0, 0), (0, -per % (CHUNK // BLOCK))))


def unpooled(pool: Any, table: Any, slots: int) -> Any:
    """The cache (B, G, S, D) that a pool and a table stand for."""
    cache = pool[table].swapaxes(1, 2)
    return cache.reshape(*cache.shape[:2], -1, cache.shape[-1])[:, :, :slots]
