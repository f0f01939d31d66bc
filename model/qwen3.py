"""Qwen3 by hand: embeddings, RMSNorm, grouped-query attention with qk-norm, SwiGLU, a head.

Source: Qwen3 Technical Report (arXiv 2505.09388) and the checkpoints' published config.json.
Shapes: B sequences, N rows per sequence, E hidden, H query heads and G kv heads on this rank,
D head dim, S cache positions, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.backing import REFERENCE, Backing
from model.cache import AttentionMetadata, Cache
from model.config import LayerConfig, Qwen3Config
from model.kernels import Kernels
from model.ops import Ops, ordered_sum
from model.parallel import ONE_RANK, ColumnLinear, Embedding, Head, Parallel, RowLinear
from model.rank_model import RankModel
from model.rope import Rotation, rotation
from model.sampling import Draw, Draws


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


def rotate(x_BHND: Tensor, angles: Rotation) -> Tensor:
    """Rotary position embedding, half-split as in the checkpoints: pairs (i, i + D/2)."""
    cos, sin = (part_BND[:, None].to(x_BHND.dtype) for part_BND in angles)
    a, b = x_BHND.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    """Grouped-query attention over the cache, queries and keys normalised before the rotation."""

    def __init__(self, config: LayerConfig, parallel: Parallel, kernels: Kernels) -> None:
        super().__init__()
        self.ops, self.kernels, self.head_dim = parallel.ops, kernels, config.head_dim
        heads, d, e = parallel.heads(config), config.head_dim, config.hidden_size
        self.q_proj = ColumnLinear(e, heads.heads_per_rank * d)
        self.k_proj = ColumnLinear(e, heads.kv_per_rank * d)
        self.v_proj = ColumnLinear(e, heads.kv_per_rank * d)
        self.o_proj = RowLinear(heads.heads_per_rank * d, e, parallel.ops)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def qkv(self, x_BNE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of normed rows, (B, N, heads * D) each."""
        return self.q_proj(x_BNE), *self.kv(x_BNE)

    def kv(self, x_BNE: Tensor) -> tuple[Tensor, Tensor]:
        """The same without queries."""
        return self.k_proj(x_BNE), self.v_proj(x_BNE)

    def heads(self, x_BNE: Tensor, angles: Rotation) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Queries (B, H, N, D), and keys and values (B, G, N, D), of normed rows, as attention takes them."""
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in self.qkv(x_BNE))
        return rotate(self.q_norm(q), angles), (rotate(self.k_norm(k), angles), v)

    def write(self, x_BNE: Tensor, angles: Rotation, cache: Cache, meta: AttentionMetadata) -> Cache:
        """The cache with the keys and values of normed rows."""
        k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in self.kv(x_BNE))
        return self.kernels.append(self.ops, (rotate(self.k_norm(k), angles), v), cache, meta)

    def out(self, o_BNF: Tensor) -> Tensor:
        """(B, N, E) of the heads' results, summed over the ranks."""
        summed: Tensor = self.o_proj(o_BNF)
        return summed

    def forward(self, x_BNE: Tensor, angles: Rotation, cache: Cache, meta: AttentionMetadata) -> tuple[Tensor, Cache]:
        q_BHND, new = self.heads(x_BNE, angles)
        o_BHND, cache = self.kernels.verify_attention(self.ops, q_BHND, new, cache, meta)
        return self.out(o_BHND.transpose(1, 2).flatten(2)), cache


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LayerConfig, parallel: Parallel) -> None:
        super().__init__()
        e, i = config.hidden_size, config.intermediate_size // parallel.tp
        self.gate_proj, self.up_proj = ColumnLinear(e, i), ColumnLinear(e, i)
        self.down_proj = RowLinear(i, e, parallel.ops)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Layer(nn.Module):
    """One decoder layer: two pre-normalised residual branches."""

    def __init__(self, config: Qwen3Config, parallel: Parallel, kernels: Kernels) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, parallel, kernels)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, parallel)

    def forward(self, x: Tensor, angles: Rotation, cache: Cache, meta: AttentionMetadata) -> tuple[Tensor, Cache]:
        attended, cache = self.self_attn(self.input_layernorm(x), angles, cache, meta)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Layers(nn.ModuleList):
    """The decoder layers, one after the other."""

    def run(
        self, ops: Ops, x: Tensor, angles: Rotation, caches: list[Cache], meta: AttentionMetadata, taps: tuple[int, ...]
    ) -> tuple[dict[int, Tensor], list[Cache]]:
        """The states before each layer and behind the last, by number, the tapped ones at least; the caches written."""
        states, written = {0: x}, list[Cache]()
        for layer, cache in zip(self, caches, strict=True):
            x, cache = ops.call(layer, x, angles, cache, meta)
            written.append(cache)
            states[len(written)] = x
        return states, written


class Hidden(NamedTuple):
    """Results of a pass: (B, N, E) after the last layer, the caches with the rows written, (B, N, taps E) states."""

    x_BNE: Tensor
    caches: list[Cache]
    taps_BNF: Tensor | None = None


class Qwen3(RankModel):
    """The decoder of one rank. A tied head is a second copy: it is sharded along a different axis.

    `taps` are the hidden states that a drafter reads: 0 is the embedding, i the input of layer i, and the number of
    layers the normed output of the last one, as transformers counts them.
    """

    taps: tuple[int, ...] = ()
    config: Qwen3Config

    def __init__(self, config: Qwen3Config, parallel: Parallel = ONE_RANK, backing: Backing = REFERENCE) -> None:
        super().__init__(config, parallel, backing)
        layer = backing.layer or Layer
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size // parallel.tp, parallel.ops)
        layers = (layer(config, parallel, backing.kernels) for _ in range(config.num_hidden_layers))
        self.layers = (backing.layers or Layers)(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Head(config.hidden_size, config.vocab_size // parallel.tp, parallel.ops, backing.sharded)

    def hidden(self, ids_BN: Tensor, caches: list[Cache], meta: AttentionMetadata) -> Hidden:
        """The layers over rows of ids: their keys and values are written, then attended."""
        x, config, last = self.embed_tokens(ids_BN), self.config, len(self.layers)
        angles = rotation(meta.positions_BN, config.head_dim, config.rope_theta, config.rope_scaling)
        states, written = self.layers.run(self.parallel.ops, x, angles, caches, meta, self.taps)
        x = states[last]
        if not self.taps:
            return Hidden(x, written)
        states[last] = self.norm(states[last])
        return Hidden(x, written, torch.cat([states[tap] for tap in self.taps], -1))

    def logits(self, x_BNE: Tensor) -> Tensor:
        """(B, N, V) fp32 logits of hidden rows, of this rank's ids alone if the kernels draw from shards."""
        return self.lm_head(self.norm(x_BNE))

    def drawn(self, x_BNE: Tensor, draw: Draw) -> tuple[Draws, Tensor | None]:
        """The draws after each of R = B N rows, and in an asking graph their scores (R, C)."""
        return self.kernels.scored_sample(self.head_ops, self.logits(x_BNE).flatten(0, 1), draw)

    def forward(self, ids_BN: Tensor, caches: list[Cache], meta: AttentionMetadata, draw: Draw) -> tuple[Draws, Hidden]:
        """A pass and its draws, (M, R): a drafter's, which has no scores."""
        passed = self.hidden(ids_BN, caches, meta)
        return self.kernels.coupled_sample(self.head_ops, self.logits(passed.x_BNE).flatten(0, 1), draw), passed
