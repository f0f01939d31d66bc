"""The paged KV cache, and where a pass writes and reads its rows in it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from model.config import ModelConfig
from model.parallel import Parallel


class Cache(NamedTuple):
    """Keys and values of one layer on one rank: pools of blocks, each (P, G, 128, D)."""

    k: Tensor
    v: Tensor


class AttentionMetadata(NamedTuple):
    """Where the rows of a pass are: (B, N) int32 positions, and the block table (B, L) int32.

    Row n of sequence b is written at absolute position `positions_BN[b, n]` and attends that sequence's positions up to
    its own. Entry t of `block_table_BL[b]` is the block of positions 128 t to 128 t + 127; block 0 is none, and rows
    without a block are dropped. With `attend_to_B1` all rows of a sequence attend the positions up to that one
    (bidirectional attention within DFlash's block).
    """

    positions_BN: Tensor
    block_table_BL: Tensor
    attend_to_B1: Tensor | None = None


def cache_shape(config: ModelConfig, parallel: Parallel, blocks: int, length: int) -> tuple[int, int, int, int]:
    """The shape of one key or value cache on one rank: of so many blocks of `length` positions."""
    return blocks, parallel.heads(config).kv_per_rank, length, config.head_dim


def empty_caches(config: ModelConfig, parallel: Parallel, blocks: int, length: int, dtype: torch.dtype) -> list[Cache]:
    """Zeroed caches, one per layer."""
    shape = cache_shape(config, parallel, blocks, length)
    return [Cache(*(torch.zeros(shape, dtype=dtype) for _ in "kv")) for _ in range(config.num_hidden_layers)]
