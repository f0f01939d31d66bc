"""What a model is built with: the tensor-parallel degree, the graph's operations, and the backend of its kernels.

`Context` implements the kernels in torch, as the reference; `model/nki/context.py` launches NKI kernels.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from model import attention, sampling
from model.cache import AttentionMetadata, Cache
from model.config import ModelConfig, Qwen3Config
from model.fp8 import quantize_projections
from model.ops import EAGER, Ops
from model.parallel import HeadMap, VocabShard
from model.sampling import SamplingParams, ShardArgmax
from model.weights import Packing

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Context:
    """One of `tp` ranks with the torch backend. `sharded`: logits stay on their ranks and are not gathered.

    `fp8`: the projections of a Qwen3's layers have FP8 weights.
    """

    tp: int = 1
    ops: Ops = EAGER
    fp8: bool = field(default=False, kw_only=True)
    sharded: ClassVar[bool] = False

    def heads(self, config: ModelConfig) -> HeadMap:
        """The assignment of heads to ranks."""
        return HeadMap(config.num_attention_heads, config.num_key_value_heads, self.tp)

    def packing(self, config: ModelConfig) -> Packing:
        """The packed weights of this backend, none in torch, and whether projections are FP8."""
        return Packing(fp8=self.is_fp8(config))

    def is_fp8(self, config: ModelConfig) -> bool:
        """Whether a model's projections have FP8 weights: those of a target, and of a chain's draft."""
        return self.fp8 and type(config) is Qwen3Config

    def fuse(self, model: M) -> M:
        """Replaces modules of the model by those of this backend."""
        config: Any = model.config
        if self.is_fp8(config):
            quantize_projections(model.layers)
        return model

    def attention(
        self, q_BHND: Tensor, k_BGND: Tensor, v_BGND: Tensor, cache: Cache, meta: AttentionMetadata
    ) -> tuple[Tensor, Cache]:
        """Writes the rows' keys and values to the cache, then attends: (B, H, N, D) outputs, and the cache."""
        cache = attention.append(self.ops, k_BGND, v_BGND, cache, meta)
        return attention.attend(self.ops, q_BHND, cache, meta), cache

    def gumbel_noise(self, seed_R2: Tensor, position_R: Tensor, shard: VocabShard) -> Tensor:
        """(R, V) the Gumbel noise of a shard's ids; see `model.sampling.gumbel_noise`."""
        return self.ops.jit(sampling.gumbel_noise, seed_R2, position_R, shard.ids_V)

    def sample(self, logits_RV: Tensor, params: SamplingParams, noise_RV: Tensor, shard: VocabShard) -> ShardArgmax:
        """(M, R) best scores and ids of R rows on M shards; see `model.sampling.sample`."""
        ids_R = sampling.sample(self.ops, logits_RV, params, noise_RV)
        return ShardArgmax(torch.zeros_like(ids_R, dtype=torch.float32)[None], ids_R[None])

    def all_gather_vocab(self, x_RC: Tensor, shard: VocabShard) -> Tensor:
        """Concatenates (R, C) of all vocabulary shards along C; the identity here, where each rank has all logits."""
        return x_RC

    def accept(self, drafts_BK: Tensor, samples: ShardArgmax, max_accepted_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `model.sampling.accept`; `samples` are the target's, (M, B, N)."""
        return sampling.accept(drafts_BK, samples.token_ids(), max_accepted_B)


ONE_RANK = Context()
