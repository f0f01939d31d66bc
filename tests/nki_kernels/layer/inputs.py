"""Random operands of the fused decode kernels in a checkpoint's layouts, and the model in the same dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from model.cache import AttentionMetadata, Cache
from model.config import PRESETS
from model.context import ONE_RANK
from model.layers import RMSNorm
from model.qwen3 import MLP as TorchMLP
from model.rope import apply_rope, rotation
from nki_kernels.layer import law
from nki_kernels.layer.attention import decode_attention
from nki_kernels.layer.pack_weights import pack, pack_gate_up, pack_out, pack_qkv
from tests.nki_kernels.attention.inputs import DTYPES, as_torch, normal, pooled, unpooled

DIM = 128
# for its head dim, theta and eps
CONFIG = PRESETS["Qwen/Qwen3-0.6B"]


def as_fp64(*arrays: Any) -> list[Any]:
    """The same numbers in fp64."""
    return [a.astype(np.float64) for a in arrays]


class MLP(NamedTuple):
    """x (R, E), gamma (E,), gate and up (I, E), down (E, I)."""

    x: Any
    gamma: Any
    gate: Any
    up: Any
    down: Any

    def operands(self) -> tuple[Any, ...]:
        """The operands of decode_mlp_kernel and prompt_mlp_kernel."""
        return self.x, self.gamma, pack_gate_up(self.gate, self.up), pack(self.down)

    def rows(self, chosen: slice) -> MLP:
        """Some of the rows."""
        return self._replace(x=self.x[chosen].copy())


def draw_mlp(rows: int, hidden: int, inner: int, dtype: str) -> MLP:
    """Rows of size 3, weights for which results have sizes near one."""
    rng = np.random.default_rng(rows + hidden + inner)
    gate, up = (normal(rng, dtype, inner, hidden, size=hidden**-0.5) for _ in range(2))
    gamma = (1 + normal(rng, "fp32", hidden, size=0.2)).astype(gate.dtype)
    return MLP(normal(rng, dtype, rows, hidden, size=3), gamma, gate, up, normal(rng, dtype, hidden, inner, size=0.1))


def naive_mlp(m: MLP) -> Any:
    """The model's norm and MLP for the same operands."""
    half = TorchMLP(replace(CONFIG, hidden_size=m.x.shape[1], intermediate_size=len(m.gate)), ONE_RANK)
    with torch.no_grad():
        for layer, weight in ((half.gate_proj, m.gate), (half.up_proj, m.up), (half.down_proj, m.down)):
            layer.weight.data = as_torch(weight)
        return half(_norm(as_torch(m.x), m.gamma)).float().numpy()


class AttentionDims(NamedTuple):
    """B sequences of N rows, E hidden, H query and G kv heads, S positions."""

    B: int
    N: int
    E: int
    H: int
    G: int
    S: int


@dataclass(frozen=True)
class Attention:
    """x (B, N, E), norms of rows, keys, queries, weights q, k, v, out as (out, in), cache (B, G, S, D), positions."""

    x: Any
    norms: tuple[Any, ...]
    weights: tuple[Any, ...]
    keys: Any
    values: Any
    positions: Any

    def pages(self, seed: int = 1) -> tuple[tuple[Any, Any], Any]:
        """Pools of keys and values (pages, G, 128, D), a copy, and the block table."""
        return pooled(self.keys, self.values, seed)

    def weight_operands(self) -> tuple[Any, ...]:
        """Norms and packed weights as the kernel takes them."""
        return *self.norms, pack_qkv(*self.weights[:3], DIM), pack_out(self.weights[3], DIM)

    def operands(self, pages: Any = None) -> tuple[Any, ...]:
        """The operands of decode_attention_kernel."""
        pools, table = pages or self.pages()
        angles = law.rope_tables(self.positions, DIM)
        rows = self.x.reshape(-1, self.x.shape[-1])
        return rows, *self.weight_operands(), *angles, *pools, self.positions, table

    def run(self, pages: Any = None, **options: Any) -> Any:
        """The kernel's output (B, N, E) from pages, which it changes."""
        return decode_attention(*self.operands(pages), **options).reshape(self.x.shape)

    def part(self, b: Any, n: slice = slice(None)) -> Attention:
        """Some rows of some sequences as a separate pass."""
        parts = (self.keys[b].copy(), self.values[b].copy(), self.positions[b][:, n].copy())
        return Attention(self.x[b][:, n].copy(), self.norms, self.weights, *parts)


def draw_attention(d: AttentionDims, dtype: str, first: Any = None) -> Attention:
    """Sequences with rows from `first` on, by default at random places, those of the first one at the cache's end."""
    rng = np.random.default_rng(d.E + d.S)

    def weight(out: int, depth: int) -> Any:
        return normal(rng, dtype, out, depth, size=depth**-0.5)

    weights = (weight(d.H * DIM, d.E), weight(d.G * DIM, d.E), weight(d.G * DIM, d.E), weight(d.E, d.H * DIM))
    norms = tuple((1 + normal(rng, "fp32", n, size=0.2)).astype(DTYPES[dtype]) for n in (d.E, DIM, DIM))
    if first is None:
        first = rng.integers(0, d.S - d.N + 1, d.B)
        first[0] = d.S - d.N
    positions = (np.asarray(first)[:, None] + np.arange(d.N)).astype(np.int32)
    keys, values = (normal(rng, dtype, d.B, d.G, d.S, DIM) for _ in range(2))
    return Attention(normal(rng, dtype, d.B, d.N, d.E, size=3), norms, weights, keys, values, positions)


def exact_attention(a: Attention) -> tuple[Any, tuple[Any, Any]]:
    """The law with angles in fp64: out, and the cache (B, G, S, D) after it."""
    angles = a.positions[..., None] * 1e6 ** (-np.arange(DIM // 2) * 2 / DIM)
    cache = a.keys.astype(np.float64), a.values.astype(np.float64)
    norms, weights = tuple(as_fp64(*a.norms)), tuple(as_fp64(*a.weights))
    rotary = np.cos(angles), np.sin(angles)
    return law.decode_attention(a.x.astype(np.float64), norms, weights, rotary, cache, a.positions), cache


def _norm(x: torch.Tensor, weight: Any) -> torch.Tensor:
    """The model's RMSNorm with this weight."""
    norm = RMSNorm(weight.shape[0], 1e-6)
    norm.weight.data = as_torch(weight)
    return norm(x)  # type: ignore[no-any-return]


def naive_attention(a: Attention) -> tuple[Any, tuple[Any, Any]]:
    """The model's norms, rotation and attention for the same operands: out, and the cache (B, G, S, D)."""
    (keys, values), table = a.pages()
    positions = torch.from_numpy(a.positions)
    meta = AttentionMetadata(positions, torch.from_numpy(table))
    with torch.no_grad():
        normed, angles = _norm(as_torch(a.x), a.norms[0]), rotation(positions, CONFIG)
        q, k, v = (F.linear(normed, as_torch(w)).unflatten(-1, (-1, DIM)).transpose(1, 2) for w in a.weights[:3])
        k, q = apply_rope(_norm(k, a.norms[1]), angles), apply_rope(_norm(q, a.norms[2]), angles)
        attended, after = ONE_RANK.attention(q, k, v, Cache(as_torch(keys), as_torch(values)), meta)
        out = F.linear(attended.transpose(1, 2).flatten(2), as_torch(a.weights[3]))
    cache = tuple(unpooled(c.float().numpy(), table, a.values.shape[2]) for c in after)
    return out.float().numpy(), (cache[0], cache[1])
