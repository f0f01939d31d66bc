"""Qwen3 on one tensor-parallel rank: embedding, RMSNorm, grouped-query attention with qk-norm, SwiGLU, LM head.

Source: Qwen3 Technical Report (arXiv 2505.09388) and the config.json of the published checkpoints.
Shapes: B sequences, N rows per sequence, E hidden, H query heads and G kv heads on this rank, D head dim, V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import AttentionMetadata, Cache
from model.config import ModelConfig, Qwen3Config
from model.context import ONE_RANK, Context
from model.layers import ColumnLinear, Embedding, Head, LanguageModel, Layers, RMSNorm, RowLinear
from model.rope import Rotation, apply_rope, rotation
from model.sampling import SamplingParams


class Attention(nn.Module):
    """Grouped-query attention over the KV cache; RMSNorm of queries and keys (qk-norm) before RoPE."""

    def __init__(self, config: ModelConfig, ctx: Context) -> None:
        super().__init__()
        heads, d, e = ctx.heads(config), config.head_dim, config.hidden_size
        self.ctx, self.head_dim = ctx, d
        self.q_proj = ColumnLinear(e, heads.heads_per_rank * d)
        self.k_proj = ColumnLinear(e, heads.kv_per_rank * d)
        self.v_proj = ColumnLinear(e, heads.kv_per_rank * d)
        self.o_proj = RowLinear(heads.heads_per_rank * d, e, ctx.ops)
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)

    def split_heads(self, x_BNF: Tensor) -> Tensor:
        """(B, N, heads * D) -> (B, heads, N, D)."""
        return x_BNF.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def qkv(self, x_BNE: Tensor, rope: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, N, D) and keys (B, G, N, D) after RoPE, and values (B, G, N, D), of normed rows."""
        q_BHND = self.split_heads(self.q_proj(x_BNE))
        return apply_rope(self.q_norm(q_BHND), rope), *self.key_value(x_BNE, rope)

    def key_value(self, x_BNE: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        """Keys (B, G, N, D) after RoPE, and values (B, G, N, D), of normed rows."""
        k_BGND, v_BGND = (self.split_heads(proj(x_BNE)) for proj in (self.k_proj, self.v_proj))
        return apply_rope(self.k_norm(k_BGND), rope), v_BGND

    def forward(self, x_BNE: Tensor, rope: Rotation, cache: Cache, meta: AttentionMetadata) -> tuple[Tensor, Cache]:
        out_BHND, cache = self.ctx.attention(*self.qkv(x_BNE, rope), cache, meta)
        return self.o_proj(out_BHND.transpose(1, 2).flatten(2)), cache


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, ctx: Context) -> None:
        super().__init__()
        e, i = config.hidden_size, config.intermediate_size // ctx.tp
        self.gate_proj, self.up_proj = ColumnLinear(e, i), ColumnLinear(e, i)
        self.down_proj = RowLinear(i, e, ctx.ops)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One decoder layer: attention and MLP, each with a pre-norm and a residual."""

    def __init__(self, config: ModelConfig, ctx: Context) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, ctx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, ctx)

    def forward(self, x: Tensor, rope: Rotation, cache: Cache, meta: AttentionMetadata) -> tuple[Tensor, Cache]:
        attn, cache = self.self_attn(self.input_layernorm(x), rope, cache, meta)
        x = x + attn
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Hidden(NamedTuple):
    """A pass over the layers: last hidden states (B, N, E), updated caches, tapped states (B, N, taps * E)."""

    x_BNE: Tensor
    caches: list[Cache]
    taps_BNF: Tensor | None = None


class Qwen3(LanguageModel):
    """Qwen3 on one rank. A tied LM head is a second copy of the embedding.

    `taps` are the indices of the hidden states that a drafter reads, as in transformers' `hidden_states`: i is the
    input of layer i (0 the embedding), num_hidden_layers the normed output of the last layer.
    """

    taps: tuple[int, ...] = ()
    config: Qwen3Config

    def __init__(self, config: Qwen3Config, ctx: Context = ONE_RANK) -> None:
        super().__init__(config, ctx)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, ctx)
        self.layers = Layers(DecoderLayer(config, ctx) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Head(config.hidden_size, config.vocab_size, ctx)

    def hidden(self, ids_BN: Tensor, caches: list[Cache], meta: AttentionMetadata) -> Hidden:
        """Embeds the ids and runs the layers, which write the rows' keys and values, then attend."""
        x, last = self.embed_tokens(ids_BN, self.rank_11), len(self.layers)
        rope = rotation(meta.positions_BN, self.config)
        states, caches = self.layers.run(self.ctx.ops, x, rope, caches, meta, self.taps)
        taps = [self.norm(states[tap]) if tap == last else states[tap] for tap in self.taps]
        return Hidden(states[last], caches, torch.cat(taps, -1) if taps else None)

    def logits(self, x_BNE: Tensor) -> Tensor:
        """(B, N, V) fp32 logits of hidden rows; V is this rank's shard if the backend samples from shards."""
        return self.lm_head(self.norm(x_BNE), self.rank_11)

    def forward(
        self, ids_BN: Tensor, caches: list[Cache], meta: AttentionMetadata, params: SamplingParams, noise_BNV: Tensor
    ) -> tuple[Tensor, list[Cache]]:
        """One pass with sampling, for drafters: (B, N) sampled ids, and the caches."""
        x_BNE, caches, _ = self.hidden(ids_BN, caches, meta)
        return self.sample(self.logits(x_BNE), params, noise_BNV).token_ids(), caches
