"""The halves of a layer with packed weights: one parameter a stream of the fused kernels.

The kernels read them as they are. A pass of many rows, a prompt's, unpacks them in the graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import Qwen3Config
from model.parallel import Parallel
from model.qwen3 import MLP, Attention
from nki_kernels.layer.pack_weights import (
    pack,
    pack_gate_up,
    pack_out,
    pack_qkv,
    unpack,
    unpack_gate_up,
    unpack_out,
    unpack_qkv,
)


def _empty(features_out: int, features_in: int) -> Tensor:
    return torch.empty(features_out, features_in, device="meta")


def _like(packed: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty(packed.shape))


class PackedAttention(Attention):
    """Attention whose projections are packed."""

    def make_weights(self, config: Qwen3Config, parallel: Parallel) -> None:
        heads, d, e = parallel.heads(config), config.head_dim, config.hidden_size
        self.kv_features = heads.kv_per_rank * d
        q, kv = _empty(heads.heads_per_rank * d, e), _empty(self.kv_features, e)
        self.qkv_packed = _like(pack_qkv(q, kv, kv, d))
        self.out_packed = _like(pack_out(_empty(e, heads.heads_per_rank * d), d))

    def qkv(self, x_BNE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = unpack_qkv(self.qkv_packed, self.kv_features)
        return F.linear(x_BNE, q), F.linear(x_BNE, k), F.linear(x_BNE, v)

    def out(self, o_BNF: Tensor) -> Tensor:
        return self.ops.all_reduce(F.linear(o_BNF, unpack_out(self.out_packed, self.head_dim)))


class PackedMLP(MLP):
    """MLP whose projections are packed."""

    def make_weights(self, config: Qwen3Config, parallel: Parallel) -> None:
        e, i = config.hidden_size, config.intermediate_size // parallel.tp
        self.ops = parallel.ops
        self.gate_up_packed = _like(pack_gate_up(_empty(i, e), _empty(i, e)))
        self.down_packed = _like(pack(_empty(e, i)))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = unpack_gate_up(self.gate_up_packed)
        made = F.silu(F.linear(x, gate)) * F.linear(x, up)
        return self.ops.all_reduce(F.linear(made, unpack(self.down_packed)))
