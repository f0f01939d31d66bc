"""The paged KV cache and the attention metadata of a pass."""

from typing import NamedTuple, Self

from torch import Tensor

from model.config import ModelConfig
from model.parallel import HeadMap

# positions per block
KEY_TILE = 128


class Cache(NamedTuple):
    """Keys and values of one layer on one rank, each a pool of P blocks (P, G, 128, D).

    Block 0 is the null block, all zeros. The last `SPARE_PAGES` blocks receive rows without a block and are never read.
    """

    k: Tensor
    v: Tensor


class AttentionMetadata(NamedTuple):
    """Absolute positions of a pass's rows (B, N) and the block table (B, L), both int32.

    Row n of sequence b is written at `positions_BN[b, n]` and attends positions up to and including it. With
    `attend_to_B1` all rows of a sequence attend up to that position (bidirectional within the block, for DFlash).
    `block_table_BL[b, t]` is the block of positions 128 t to 128 t + 127, 0 if there is none; rows without a block are
    written to a spare block.
    """

    positions_BN: Tensor
    block_table_BL: Tensor
    attend_to_B1: Tensor | None = None

    def rows(self, first: int, stop: int) -> Self:
        """The metadata of rows `first` to `stop` - 1 of each sequence."""
        return self._replace(positions_BN=self.positions_BN[:, first:stop])


def cache_shape(config: ModelConfig, tp: int, blocks: int) -> tuple[int, int, int, int]:
    """The shape of a layer's key cache, and of its value cache, on one rank."""
    heads = HeadMap(config.num_attention_heads, config.num_key_value_heads, tp)
    return blocks, heads.kv_per_rank, KEY_TILE, config.head_dim
