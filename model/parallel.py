"""Tensor parallelism has one door: who holds which heads, and the four sharded layers.

The graph is SPMD: every rank runs the same one, and ranks differ only in the
weights that they are given. Sizes follow NxD's placement: kv heads are split, or replicated when
there are fewer of them than ranks; query heads follow their kv head and are padded with zero
heads when a group does not divide over its replicas; the embedding is split over hidden, the
head over the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import HeadConfig, ModelConfig
from model.errors import UserError
from model.ops import EAGER, Ops


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


def check_tp(config: ModelConfig, tp: int, what: str) -> None:
    """Refuse a tp degree that the model's sizes cannot be split by."""
    if tp < 1 or tp & (tp - 1):
        raise UserError(f"tp is {tp}; tensor parallelism needs a power of two (1, 2, 4, ... 64)")
    kv = config.num_key_value_heads
    if kv % tp and tp % kv:
        raise UserError(
            f"the {what} has {kv} kv heads, which tp {tp} neither divides nor is a multiple of; choose a different tp"
        )
    for name in (*config.split, config.ids):
        if getattr(config, name) % tp:
            raise UserError(
                f"the {what}'s {name} {getattr(config, name)} does not divide by tp {tp}; choose a smaller tp"
            )


class ColumnLinear(nn.Module):
    """y = x W^T with the output features split over the ranks."""

    def __init__(self, features_in: int, features_out_local: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features_out_local, features_in))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class RowLinear(nn.Module):
    """y = x W^T with the input features split over the ranks, summed by an all-reduce."""

    def __init__(self, features_in_local: int, features_out: int, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(features_out, features_in_local))

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.all_reduce(F.linear(x, self.weight))


class Embedding(nn.Module):
    """Token embedding with the hidden axis split over the ranks, gathered after the look-up.

    An id below 0, which stands for none, has the embedding of id 0.
    """

    def __init__(self, vocab: int, hidden_local: int, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(vocab, hidden_local))

    def forward(self, ids: Tensor) -> Tensor:
        return self.ops.all_gather(F.embedding(ids.clamp(min=0), self.weight))


class Head(nn.Module):
    """Logits in fp32 with the vocabulary split over the ranks, gathered unless the kernels draw from shards."""

    def __init__(self, hidden: int, vocab_local: int, ops: Ops, sharded: bool = False) -> None:
        super().__init__()
        self.ops, self.sharded = ops, sharded
        self.weight = nn.Parameter(torch.empty(vocab_local, hidden))

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(x, self.weight).float()
        return logits if self.sharded else self.ops.all_gather(logits)


class Rank(nn.Module):
    """This rank's number among those that split the model's head, as a weight: the graph is the same for every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = nn.Parameter(torch.zeros(1, dtype=torch.int32), requires_grad=False)


class Shard(NamedTuple):
    """The ids whose logits a rank holds: `width` of them from `start` on, (1, 1) int32.

    Where a draft counts ids of its own, `ids_V` are the target's ids for them.
    """

    start: Tensor
    width: int
    ids_V: Tensor | None = None


@dataclass(frozen=True)
class Parallel:
    """The tensor-parallel degree that a model is built for, and the operations it is built on."""

    tp: int = 1
    ops: Ops = EAGER

    def heads(self, config: HeadConfig) -> HeadMap:
        return HeadMap(config.num_attention_heads, config.num_key_value_heads, self.tp)


ONE_RANK = Parallel()
