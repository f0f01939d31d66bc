"""One rank's share of a model: its number, and the ids that it draws from."""

from __future__ import annotations

import torch
from torch import nn

from model.backing import Backing
from model.config import ModelConfig
from model.kernels import Kernels
from model.ops import Ops
from model.parallel import Parallel, Rank, Shard


class RankModel(nn.Module):
    """A model on one of `parallel.tp` ranks: everything beside its layers."""

    def __init__(self, config: ModelConfig, parallel: Parallel, backing: Backing) -> None:
        super().__init__()
        self.config = config
        self.parallel, self.backing = parallel, backing
        self.rank_util = Rank()

    @property
    def kernels(self) -> Kernels:
        """The backing's kernels."""
        return self.backing.kernels

    @property
    def head_ops(self) -> Ops:
        """The operations that join the ranks of the head."""
        return self.parallel.ops

    @property
    def shard(self) -> Shard:
        """The ids that this rank draws from: its own, or all of them where the logits are gathered."""
        return self.shard_of(self.config.vocab_size)

    def shard_of(self, count: int) -> Shard:
        """This rank's share of the ids."""
        if not self.backing.sharded:
            return Shard(torch.zeros_like(self.rank_util.rank)[:, None], count)
        width = count // self.parallel.tp
        return Shard(self.rank_util.rank[:, None] * width, width)
