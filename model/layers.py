"""Tensor-parallel layers: sharded projections, embedding, LM head, and the base class of models with a head."""

import functools

import torch
from torch import Tensor, nn

from model.cache import AttentionMetadata, Cache
from model.config import ModelConfig
from model.context import Context
from model.ops import Ops, iota, ordered_sum
from model.parallel import VocabShard, ids_per_rank
from model.rope import Rotation
from model.sampling import SamplingParams, ShardArgmax


class RMSNorm(nn.Module):
    """x / rms(x) * weight; the quotient is computed in fp32 and rounded to x's dtype before the multiplication."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(ordered_sum(y.square())[..., None] / y.shape[-1] + self.eps)
        return self.weight * y.to(x.dtype)


# output features are sharded over the ranks: ColumnLinear(in_features, local out_features)
ColumnLinear = functools.partial(nn.Linear, bias=False)


class RowLinear(nn.Linear):
    """A projection with input features sharded over the ranks; an all-reduce sums the partial results."""

    def __init__(self, local_in: int, out: int, ops: Ops) -> None:
        super().__init__(local_in, out, bias=False)
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.all_reduce(super().forward(x))


class Embedding(nn.Embedding):
    """Token embedding with the vocabulary sharded over the ranks, and an all-reduce; negative ids embed as id 0."""

    def __init__(self, vocab: int, hidden: int, ctx: Context) -> None:
        super().__init__(ids_per_rank(vocab, ctx.tp), hidden)
        self.ops = ctx.ops

    def forward(self, ids: Tensor, rank_11: Tensor) -> Tensor:  # type: ignore[override]
        ids = ids.clamp(min=0) - rank_11 * self.num_embeddings
        local = (ids >= 0) & (ids < self.num_embeddings)
        rows = super().forward(torch.where(local, ids, 0))
        return self.ops.all_reduce(torch.where(local[..., None], rows, 0))


class Head(nn.Linear):
    """LM head with the vocabulary sharded over the ranks. Returns fp32 logits: all-gathered, or this rank's shard if
    the backend samples from shards (`Context.sharded`)."""

    def __init__(self, hidden: int, vocab: int, ctx: Context) -> None:
        super().__init__(hidden, ids_per_rank(vocab, ctx.tp), bias=False)
        self.vocab, self.ctx = vocab, ctx

    def forward(self, x: Tensor, rank_11: Tensor) -> Tensor:  # type: ignore[override]
        logits = super().forward(x).float()
        if self.ctx.sharded:
            return mask_padding(logits, rank_11, self.vocab, self.ctx.tp)
        logits = self.ctx.ops.all_gather(logits, rank_11)
        return logits if logits.shape[-1] == self.vocab else logits[..., : self.vocab]


def mask_padding(logits: Tensor, rank_11: Tensor, vocab: int, tp: int) -> Tensor:
    """The logits of a rank's ids, -inf in the columns after the vocabulary's last id."""
    width = logits.shape[-1]
    if width * tp == vocab:
        return logits
    return torch.where(rank_11 * width + iota(width, rank_11) < vocab, logits, float("-inf"))


class Layers(nn.ModuleList):
    """The decoder layers, one after the other."""

    def run(
        self, ops: Ops, x: Tensor, rope: Rotation, caches: list[Cache], meta: AttentionMetadata, taps: tuple[int, ...]
    ) -> tuple[dict[int, Tensor], list[Cache]]:
        """Returns hidden states by index (i is the input of layer i; at least `taps` and the last), and the caches."""
        states, written = {0: x}, list[Cache]()
        for i, (layer, cache) in enumerate(zip(self, caches, strict=True)):
            states[i + 1], cache = ops.call(layer, states[i], rope, cache, meta)
            written.append(cache)
        return states, written


class LanguageModel(nn.Module):
    """Base class of a model with an LM head on one rank: its rank (a weight), vocabulary shard, noise and sampling."""

    def __init__(self, config: ModelConfig, ctx: Context) -> None:
        super().__init__()
        self.config, self.ctx = config, ctx
        self.rank = nn.Parameter(torch.zeros(1, dtype=torch.int32), requires_grad=False)

    @property
    def rank_11(self) -> Tensor:
        """(1, 1) int32 the rank."""
        return self.rank[:, None]

    @property
    def shard(self) -> VocabShard:
        """The ids in this rank's logits: all ids if the logits are gathered."""
        count, tp = getattr(self.config, self.config.head_size), self.ctx.tp if self.ctx.sharded else 1
        width = ids_per_rank(count, tp)
        last = None if width * tp == count else count - 1
        return VocabShard(self.rank_11 * (width if self.ctx.sharded else 0), width, self.rank_11, last=last)

    def noise(self, seed_B2: Tensor, positions_BN: Tensor) -> Tensor:
        """(B, N, V) Gumbel noise for tokens at these absolute positions."""
        seed_R2 = seed_B2.repeat_interleave(positions_BN.shape[1], 0)
        noise_RV = self.ctx.gumbel_noise(seed_R2, positions_BN.flatten(), self.shard)
        return noise_RV.unflatten(0, positions_BN.shape)

    def sample(self, logits_BNV: Tensor, params: SamplingParams, noise_BNV: Tensor) -> ShardArgmax:
        """Applies the processors and samples one token per row: (M, B, N), over M vocabulary shards."""
        if params.processors is not None:
            logits_BNV = params.processors.process(logits_BNV)
        rows = logits_BNV.flatten(0, 1), params.repeat(logits_BNV.shape[1]), noise_BNV.flatten(0, 1)
        samples = self.ctx.sample(*rows, self.shard)
        return ShardArgmax(*(t.unflatten(1, logits_BNV.shape[:2]) for t in samples))
