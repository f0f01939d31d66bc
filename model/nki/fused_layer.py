"""Fused modules with packed weights: attention or MLP with its norm in one kernel, groups of layers, the LM head.

Decode kernels support few rows, and several layers per launch, up to a tapped state; prompt kernels any number of rows.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from model.cache import AttentionMetadata, Cache
from model.context import Context, M
from model.layers import Head, Layers, RMSNorm, mask_padding
from model.nki.launches import LAYERS, like, padded_table
from model.ops import Ops
from model.qwen3 import MLP, Attention
from model.rope import Rotation, apply_rope
from model.weights import Packed, pack_projections, scales_of
from nki_kernels.layer.pack_weights import FP8_COLUMNS, pack, pack_down, pack_gate_up, pack_out, pack_qkv
from nki_kernels.limits import CANDIDATES, ROWS

PACKED_ATTENTION: Packed = {
    "qkv_packed": (("q_proj", "k_proj", "v_proj"), pack_qkv),
    "out_packed": (("o_proj",), pack_out),
}
PACKED_MLP: Packed = {
    "gate_up_packed": (("gate_proj", "up_proj"), lambda gate, up, dim: pack_gate_up(gate, up)),
    "down_packed": (("down_proj",), lambda down, dim: pack(down)),
}
# blocks of FP8 weights are narrower
PACKED_ATTENTION_FP8: Packed = {
    name: (parts, partial(pack, columns=FP8_COLUMNS)) for name, (parts, pack) in PACKED_ATTENTION.items()
}
PACKED_MLP_FP8: Packed = {
    "gate_up_packed": (("gate_proj", "up_proj"), lambda gate, up, dim: pack_gate_up(gate, up, FP8_COLUMNS)),
    "down_packed": (("down_proj",), lambda down, dim: pack_down(down)),
}
# the places of keys and values among a layer's operands
_CACHES = (8, 9)
# (kernel, arguments, *results) -> tensors; see `NkiContext.run`
Run = Callable[..., tuple[Tensor, ...]]
# `NkiContext.attend`
Attend = Callable[[Tensor, Tensor, Tensor, Cache, AttentionMetadata], tuple[Tensor, Cache]]


def fuse(model: M, ctx: Context, backend: tuple[Run, Attend], max_layers: int) -> M:
    """Replaces the modules that the kernels support by fused ones; a launch has at most `max_layers` layers."""
    run, _ = backend
    layers: Any = model.layers
    config: Any = model.config
    packing = ctx.packing(config)
    for layer in layers:
        if packing.attention and type(layer.self_attn) is Attention:
            layer.input_layernorm = DeferredNorm(layer.input_layernorm)
            layer.self_attn = PackedAttention(layer.self_attn, layer.input_layernorm, packing.attention, backend)
        if packing.mlp:
            layer.post_attention_layernorm = DeferredNorm(layer.post_attention_layernorm)
            layer.mlp = PackedMLP(layer.mlp, layer.post_attention_layernorm, packing.mlp, (ctx.ops, run))
    if packing.head and isinstance(head := model.lm_head, Head):
        model.lm_head = PackedHead(head, packing.head, run)
    if max_layers > 1 and packing.attention and packing.mlp and isinstance(layers, Layers):
        model.layers = FusedLayers(layers, run, max_layers)
    return model


class DeferredNorm(RMSNorm):
    """The identity in place of a norm that the next module's kernel applies."""

    def __init__(self, norm: RMSNorm) -> None:
        nn.Module.__init__(self)
        self.eps, self.weight = norm.eps, norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return x


