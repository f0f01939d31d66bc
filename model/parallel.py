"""Tensor parallelism: which heads and which token ids each rank holds.

A graph is SPMD: every rank runs the same one, and ranks differ only in their weights. Sizes follow NxD's placement: kv
heads are split, or replicated when there are fewer of them than ranks; query heads follow their kv head and are padded
with zero heads when a group does not divide over its replicas; the embedding and the head are split over ids.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from model.config import ModelConfig
from model.errors import UserError
from model.ops import iota


@dataclass(frozen=True)
class HeadMap:
    """Which query and kv heads each of `tp` ranks holds."""

    heads: int
    kv_heads: int
    tp: int

    @property
    def replicas(self) -> int:
        """Ranks that hold a copy of the same kv head."""
        return max(1, self.tp // self.kv_heads)

    @property
    def kv_per_rank(self) -> int:
        return max(1, self.kv_heads // self.tp)

    @property
    def heads_per_kv(self) -> int:
        """Query heads of one kv head on one rank, padding included."""
        return -(-(self.heads // self.kv_heads) // self.replicas)

    @property
    def heads_per_rank(self) -> int:
        return self.kv_per_rank * self.heads_per_kv

    def kv_of(self, rank: int) -> list[int]:
        """The kv heads of a rank, in its order."""
        first = rank // self.replicas * self.kv_per_rank
        return list(range(first, first + self.kv_per_rank))

    def queries_of(self, rank: int) -> list[int | None]:
        """The query heads of a rank, in its order; None is a zero head of padding."""
        group, offset = self.heads // self.kv_heads, rank % self.replicas * self.heads_per_kv
        return [
            kv * group + i if i < group else None
            for kv in self.kv_of(rank)
            for i in range(offset, offset + self.heads_per_kv)
        ]


class VocabShard(NamedTuple):
    """The token ids whose logits rank `rank_11` has: `width` of them from `start_11`, int32, on.

    A draft with a separate vocabulary has in `mapped_V` the target's ids of them. `last`: the last id of a vocabulary
    that the ranks do not divide; the columns after it have the logit -inf.
    """

    start_11: Tensor
    width: int
    rank_11: Tensor
    mapped_V: Tensor | None = None
    last: int | None = None

    @property
    def ids_V(self) -> Tensor:
        """(V,) int32 the target's ids; `last` in the columns after it."""
        if self.mapped_V is not None:
            return self.mapped_V
        ids_V = self.start_11[0] + iota(self.width, self.start_11)
        return ids_V if self.last is None else ids_V.clamp(max=self.last)


def ids_per_rank(count: int, tp: int) -> int:
    """The ids of a vocabulary on each of `tp` ranks; the last ranks have rows of padding where tp does not divide it."""
    return -(-count // tp)


def check_tp(config: ModelConfig, tp: int, what: str) -> None:
    """Raise UserError for a tp degree that the model's sizes cannot be split by."""
    if tp < 1 or tp & (tp - 1):
        raise UserError(f"tp is {tp}; tensor parallelism needs a power of two (1, 2, 4, ... 64)")
    kv = config.num_key_value_heads
    if kv % tp and tp % kv:
        raise UserError(
            f"the {what} has {kv} kv heads, which tp {tp} neither divides nor is a multiple of; choose a different tp"
        )
    if config.intermediate_size % tp:
        raise UserError(
            f"the {what}'s intermediate_size {config.intermediate_size} does not divide by tp {tp}; choose a smaller tp"
        )
