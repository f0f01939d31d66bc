"""The paged KV cache, and where a pass writes and reads its rows in it."""

from typing import NamedTuple, Self

from torch import Tensor

from model.config import ModelConfig
from model.parallel import HeadMap

# positions of a block
KEY_TILE = 128


class Cache(NamedTuple):
    """Keys and values of one layer on one rank: pools of blocks, each (P, G, 128, D).

    Block 0 holds zeros. The last `SPARE_PAGES` take rows without a block; nobody reads them.
    """

    k: Tensor
    v: Tensor


class AttentionMetadata(NamedTuple):
    """Where the rows of a pass are: (B, N) int32 positions, and the block table (B, L) int32.

    Row n of sequence b is written at absolute position `positions_BN[b, n]` and attends that sequence's positions up to
    its own. Entry t of `block_table_BL[b]` is the block of positions 128 t to 128 t + 127; 0 is none, and rows without
    a block go to a spare one. With `attend_to_B1` all rows of a sequence attend the positions up to that one (DFlash).
    """

    positions_BN: Tensor
    block_table_BL: Tensor
    attend_to_B1: Tensor | None = None

    def rows(self, first: int, stop: int) -> Self:
        """The metadata of these rows of each sequence."""
        return self._replace(positions_BN=self.positions_BN[:, first:stop])


def cache_shape(config: ModelConfig, tp: int, blocks: int) -> tuple[int, int, int, int]:
    """The shape of one key or value cache on one rank."""
    heads = HeadMap(config.num_attention_heads, config.num_key_value_heads, tp)
    return blocks, heads.kv_per_rank, KEY_TILE, config.head_dim
