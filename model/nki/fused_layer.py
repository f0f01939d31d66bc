"""A layer whose halves are one kernel each, norm and projections included, with weights packed as they are streamed.

The kernels read packed weights as they are; those of a prompt take any number of rows. Several layers may be one launch
for few rows: it ends where a drafter taps the target.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from model.cache import AttentionMetadata, Cache
from model.config import LayerConfig, Qwen3Config
from model.nki.kernels import NkiKernels, like, whole_chunks
from model.nki.launches import LAYERS
from model.ops import Ops
from model.packing import fused_packing
from model.parallel import Parallel
from model.qwen3 import MLP, Attention, Layer, Layers, RMSNorm
from model.rope import Rotation
from nki_kernels.layer.pack_weights import (
    pack,
    pack_gate_up,
    pack_out,
    pack_qkv,
)
from nki_kernels.limits import CANDIDATES, ROWS


class PackedAttention(Attention):
    """Attention whose projections are packed; a prompt's rows go through them by a kernel."""

    def __init__(self, config: Qwen3Config, parallel: Parallel, kernels: NkiKernels) -> None:
        super().__init__(config, parallel, kernels)
        self.run = kernels.run
        q, k, v, out = (p.weight.data for p in (self.q_proj, self.k_proj, self.v_proj, self.o_proj))
        self.kv_features = len(k)
        self.qkv_packed = nn.Parameter(pack_qkv(q, k, v, self.head_dim))
        self.out_packed = nn.Parameter(pack_out(out, self.head_dim))
        del self.q_proj, self.k_proj, self.v_proj, self.o_proj

    def qkv(self, x_BNE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        both = self.product(x_BNE, self.qkv_packed)
        v, k, q = both.split([self.kv_features, self.kv_features, both.shape[-1] - 2 * self.kv_features], -1)
        return q, k, v

    def kv(self, x_BNE: Tensor) -> tuple[Tensor, Tensor]:
        blocks = -(-2 * self.kv_features // self.qkv_packed.shape[2])
        v, k = self.product(x_BNE, self.qkv_packed, blocks)[..., : 2 * self.kv_features].chunk(2, -1)
        return k, v

    def out(self, o_BNF: Tensor) -> Tensor:
        # the packed weight has its inputs in the order D, H
        by_dim = o_BNF.unflatten(-1, (-1, self.head_dim)).transpose(-1, -2).flatten(-2)
        return self.ops.all_reduce(self.product(by_dim, self.out_packed))

    def product(self, x_BNK: Tensor, packed: Tensor, blocks: int = 0) -> Tensor:
        """Rows times the first blocks of a packed weight, or times all of it."""
        x_RK, first = x_BNK.flatten(0, 1), (blocks,) if blocks else ()
        result = like(x_RK)._replace(shape=(x_RK.shape[0], (blocks or packed.shape[0]) * packed.shape[2]))
        return self.run("prompt_product", (x_RK, packed, *first), result)[0].unflatten(0, x_BNK.shape[:2])


class PackedMLP(MLP):
    """MLP whose projections are packed, one launch with the norm before it."""

    def __init__(self, config: LayerConfig, parallel: Parallel, kernels: NkiKernels) -> None:
        super().__init__(config, parallel)
        gate, up, down = (p.weight.data for p in (self.gate_proj, self.up_proj, self.down_proj))
        self.ops, self.run = parallel.ops, kernels.run
        self.gate_up_packed = nn.Parameter(pack_gate_up(gate, up))
        self.down_packed = nn.Parameter(pack(down))
        del self.gate_proj, self.up_proj, self.down_proj

    def of_normed(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """The MLP of norm(x)."""
        x_RE, kernel = x.flatten(0, 1), "decode_mlp" if _few_rows(x) else "prompt_mlp"
        (part,) = self.run(kernel, (x_RE, norm.weight, self.gate_up_packed, self.down_packed, norm.eps), like(x_RE))
        return self.ops.all_reduce(part.reshape(x.shape))


def fused_mlp(config: LayerConfig, parallel: Parallel, kernels: NkiKernels) -> MLP:
    """The MLP of a layer, packed where the kernel takes the model's sizes."""
    return PackedMLP(config, parallel, kernels) if fused_packing(config, parallel.tp).mlp else MLP(config, parallel)


def branch(norm: RMSNorm, mlp: MLP, x: Tensor) -> Tensor:
    """mlp(norm(x)), one launch where the MLP is packed and the kernel takes the pass's rows."""
    if isinstance(mlp, PackedMLP):
        return mlp.of_normed(norm, x)
    normed: Tensor = mlp(norm(x))
    return normed


class FusedLayer(Layer):
    """One decoder layer, each half in one launch where the kernels take the model's sizes and the pass's rows."""

    def __init__(self, config: Qwen3Config, parallel: Parallel, kernels: NkiKernels) -> None:
        super().__init__(config, parallel, kernels)
        self.ops, self.run = parallel.ops, kernels.run
        if fused_packing(config, parallel.tp).attention:
            self.self_attn = PackedAttention(config, parallel, kernels)
        self.mlp = fused_mlp(config, parallel, kernels)

    def forward(self, x: Tensor, angles: Rotation, cache: Cache, meta: AttentionMetadata) -> tuple[Tensor, Cache]:
        attended, cache = self._attended(x, angles, cache, meta)
        x = x + attended
        return x + branch(self.post_attention_layernorm, self.mlp, x), cache

    def tensors(self, cache: Cache) -> tuple[Tensor, ...]:
        """The tensors of a layer, both of whose halves are packed, as the kernel of several takes them."""
        half: Any = self.self_attn
        mlp: Any = self.mlp
        norms = (self.input_layernorm.weight, half.k_norm.weight, half.q_norm.weight)
        packed = (self.post_attention_layernorm.weight, mlp.gate_up_packed, mlp.down_packed)
        return (*norms, half.qkv_packed, half.out_packed, *packed, *cache)

    def _attended(self, x_BNE: Tensor, angles: Rotation, cache: Cache, meta: AttentionMetadata) -> tuple[Tensor, Cache]:
        norm, half = self.input_layernorm, self.self_attn
        if not isinstance(half, PackedAttention) or not _few_rows(x_BNE) or not _fit(half, x_BNE, meta):
            attended, cache = half(norm(x_BNE), angles, cache, meta)
            return attended, cache
        x_RE = x_BNE.flatten(0, 1)
        norms = (norm.weight, half.k_norm.weight, half.q_norm.weight)
        weights, places = (half.qkv_packed, half.out_packed), (meta.positions_BN, whole_chunks(meta))
        arguments = (x_RE, *norms, *weights, *angles, *cache, *places, norm.eps)
        part, keys, values = self.run("decode_attention", arguments, like(x_RE), changed=(8, 9))
        return self.ops.all_reduce(part.reshape(x_BNE.shape)), Cache(keys, values)


class Joined(nn.Module):
    """Consecutive layers as one launch."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(layers)
        # a trace serves launches of as many layers
        self.config = (self.layers[0].config, len(self.layers))

    def forward(
        self, x_BNE: Tensor, angles: Rotation, caches: list[Cache], meta: AttentionMetadata
    ) -> tuple[Tensor, list[Cache]]:
        first, x_RE, places = self.layers[0], x_BNE.flatten(0, 1), (meta.positions_BN, whole_chunks(meta))
        layers = tuple(layer.tensors(cache) for layer, cache in zip(self.layers, caches, strict=True))
        own, eps = len(layers[0]), first.input_layernorm.eps
        arguments: tuple[Any, ...] = (x_RE, layers, *angles, *places, first.ops.groups, eps)
        # behind x, and last of each layer's
        changed = tuple(own * (i + 1) + which - 1 for i in range(len(layers)) for which in (0, 1))
        x_RE, *pools = first.run(LAYERS, arguments, like(x_RE), changed=changed)
        return x_RE.reshape(x_BNE.shape), [Cache(*pair) for pair in zip(pools[::2], pools[1::2], strict=True)]


class FusedLayers(Layers):
    """Layers of which up to `most` are one launch, where the kernels take the model's sizes and the pass's rows."""

    def __init__(self, layers: Iterable[nn.Module], most: int = 1) -> None:
        super().__init__(layers)
        self.most = most

    def run(
        self, ops: Ops, x: Tensor, angles: Rotation, caches: list[Cache], meta: AttentionMetadata, taps: tuple[int, ...]
    ) -> tuple[dict[int, Tensor], list[Cache]]:
        half, mlp = self[0].self_attn, self[0].mlp
        packed = self.most > 1 and isinstance(mlp, PackedMLP)
        if not packed or not isinstance(half, PackedAttention) or not _few_rows(x) or not _fit(half, x, meta):
            return super().run(ops, x, angles, caches, meta, taps)
        states, written = {0: x}, list[Cache]()
        for count in launched(len(self), self.most, taps):
            first = len(written)
            if count == 1:
                # a launch of one layer is slower than its halves
                x, cache = ops.call(self[first], x, angles, caches[first], meta)
                written.append(cache)
            else:
                part = slice(first, first + count)
                x, caches_of_part = ops.call(Joined(self[part]), x, angles, caches[part], meta)
                written += caches_of_part
            states[len(written)] = x
        return states, written


def launched(layers: int, most: int, taps: tuple[int, ...] = ()) -> list[int]:
    """How many of a model's layers each launch of a pass has: at most `most`, and it ends before a tapped state."""
    counts, first = list[int](), 0
    for end in sorted({*taps, layers} - {0}):
        counts += [min(most, end - at) for at in range(first, end, most)]
        first = end
    return counts


def _few_rows(x_BNE: Tensor) -> bool:
    """Whether the fused layer kernels take these rows."""
    return x_BNE.shape[0] * x_BNE.shape[1] <= ROWS


def _fit(half: PackedAttention, x_BNE: Tensor, meta: AttentionMetadata) -> bool:
    """Whether the rows of a sequence fit beside each other, in a cache of their own, each behind those before it."""
    count, heads_per_kv = x_BNE.shape[1], half.out_packed.shape[1] // half.kv_features
    return meta.attend_to_B1 is None and count <= CANDIDATES and heads_per_kv * count <= ROWS
