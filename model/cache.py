"""The KV cache of a fixed size, and where a pass writes and reads its rows in it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from model.config import ModelConfig
from model.parallel import Parallel


class Cache(NamedTuple):
    """Keys and values of one layer on one rank, each (B, G, S, D) in the reference's layout, or a pool
    (P, G, 128, D)."""

    k: Tensor
    v: Tensor


class Placement(NamedTuple):
    """Where the rows of a pass are.

    Row n of sequence b is written at absolute position `positions_BN[b, n]` of its cache slot and
    attends the keys of that slot whose position, listed in `keys_S`, is not greater. Slots are
    `slots_B`, or sequence b's own slot b when None. Where the cache holds slice `slice_1` of the positions
    (`model/sequence.py`), `keys_S` are that slice's and row n is written at its place `places_BN[b, n]`, if
    that is not negative. Where the cache is a pool of blocks, entry t of sequence b in `table_BL` is the block of its
    positions 128 t to 128 t + 127; block 0 is none, and rows without a block are dropped. With `last_B1` all rows of
    sequence b attend the keys up to that position, which is their last one's.
    """

    positions_BN: Tensor
    keys_S: Tensor
    slots_B: Tensor | None = None
    places_BN: Tensor | None = None
    slice_1: Tensor | None = None
    table_BL: Tensor | None = None
    last_B1: Tensor | None = None


class Layout(NamedTuple):
    """How a backing of the kernels keeps a cache of S positions.

    Keys (B, G, S, D) as the values, or transposed to (B, G, D, S); `margin` slots more, for rows past the last
    position, where nothing reads them. With a `block` of positions a cache is a pool of such blocks, which sequences
    get one by one; without, a slot is one contiguous block.
    """

    transposed_keys: bool = False
    margin: int = 0
    block: int = 0

    def length(self, cache: Cache) -> int:
        """Positions that a cache on one rank can hold."""
        return cache.v.shape[2] - self.margin


PLAIN = Layout()
Shape = tuple[int, int, int, int]


def cache_shapes(
    config: ModelConfig, parallel: Parallel, batch: int, length: int, layout: Layout = PLAIN
) -> tuple[Shape, Shape]:
    """The shapes of one key and one value cache on one rank."""
    heads, dim = parallel.heads(config).kv_per_rank, config.head_dim
    slots = length // parallel.slices(config) + layout.margin
    values = (batch, heads, slots, dim)
    return ((batch, heads, dim, slots) if layout.transposed_keys else values), values


def empty_caches(
    config: ModelConfig, parallel: Parallel, batch: int, length: int, dtype: torch.dtype, layout: Layout = PLAIN
) -> list[Cache]:
    """Zeroed caches, one per layer."""
    shapes = cache_shapes(config, parallel, batch, length, layout)
    return [Cache(*(torch.zeros(s, dtype=dtype) for s in shapes)) for _ in range(config.num_hidden_layers)]
