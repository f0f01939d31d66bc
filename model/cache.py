"""The KV cache of a fixed size, and the rows that a pass writes and reads in it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from model.config import Qwen3Config
from model.parallel import Parallel


class Cache(NamedTuple):
    """Keys and values of one layer on one rank, each (B, G, S, D)."""

    k: Tensor
    v: Tensor


class Rows(NamedTuple):
    """Where the rows of a pass stand.

    Row n of sequence b is written at absolute position `positions_BN[b, n]` of its cache slot and
    attends the keys of that slot whose position, listed in `keys_S`, is not greater. Slots are
    `slots_B`, or sequence b's own slot b when None.
    """

    positions_BN: Tensor
    keys_S: Tensor
    slots_B: Tensor | None = None


def cache_shape(config: Qwen3Config, parallel: Parallel, batch: int, length: int) -> tuple[int, int, int, int]:
    """(B, G, S, D) of one key or value cache on one rank."""
    return batch, parallel.heads(config).kv_per_rank, length, config.head_dim


def empty_caches(config: Qwen3Config, parallel: Parallel, batch: int, length: int, dtype: torch.dtype) -> list[Cache]:
    """Zeroed caches, one per layer."""
    shape = cache_shape(config, parallel, batch, length)
    return [
        Cache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(config.num_hidden_layers)
    ]