class PackedAttention(Attention):
    """Attention with packed projections: one fused kernel, including the norm, if it supports the rows (`fits`).

    Others take three launches: queries, keys and values of un-normed rows, attention, the output projection.
    """

    qkv_packed: nn.Parameter
    out_packed: nn.Parameter

    def __init__(self, attention: Attention, norm: DeferredNorm, table: Packed, backend: tuple[Run, Attend]) -> None:
        nn.Module.__init__(self)
        self.ctx, self.head_dim, (self.run, self.attend) = attention.ctx, attention.head_dim, backend
        # in a tuple, so that torch does not register the norm as a child
        self.norm = (norm,)
        self.kv_features = len(attention.k_proj.weight)
        pack_projections(self, attention, table, self.head_dim)

    def qkv(self, x_BNE: Tensor, rope: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, times 1 / sqrt(D), keys and values of rows before the norm."""
        (norm,), (batch, count, _), packed, x_RE = self.norm, x_BNE.shape, self.qkv_packed, x_BNE.flatten(0, 1)
        kv_heads = self.kv_features // self.head_dim
        heads = packed.shape[0] * packed.shape[2] // self.head_dim - 2 * kv_heads
        norms = (norm.weight, self.k_norm.weight, self.q_norm.weight)
        arguments = (x_RE, *norms, packed, *rope, kv_heads, norm.eps, *scales_of(self, "qkv_packed"))
        q, kv = (like(x_RE)._replace(shape=(batch, n, count, self.head_dim)) for n in (heads, kv_heads))
        q_BHND, k_BGND, v_BGND = self.run("prompt_qkv", arguments, q, kv, kv)
        return q_BHND, k_BGND, v_BGND

    def key_value(self, x_BNE: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        kv = self.kv_features
        vk = self.product(x_BNE, "qkv_packed", -(-2 * kv // self.qkv_packed.shape[2]))
        v, k = (self.split_heads(x) for x in (vk[..., :kv], vk[..., kv : 2 * kv]))
        return apply_rope(self.k_norm(k), rope), v

    def forward(self, x_BNE: Tensor, rope: Rotation, cache: Cache, meta: AttentionMetadata) -> tuple[Tensor, Cache]:
        (norm,) = self.norm
        if self.fits(x_BNE, meta):
            x_RE, norms = x_BNE.flatten(0, 1), (norm.weight, self.k_norm.weight, self.q_norm.weight)
            places = (meta.positions_BN, padded_table(meta, cache))
            scales = scales_of(self, *PACKED_ATTENTION)
            arguments = (x_RE, *norms, self.qkv_packed, self.out_packed, *rope, *cache, *places, norm.eps)
            scaled = (*arguments, scales) if scales else arguments
            part, keys, values = self.run("decode_attention", scaled, like(x_RE), changed=(8, 9))
            return self.ctx.ops.all_reduce(part.reshape(x_BNE.shape)), Cache(keys, values)
        out_BHND, cache = self.attend(*self.qkv(x_BNE, rope), cache, meta)
        # the packed weight's input features are in the order D, H
        out_BNF = out_BHND.permute(0, 2, 3, 1).flatten(2)
        return self.ctx.ops.all_reduce(self.product(out_BNF, "out_packed")), cache

    def product(self, x_BNK: Tensor, name: str, blocks: int = 0) -> Tensor:
        return product(self.run, x_BNK, getattr(self, name), blocks, *scales_of(self, name))

    def fits(self, x_BNE: Tensor, meta: AttentionMetadata) -> bool:
        """Whether the decode kernels support these rows: few and causal."""
        count, heads_per_kv = x_BNE.shape[1], self.out_packed.shape[1] // self.kv_features
        few = few_rows(x_BNE) and count <= CANDIDATES and heads_per_kv * count <= ROWS
        return few and meta.attend_to_B1 is None


def product(run: Run, x_BNK: Tensor, packed: Tensor, blocks: int = 0, *scale: Tensor) -> Tensor:
    """(B, N, F) rows times a packed weight, or times its first `blocks` blocks of columns; an FP8 one has a scale."""
    x_RK, first = x_BNK.flatten(0, 1), (blocks, *scale) if blocks or scale else ()
    result = like(x_RK)._replace(shape=(x_RK.shape[0], (blocks or packed.shape[0]) * packed.shape[2]))
    return run("prompt_product", (x_RK, packed, *first), result)[0].unflatten(0, x_BNK.shape[:2])


class PackedHead(nn.Module):
    """LM head with a packed weight, padded with columns of zeros: fp32 logits of this rank's ids, in one launch."""

    def __init__(self, head: Head, pack_head: Callable[..., Tensor], run: Run) -> None:
        super().__init__()
        self.run, self.ids, self.packed = run, len(head.weight), nn.Parameter(pack_head(head.weight.data))
        self.vocab, self.tp = head.vocab, head.ctx.tp

    def forward(self, x_BNE: Tensor, rank_11: Tensor) -> Tensor:
        logits = product(self.run, x_BNE, self.packed)[..., : self.ids].float()
        return mask_padding(logits, rank_11, self.vocab, self.tp)


class PackedMLP(nn.Module):
    """MLP with packed projections: one fused kernel, including the norm."""

    def __init__(self, mlp: MLP, norm: DeferredNorm, table: Packed, backend: tuple[Ops, Run]) -> None:
        super().__init__()
        (self.ops, self.run), self.norm = backend, (norm,)
        pack_projections(self, mlp, table)

    def forward(self, x: Tensor) -> Tensor:
        (norm,), x_RE, kernel = self.norm, x.flatten(0, 1), "decode_mlp" if few_rows(x) else "prompt_mlp"
        arguments, scales = (
            (x_RE, norm.weight, self.gate_up_packed, self.down_packed, norm.eps),
            scales_of(self, *PACKED_MLP),
        )
        (part,) = self.run(kernel, (*arguments, scales) if scales else arguments, like(x_RE))
        return self.ops.all_reduce(part.reshape(x.shape))


class LayerGroup(nn.Module):
    """Consecutive layers in one launch, all-reduces included."""

    def __init__(self, layers: Iterable[nn.Module], run: Run, ops: Ops) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(layers)
        self.run, self.ops = run, ops
        # groups of equal size share a trace
        self.config = (self.layers[0].config, len(self.layers))

    def forward(
        self, x_BNE: Tensor, rope: Rotation, caches: list[Cache], meta: AttentionMetadata
    ) -> tuple[Tensor, list[Cache]]:
        x_RE, places = x_BNE.flatten(0, 1), (meta.positions_BN, padded_table(meta, caches[0]))
        layers = tuple(self._operands(layer, cache) for layer, cache in zip(self.layers, caches, strict=True))
        count, eps = len(layers[0]), self.layers[0].input_layernorm.eps
        arguments: tuple[Any, ...] = (x_RE, layers, *rope, *places, self.ops.groups, eps)
        # the index of each cache among the tensors: argument 0 is x
        changed = tuple(1 + count * i + which for i in range(len(layers)) for which in _CACHES)
        x_RE, *pools = self.run(LAYERS, arguments, like(x_RE), changed=changed)
        return x_RE.reshape(x_BNE.shape), [Cache(*pair) for pair in zip(pools[::2], pools[1::2], strict=True)]

    @staticmethod
    def _operands(layer: Any, cache: Cache) -> tuple[Tensor, ...]:
        attn, mlp = layer.self_attn, layer.mlp
        norms = (layer.input_layernorm.weight, attn.k_norm.weight, attn.q_norm.weight)
        packed = (layer.post_attention_layernorm.weight, mlp.gate_up_packed, mlp.down_packed)
        scales = scales_of(attn, *PACKED_ATTENTION) + scales_of(mlp, *PACKED_MLP)
        return (*norms, attn.qkv_packed, attn.out_packed, *packed, *cache, *scales)


class FusedLayers(Layers):
    """Decoder layers, up to `max_layers` per launch if the kernels support the rows of the pass."""

    def __init__(self, layers: Iterable[nn.Module], run_kernel: Run, max_layers: int) -> None:
        super().__init__(layers)
        self.run_kernel, self.max_layers = run_kernel, max_layers

    def run(
        self, ops: Ops, x: Tensor, rope: Rotation, caches: list[Cache], meta: AttentionMetadata, taps: tuple[int, ...]
    ) -> tuple[dict[int, Tensor], list[Cache]]:
        first: Any = self[0]
        if not first.self_attn.fits(x, meta):
            return super().run(ops, x, rope, caches, meta, taps)
        states, written = {0: x}, list[Cache]()
        for count in group_sizes(len(self), self.max_layers, taps):
            part = slice(len(written), len(written) + count)
            if count == 1:
                # decode_layers with one layer is slower than decode_attention and decode_mlp
                x, cache = ops.call(self[part.start], x, rope, caches[part.start], meta)
                written.append(cache)
            else:
                x, of_group = ops.call(LayerGroup(list(self)[part], self.run_kernel, ops), x, rope, caches[part], meta)
                written += of_group
            states[len(written)] = x
        return states, written


def group_sizes(layers: int, max_layers: int, taps: tuple[int, ...] = ()) -> list[int]:
    """The number of layers of each launch of a pass; a launch ends at a tapped state."""
    counts, first = list[int](), 0
    for end in sorted({*taps, layers} - {0}):
        counts += [min(max_layers, end - at) for at in range(first, end, max_layers)]
        first = end
    return counts


def few_rows(x_BNE: Tensor) -> bool:
    """Whether the decode kernels support this number of rows."""
    return x_BNE.shape[0] * x_BNE.shape[1] <= ROWS
