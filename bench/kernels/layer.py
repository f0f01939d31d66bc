"""Cases of the fused decode kernels and of prefill's products, for a rank of the drafts and of the target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from bench.kernels.case import Case, normal, pool_of
from model.config import PRESETS, Qwen3Config
from model.parallel import HeadMap
from nki_kernels import roofline
from nki_kernels.layer.attention import decode_attention_kernel
from nki_kernels.layer.decode_layers import decode_layers_kernel
from nki_kernels.layer.law import rope_tables
from nki_kernels.layer.mlp import decode_mlp_kernel
from nki_kernels.layer.pack_weights import BANK, FP8_COLUMNS, block_width, pack_head, pack_qkv
from nki_kernels.layer.prompt_matmul import prompt_mlp_kernel, prompt_product_kernel
from nki_kernels.layer.prompt_qkv import prompt_qkv_kernel
from nki_kernels.roofline import AttentionDims

BF16 = 2
EPS = 1e-6
# the layers of chutesai/Qwen3-32B-FP8-DFLASH, a draft of the 32B
DFLASH = "dflash-32B"
CONFIGS = PRESETS | {
    f"Qwen/Qwen3-{DFLASH}": replace(
        PRESETS["Qwen/Qwen3-32B"], num_hidden_layers=5, num_attention_heads=32, intermediate_size=9728
    )
}
# positions of a cache: the context of the sample deployment, and longer ones
SLOTS = 1024
LENGTHS = (SLOTS, 4096, 8192, 32768)


@dataclass(frozen=True)
class Shard:
    """A model's layer on one of `tp` ranks, and the rows of a pass: B sequences of N; weights are bf16 or FP8."""

    model: str
    tp: int
    batch: int
    candidates: int
    fp8: bool = False

    @property
    def weight_itemsize(self) -> int:
        """Bytes of a weight."""
        return 1 if self.fp8 else BF16

    @property
    def columns(self) -> int:
        """The most columns of a packed block."""
        return FP8_COLUMNS if self.fp8 else BANK

    @property
    def config(self) -> Qwen3Config:
        """The configuration of the full model."""
        return CONFIGS[f"Qwen/Qwen3-{self.model}"]

    @property
    def heads(self) -> HeadMap:
        """The rank's heads, padded as the model pads them."""
        return HeadMap(self.config.num_attention_heads, self.config.num_key_value_heads, self.tp)

    @property
    def rows(self) -> int:
        """Rows of the pass."""
        return self.batch * self.candidates

    @property
    def name(self) -> str:
        """As in 32B-tp32-B4-N8."""
        return f"{self.model}-tp{self.tp}-B{self.batch}-N{self.candidates}" + "-fp8" * self.fp8


