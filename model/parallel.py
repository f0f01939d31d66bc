"""Tensor parallelism: the heads and token ids of each rank.

Graphs are SPMD: all ranks run the same graph and differ only in their weights. The layout is NxD's: kv heads are
sharded, or replicated if there are fewer than ranks; query heads are on the ranks of their kv head, padded with zero
heads if they do not divide evenly; embedding and LM head are sharded by id.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from model.config import ModelConfig
from model.errors import UserError
from model.ops import iota


@dataclass(frozen=True)
class HeadMap:
    """The query and kv heads of each of `tp` ranks."""

    heads: int
    kv_heads: int
    tp: int

    @property
    def replicas(self) -> int:
        """The number of ranks with a copy of the same kv head."""
        return max(1, self.tp // self.kv_heads)

    @property
    def kv_per_rank(self) -> int:
        return max(1, self.kv_heads // self.tp)

    @property
    def heads_per_kv(self) -> int:
        """Query heads per kv head on one rank, including padding."""
        return -(-(self.heads // self.kv_heads) // self.replicas)

    @property
    def heads_per_rank(self) -> int:
        return self.kv_per_rank * self.heads_per_kv

    def kv_of(self, rank: int) -> list[int]:
        """The kv heads of a rank, in order."""
        first = rank // self.replicas * self.kv_per_rank
        return list(range(first, first + self.kv_per_rank))

    def queries_of(self, rank: int) -> list[int | None]:
        """The query heads of a rank, in order; None is a padding head of zeros."""
        group, offset = self.heads // self.kv_heads, rank % self.replicas * self.heads_per_kv
        return [
            kv * group + i if i < group else None
            for kv in self.kv_of(rank)
            for i in range(offset, offset + self.heads_per_kv)
        ]


class VocabShard(NamedTuple):
    """The token ids in the logits of rank `rank_11`: `width` ids from `start_11` (int32) on.

    For a draft with a reduced vocabulary, `mapped_V` are the target ids of these draft ids. `last` is the last id of a
    vocabulary that tp does not divide: the columns after it are padding, whose logits are -inf.
    """

    start_11: Tensor
    width: int
    rank_11: Tensor
    mapped_V: Tensor | None = None
    last: int | None = None

    @property
    def ids_V(self) -> Tensor:
        """(V,) int32 the shard's ids, as target ids; `last` in columns of padding."""
        if self.mapped_V is not None:
            return self.mapped_V
        ids_V = self.start_11[0] + iota(self.width, self.start_11)
        return ids_V if self.last is None else ids_V.clamp(max=self.last)


def ids_per_rank(vocab: int, tp: int) -> int:
    """Rows of the embedding and of the head on each rank; padding included."""
    return -(-vocab // tp)


def check_tp(config: ModelConfig, tp: int, what: str) -> None:
    """Raises UserError if the model's sizes do not support a tp degree."""
    if tp < 1 or tp & (tp - 1):
        raise UserError(f"tp is {tp}; tensor parallelism needs a power of two (1, 2, 4, ... 64)")
    kv = config.num_key_value_heads
    if kv % tp and tp % kv:
        raise UserError(
            f"the {what} has {kv} kv heads, tp is {tp}; tp must divide the number of kv heads or be a multiple of it"
        )
    if config.intermediate_size % tp:
        raise UserError(
            f"the {what}'s intermediate_size {config.intermediate_size} is not divisible by tp {tp}; lower tp"
        )
