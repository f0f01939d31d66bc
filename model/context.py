"""What a model is built with: its tensor-parallel degree, a graph's operations, and the kernels of the step.

`Context` has the kernels in torch, the definition that a backend must equal; `model/nki/context.py` launches NKI ones.
"""

from dataclasses import dataclass
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
    """One of `tp` ranks, on torch; `sharded` logits stay on their ranks. `fp8`: layers of Qwen3 have FP8 weights."""

    tp: int = 1
    ops: Ops = EAGER
    fp8: bool = False
    sharded: ClassVar[bool] = False

    def heads(self, config: ModelConfig) -> HeadMap:
        """Which heads each rank holds."""
        return HeadMap(config.num_attention_heads, config.num_key_value_heads, self.tp)

    def packing(self, config: ModelConfig) -> Packing:
        """The halves of a layer whose weights are packed, and whether they are FP8."""
        return Packing(fp8=self.is_fp8(config))

    def is_fp8(self, config: ModelConfig) -> bool:
        """Whether a model's projections have FP8 weights: those of a target, and of a chain's draft."""
        return self.fp8 and type(config) is Qwen3Config

    def fuse(self, model: M) -> M:
        """The model with the modules of this backend in the place of torch's."""
        config: Any = model.config
        if self.is_fp8(config):
            quantize_projections(model.layers)
        return model

    def attention(
        self, q_BHND: Tensor, k_BGND: Tensor, v_BGND: Tensor, cache: Cache, meta: AttentionMetadata
    ) -> tuple[Tensor, Cache]:
        """(B, H, N, D) attention of rows over the cache, with the rows themselves written first, and the cache."""
        cache = attention.append(self.ops, k_BGND, v_BGND, cache, meta)
        return attention.attend(self.ops, q_BHND, cache, meta), cache

    def gumbel_noise(self, seed_R2: Tensor, position_R: Tensor, shard: VocabShard) -> Tensor:
        """(R, V) the noise of a shard's ids; see `model.sampling.gumbel_noise`."""
        return self.ops.shared(sampling.gumbel_noise, seed_R2, position_R, shard.ids_V)

    def sample(self, logits_RV: Tensor, params: SamplingParams, noise_RV: Tensor, shard: VocabShard) -> ShardArgmax:
        """(M, R) the samples of R rows; see `model.sampling.sample`."""
        ids_R = sampling.sample(self.ops, logits_RV, params, noise_RV)
        return ShardArgmax(torch.zeros_like(ids_R, dtype=torch.float32)[None], ids_R[None])

    def all_gather_vocab(self, x_RC: Tensor, shard: VocabShard) -> Tensor:
        """The numbers of all ranks that have a part of the logits, side by side: here every rank has all logits."""
        return x_RC

    def accept(self, drafts_BK: Tensor, samples: ShardArgmax, max_accepted_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `model.sampling.accept`; the target's samples (M, B, N)."""
        return sampling.accept(drafts_BK, samples.token_ids(), max_accepted_B)


ONE_RANK = Context()