def packed(depth: int, features: int, blocks_of: int = 1, columns: int = BANK) -> Any:
    """A random packed weight of `features` outputs; its product has the scale of its operand."""
    width = block_width(features, columns // blocks_of)
    return normal((features // width, depth, blocks_of * width), BF16, depth**-0.5)


def in_dtype(shard: Shard, *weights: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Packed weights in a shard's dtype, and the scales of FP8 weights."""
    if not shard.fp8:
        return weights, ()
    scales = tuple(np.ones((w.shape[0], 1, w.shape[2]), np.float32) for w in weights)
    return tuple(w.astype(ml_dtypes.float8_e4m3) for w in weights), scales


def mlp_arguments(shard: Shard) -> tuple[Any, ...]:
    """Arguments of decode_mlp_kernel."""
    hidden, inner = shard.config.hidden_size, shard.config.intermediate_size // shard.tp
    weights, scales = in_dtype(shard, packed(hidden, inner, 2, shard.columns), packed(inner, hidden, 1, shard.columns))
    rows_and_gamma = normal((shard.rows, hidden), BF16), normal((hidden,), BF16)
    return *rows_and_gamma, *weights, *((EPS, scales) if scales else ())


def mlp_case(shard: Shard, lnc: int = 1) -> Case:
    """The MLP half of a shard's layer."""
    hidden, inner = shard.config.hidden_size, shard.config.intermediate_size // shard.tp
    cost = partial(roofline.decode_mlp, shard.rows, hidden, inner, shard.weight_itemsize)
    return Case(shard.name, decode_mlp_kernel, partial(mlp_arguments, shard), cost, lnc)


def attention_dims(shard: Shard, slots: int = SLOTS) -> AttentionDims:
    """The rank's heads over a cache of `slots` positions."""
    heads, dim = shard.heads, shard.config.head_dim
    return AttentionDims(shard.batch, heads.heads_per_rank, heads.kv_per_rank, shard.candidates, slots, dim, BF16)


def attention_arguments(shard: Shard, slots: int = SLOTS) -> tuple[Any, ...]:
    """Arguments of decode_attention_kernel: rows at the end of the sequences, pages in random order."""
    d, hidden = attention_dims(shard, slots), shard.config.hidden_size
    q, k = (normal((heads * d.dim, hidden), BF16) for heads in (d.heads, d.kv_heads))
    qkv = pack_qkv(q, k, k, d.dim, shard.columns)
    norms = normal((hidden,), BF16), normal((d.dim,), BF16), normal((d.dim,), BF16)
    pool, table = pool_of(d)
    positions = np.tile(np.arange(slots - d.candidates, slots, dtype=np.int32), (d.batch, 1))
    # random numbers need no order: pack_out would only permute the inputs of the output projection
    out = packed(d.heads * d.dim, hidden, 1, shard.columns)
    weights, scales = in_dtype(shard, (qkv * hidden**-0.5).astype(qkv.dtype), out)
    places = (*rope_tables(positions, d.dim), pool, pool.copy(), positions, table)
    return normal((shard.rows, hidden), BF16), *norms, *weights, *places, *((EPS, scales) if scales else ())


def attention_case(shard: Shard, lnc: int = 1, slots: int = SLOTS) -> Case:
    """The attention half of a shard's layer."""
    dims, hidden = attention_dims(shard, slots), shard.config.hidden_size
    cost = partial(roofline.decode_attention, dims, hidden, shard.weight_itemsize)
    arguments = partial(attention_arguments, shard, slots)
    return Case(f"{shard.name}-S{slots}", decode_attention_kernel, arguments, cost, lnc)


def layers_arguments(shard: Shard, count: int, groups: Any, slots: int) -> tuple[Any, ...]:
    """Arguments of decode_layers_kernel: layers with the same weights, each with its own pools."""
    x, *attention, cos, sin, keys, values, positions, table = attention_arguments(shard, slots)[:12]
    mlp, scales = mlp_arguments(shard), ()
    if shard.fp8:
        scales = (*attention_arguments(shard, slots)[-1], *mlp[-1])
    layers = tuple((*attention, *mlp[1:4], keys.copy(), values.copy(), *scales) for _ in range(count))
    return x, layers, cos, sin, positions, table, groups


def layers_case(shard: Shard, count: int, lnc: int = 2, summed: bool = True, slots: int = SLOTS) -> Case:
    """`count` layers in one launch, with or without the all-reduces of the shard's ranks."""
    inner = shard.config.intermediate_size // shard.tp
    sizes = shard.config.hidden_size, inner, count, shard.weight_itemsize
    cost = partial(roofline.decode_layers, attention_dims(shard, slots), *sizes)
    groups, name = (tuple(range(shard.tp)),) if summed else None, f"{shard.name}-S{slots}-L{count}"
    arguments = partial(layers_arguments, shard, count, groups, slots)
    ranks = shard.tp if summed else 0
    return Case(name if summed else f"{name}-alone", decode_layers_kernel, arguments, cost, lnc, ranks=ranks)


DRAFTS = tuple(Shard(model, tp, batch, 1) for model in ("1.7B", "0.6B") for tp in (4, 8, 32) for batch in (1, 4))
TARGET = Shard("32B", 32, 4, 8)
ON_TWO_CORES = (Shard("1.7B", 4, 1, 1), Shard("1.7B", 32, 4, 1), TARGET)

# rows of a prefill chunk
CHUNKS = (128, 512, 2048)
# largest shards of the presets: 8B at tp 1, 32B at tp 4
LONG_ROWS = (Shard("8B", 1, 4, 8), Shard("32B", 4, 4, 8))


def prompt_cases(shard: Shard, rows: int, lnc: int = 1) -> tuple[Case, ...]:
    """Prefill's kernels of a shard's layer but attention: the MLP half, QKV, the output projection."""
    hidden, inner = shard.config.hidden_size, shard.config.intermediate_size // shard.tp
    d, name = attention_dims(shard), f"{shard.model}-tp{shard.tp}-C{rows}" + "-fp8" * shard.fp8
    width, heads = (d.heads + 2 * d.kv_heads) * d.dim, d.heads * d.dim
    mlp = partial(mlp_arguments, replace(shard, batch=1, candidates=rows))

    def qkv() -> tuple[Any, ...]:
        q, k = (normal((of * d.dim, hidden), BF16) for of in (d.heads, d.kv_heads))
        weights, scales = in_dtype(shard, pack_qkv(q, k, k, d.dim, shard.columns))
        norms = normal((hidden,), BF16), normal((d.dim,), BF16), normal((d.dim,), BF16)
        angles = rope_tables(np.arange(rows, dtype=np.int32)[None], d.dim)
        return normal((rows, hidden), BF16), *norms, *weights, *angles, d.kv_heads, EPS, *scales

    def out() -> tuple[Any, ...]:
        weights, scales = in_dtype(shard, packed(heads, hidden, 1, shard.columns))
        return normal((rows, heads), BF16), *weights, *((0, *scales) if scales else ())

    product, sizes = partial(partial, roofline.prompt_product, rows, heads, hidden), (BF16, shard.weight_itemsize)
    return (
        Case(name, prompt_mlp_kernel, mlp, partial(roofline.prompt_mlp, rows, hidden, inner, *sizes), lnc),
        Case(name, prompt_qkv_kernel, qkv, partial(roofline.prompt_qkv, rows, hidden, width, *sizes), lnc),
        Case(f"{name}-out", prompt_product_kernel, out, product(*sizes), lnc),
    )


def head_case(rows: int, hidden: int, ids: int, lnc: int = 2) -> Case:
    """The head of a pass: logits of a rank's vocabulary shard."""

    def arguments() -> tuple[Any, ...]:
        return normal((rows, hidden), BF16), pack_head(normal((ids, hidden), BF16))

    name, cost = f"R{rows}-E{hidden}-V{ids}-head", partial(roofline.prompt_product, rows, hidden, ids, BF16, BF16)
    return Case(name, prompt_product_kernel, arguments, cost, lnc)


PROMPT_PRODUCTS = (
    *(head_case(*sizes) for sizes in ((32, 5120, 4748), (4, 2048, 4748))),
    *(case for lnc in (1, 2) for rows in CHUNKS for case in prompt_cases(TARGET, rows, lnc)),
    *(case for shard in LONG_ROWS for rows in (128, 2048) for case in prompt_cases(shard, rows)),
    *(case for shard in LONG_ROWS for case in prompt_cases(shard, 2048, lnc=2)),
)

# layers of a launch: up to 16 of the target, all of a draft; `-alone`: without all-reduces
DRAFTS_ON_TWO = (Shard("1.7B", 32, 4, 1), Shard("0.6B", 32, 4, 1))
FEW_LAYERS = (
    *(layers_case(shard, count) for shard in (TARGET, *DRAFTS_ON_TWO) for count in (1, 2)),
    layers_case(DRAFTS_ON_TWO[0], 2, lnc=1),
)
MANY_LAYERS = (
    *(layers_case(TARGET, count) for count in (4, 8, 16)),
    layers_case(TARGET, 4, summed=False),
    *(layers_case(shard, count, lnc) for shard in DRAFTS_ON_TWO for count in (4, 28) for lnc in (1, 2)),
    *(layers_case(shard, 4, summed=False) for shard in DRAFTS_ON_TWO),
    *(layers_case(TARGET, 16, slots=slots) for slots in LENGTHS[1:3]),
    *(layers_case(DRAFTS_ON_TWO[0], 28, slots=slots) for slots in LENGTHS[1:3]),
)

DECODE_LAYER = (
    *(make(shard) for shard in (*DRAFTS, TARGET) for make in (attention_case, mlp_case)),
    *(make(shard, lnc=2) for shard in ON_TWO_CORES for make in (attention_case, mlp_case)),
    *(attention_case(TARGET, lnc, slots) for slots in LENGTHS[1:] for lnc in (1, 2)),
)
# FP8 weights, on one chip and on eight
FP8_SHARDS = tuple(Shard("32B", tp, 4, 8, fp8=True) for tp in (4, 32))
FP8_LAYER = (
    *(make(shard, lnc=2) for shard in FP8_SHARDS for make in (attention_case, mlp_case)),
    *(layers_case(shard, 2) for shard in FP8_SHARDS),
    *(case for rows in (128, 2048) for case in prompt_cases(FP8_SHARDS[0], rows, lnc=2)),
)
LAYERS = DECODE_LAYER + FP8_LAYER + FEW_LAYERS + MANY_LAYERS + PROMPT_PRODUCTS
