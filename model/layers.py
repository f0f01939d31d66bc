"""The layers that ranks share: sharded projections, embedding and head, and what every model with a head has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.context import Context
from model.ops import Ops, ordered_sum
from model.parallel import VocabShard
from model.sampling import SamplingParams, ShardArgmax


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32 and rounded once before the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(ordered_sum(y.square())[..., None] / y.shape[-1] + self.eps)
        return self.weight * y.to(x.dtype)


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
    """Logits in fp32 with the vocabulary split over the ranks, gathered unless the kernels sample from shards."""

    def __init__(self, hidden: int, vocab: int, ctx: Context) -> None:
        super().__init__()
        self.ctx = ctx
        self.weight = nn.Parameter(torch.empty(vocab // ctx.tp, hidden))

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(x, self.weight).float()
        return logits if self.ctx.sharded else self.ctx.ops.all_gather(logits)


class RankIndex(nn.Module):
    """This rank's number as a weight: the graph is the same for every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = nn.Parameter(torch.zeros(1, dtype=torch.int32), requires_grad=False)


class LanguageModel(nn.Module):
    """One rank of a model with a head: its part of the vocabulary, and samples from its logits."""

    def __init__(self, config: ModelConfig, ctx: Context) -> None:
        super().__init__()
        self.config, self.ctx = config, ctx
        self.rank_util = RankIndex()

    @property
    def shard(self) -> VocabShard:
        """The ids whose logits this rank has: all of them where the logits are gathered."""
        rank, count = self.rank_util.rank[:, None], getattr(self.config, self.config.head_size)
        if not self.ctx.sharded:
            return VocabShard(torch.zeros_like(rank), count)
        return VocabShard(rank * (count // self.ctx.tp), count // self.ctx.tp)

    def noise(self, seed_B2: Tensor, positions_BN: Tensor) -> Tensor:
        """(B, N, V) the noise of the samples at these positions."""
        seed_R2 = seed_B2.repeat_interleave(positions_BN.shape[1], 0)
        noise_RV = self.ctx.gumbel_noise(seed_R2, positions_BN.flatten(), self.shard)
        return noise_RV.unflatten(0, positions_BN.shape)

    def sample(self, logits_BNV: Tensor, params: SamplingParams, noise_BNV: Tensor) -> ShardArgmax:
        """(M, B, N) the samples after N rows of each sequence."""
        if params.processors is not None:
            logits_BNV = params.processors.process(logits_BNV)
        shape = logits_BNV.shape[:2]
        rows = logits_BNV.flatten(0, 1), params.repeat(shape[1]), noise_BNV.flatten(0, 1)
        return ShardArgmax(*(t.unflatten(1, shape) for t in self.ctx.sample(*rows, self.shard)))
