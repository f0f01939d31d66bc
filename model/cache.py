"""The KV cache of a fixed size, and where a pass writes and reads its rows in it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from model.config import ModelConfig
from model.ops import rows_of
from model.parallel import Parallel


class Cache(NamedTuple):
    """Keys and values of one layer on one rank, each (B, G, S, D), or pools of blocks (P, G, 128, D)."""

    k: Tensor
    v: Tensor


class Placement(NamedTuple):
    """Where the rows of a pass are.

    Row n of sequence b is written at absolute position `positions_BN[b, n]` of its cache slot and
    attends the keys of that slot whose position, listed in `keys_S`, is not greater. Slots are
    `slots_B`, or sequence b's own slot b when None. Where the cache is a pool of blocks, entry t of
    sequence b in `table_BL` is the block of its positions 128 t to 128 t + 127; block 0 is none, and rows without a
    block are dropped. With `last_B1` all rows of sequence b attend the keys up to that position, which is their last
    one's. With `read_BN` a pass returns these rows alone; of the others the last layer computes keys and values.
    """

    positions_BN: Tensor
    keys_S: Tensor
    slots_B: Tensor | None = None
    table_BL: Tensor | None = None
    last_B1: Tensor | None = None
    read_BN: Tensor | None = None

    def read(self) -> Placement:
        """The placement of the rows that are read."""
        assert self.read_BN is not None
        return self._replace(positions_BN=rows_of(self.positions_BN, self.read_BN), read_BN=None)


def cache_shape(config: ModelConfig, parallel: Parallel, batch: int, length: int) -> tuple[int, int, int, int]:
    """The shape of one key or value cache on one rank: of `batch` slots, or blocks, of so many positions."""
    return batch, parallel.heads(config).kv_per_rank, length, config.head_dim


def empty_caches(config: ModelConfig, parallel: Parallel, batch: int, length: int, dtype: torch.dtype) -> list[Cache]:
    """Zeroed caches, one per layer."""
    shape = cache_shape(config, parallel, batch, length)
    return [Cache(*(torch.zeros(shape, dtype=dtype) for _ in "kv")) for _ in range(config.num_hidden_layers)]
