"""Empty paged caches, and block tables with a block for each position of each sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from model.cache import KEY_TILE, AttentionMetadata, Cache, cache_shape
from model.config import ModelConfig
from nki_kernels.limits import SPARE_PAGES


def block_table(batch: int, length: int) -> Tensor:
    """(B, L) int32; blocks are numbered from 1."""
    blocks = -(-length // KEY_TILE)
    return 1 + torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)


def empty_caches(config: ModelConfig, tp: int, blocks: int, dtype: torch.dtype) -> list[Cache]:
    """Zeroed caches, one per layer."""
    shape = cache_shape(config, tp, blocks)
    return [Cache(*(torch.zeros(shape, dtype=dtype) for _ in "kv")) for _ in range(config.num_hidden_layers)]


def empty(config: ModelConfig, batch: int, length: int, dtype: torch.dtype = torch.float32) -> list[Cache]:
    """Caches for `block_table`, on one rank."""
    return empty_caches(config, 1, 1 + block_table(batch, length).numel() + SPARE_PAGES, dtype)


def rows(first: int, stop: int, batch: int, length: int) -> AttentionMetadata:
    """Metadata of rows at positions `first` to `stop` - 1 of each sequence."""
    positions_N = torch.arange(first, stop, dtype=torch.int32)
    return AttentionMetadata(positions_N.expand(batch, -1), block_table(batch, length))
