"""Random operands of attention, as a cache (B, G, S, D) and as pools of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch

from model.cache import AttentionMetadata, Cache
from model.context import ONE_RANK
from nki_kernels.attention import law
from nki_kernels.attention.paged_kv import PAGE
from nki_kernels.attention.verify import verify_attention
from nki_kernels.limits import CHUNK, SPARE_PAGES
from nkisim.policy import using

DTYPES = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16}
# first positions of the rows of check_dropped
DROPPED = [100, 127, 1023, 5, -2]


class Dims(NamedTuple):
    """B sequences, H query and G kv heads, N rows, S positions, D."""

    B: int
    H: int
    G: int
    N: int
    S: int
    D: int
    dtype: str = "fp32"


@dataclass
class Inputs:
    """q (B, H, N, D) times 1 / sqrt(D), new keys and values (B, G, N, D), a cache (B, G, S, D), positions (B, N)."""

    q: Any
    new: tuple[Any, Any]
    keys: Any
    values: Any
    positions: Any

    def part(self, b: slice, n: slice) -> Inputs:
        """Some rows of some sequences as a separate pass."""
        new = self.new[0][b, :, n].copy(), self.new[1][b, :, n].copy()
        cache = self.keys[b].copy(), self.values[b].copy()
        return Inputs(self.q[b, :, n].copy(), new, *cache, self.positions[b, n].copy())

    def pages(self, seed: int = 1) -> tuple[tuple[Any, Any], Any]:
        """Pools of keys and values (pages, G, 128, D), a copy, and the block table."""
        return pooled(self.keys, self.values, seed)

    def operands(self, pages: Any = None, limit: Any = None) -> tuple[Any, ...]:
        """The operands of the kernel."""
        (keys, values), table = pages or self.pages()
        return self.q, *self.new, keys, values, self.positions, table, limit

    def run(self, pages: Any = None, limit: Any = None, **options: Any) -> Any:
        """The kernel's output from pages, which it changes."""
        return verify_attention(*self.operands(pages, limit), **options)


def normal(rng: Any, dtype: str, *shape: int, size: float = 1.0) -> Any:
    """Uniform numbers of standard deviation `size`, from integers, so that bits depend on no library function."""
    return (rng.integers(-(2**16), 2**16, shape) * (1.7320508 * size / 2**16)).astype(DTYPES[dtype])


def as_torch(array: Any) -> torch.Tensor:
    """The same bits as a tensor."""
    if array.dtype == DTYPES["bf16"]:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def draw(dims: Dims, seed: int = 0, first: Any = None) -> Inputs:
    """Sequences with rows from `first` on, by default at random places, those of the first one at the cache's end."""
    rng = np.random.default_rng(seed)
    q, k_new, v_new = (
        normal(rng, dims.dtype, dims.B, heads, dims.N, dims.D, size=size)
        for heads, size in ((dims.H, dims.D**-0.5), (dims.G, 1), (dims.G, 1))
    )
    keys, values = (normal(rng, dims.dtype, dims.B, dims.G, dims.S, dims.D) for _ in range(2))
    if first is None:
        first = rng.integers(0, dims.S - dims.N + 1, dims.B)
        first[0] = dims.S - dims.N
    positions = (np.asarray(first)[:, None] + np.arange(dims.N)).astype(np.int32)
    return Inputs(q, (k_new, v_new), keys, values, positions)


def exact(x: Inputs, limit: Any = None) -> tuple[Any, tuple[Any, Any]]:
    """The law's output in fp64 and the cache after it."""
    q, k_new, v_new, keys, values = (a.astype(np.float64) for a in (x.q, *x.new, x.keys, x.values))
    return law.verify_attention(q, (k_new, v_new), (keys, values), x.positions, limit), (keys, values)


def model_attention(x: Inputs, limit: Any = None, attend: Any = ONE_RANK.attention) -> tuple[Any, Any]:
    """Output and cache of a context's attention for the same operands; a context multiplies queries by 1 / sqrt(D)."""
    pools, table = pooled(x.keys, x.values)
    limit_B1 = None if limit is None else torch.from_numpy(limit)
    meta = AttentionMetadata(torch.from_numpy(x.positions), torch.from_numpy(table), limit_B1)
    q = as_torch(x.q.astype(np.float32) * np.float32(x.q.shape[-1] ** 0.5))
    out, after = attend(q, *map(as_torch, x.new), Cache(*map(as_torch, pools)), meta)
    out = out.to(as_torch(x.q).dtype)
    return out.float().numpy(), tuple(unpooled(pool.float().numpy(), table, x.keys.shape[2]) for pool in after)


def naive(x: Inputs, limit: Any = None) -> Any:
    """The output of the model's attention in the same dtype."""
    return model_attention(x, limit)[0]


def pooled(keys: Any, values: Any, seed: int = 1) -> tuple[tuple[Any, Any], Any]:
    """Pools (pages, G, 128, D) of a cache (B, G, S, D), and its block table, in random order.

    Page 0, which fills the table up to full chunks, and the spare pages are zero; other pages are random.
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
        pools.append(np.concatenate((pool, np.zeros((SPARE_PAGES, *pool.shape[1:]), pool.dtype))))
    return (pools[0], pools[1]), np.pad(table, ((0, 0), (0, -per % (CHUNK // PAGE))))


def unpooled(pool: Any, table: Any, length: int) -> Any:
    """The cache (B, G, S, D) of a pool and a table."""
    cache = pool[table].swapaxes(1, 2)
    return cache.reshape(*cache.shape[:2], -1, cache.shape[-1])[:, :, :length]


def combine(shapes: Sequence[Any]) -> list[Any]:
    """(shape, dtype, cores) of each shape, alternating dtype and cores; the other dtype and cores are slow."""
    ways = [(shape, ("fp32", "bf16")[n % 2], 1 + n // 2 % 2) for n, shape in enumerate(shapes)]
    others = [(shape, "bf16" if dtype == "fp32" else "fp32", 3 - lnc) for shape, dtype, lnc in ways]
    return [*ways, *(pytest.param(*way, marks=pytest.mark.slow) for way in others)]


def slices(sizes: Sequence[int]) -> list[slice]:
    """Consecutive slices of these sizes."""
    return [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]


def others(pools: Any, table: Any) -> list[Any]:
    """The pages that the table does not name, copied; page 0 is zero."""
    assert not any(pool[0].any() for pool in pools)
    return [np.delete(pool, np.unique(table[table > 0]), 0) for pool in pools]


def changed_rows(pools: Any, before: Any) -> list[Any]:
    """Where rows of the pools changed: (page, place), the same in both."""
    keys, values = ((pool != old).any((1, 3)) for pool, old in zip(pools, before, strict=True))
    assert np.array_equal(keys, values)
    return sorted(map(tuple, np.argwhere(keys)))


def check_dropped(x: Any, pages: Any, lnc: int) -> None:
    """Rows in page 0, beyond the table (also at exactly S) and at negative positions change spare pages only.

    x has five sequences of three rows from DROPPED on, in 1024 positions; the bits of the first one do not change. The
    kernel runs under the strict policy.
    """
    (pools, table), expected = pages, x.run()
    before = without_pages(pools, table)
    with using("strict"):
        assert same(x.run((pools, table), lnc=lnc)[0], expected[0])
    check_places(pools, before, table)


def without_pages(pools: Any, table: Any) -> list[Any]:
    """Remove the pages of some rows from DROPPED on from the table; returns a copy of the pools."""
    table[1], table[2, 0] = 0, 0
    return [pool.copy() for pool in pools]


def check_places(pools: Any, before: Any, table: Any) -> None:
    """Of three rows from each of DROPPED on, eight are in their pages and the others in spare pages."""
    changed, paged = changed_rows(pools, before), {0: [100, 101, 102], 2: [1023], 3: [5, 6, 7], 4: [0]}
    assert changed[:8] == sorted((table[b, p // 128], p % 128) for b, at in paged.items() for p in at)
    assert set() < {page for page, _ in changed[8:]} <= set(range(len(pools[0]))[-SPARE_PAGES:])


def same(a: Any, b: Any) -> bool:
    """Whether two arrays have the same bits."""
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
