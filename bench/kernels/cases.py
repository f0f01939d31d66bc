"""The cases of `bench.kernels`, a tuple for each kernel; `CASES` has all.

A case builds its arguments when it runs: some take hundreds of megabytes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from bench.kernels import layer
from bench.kernels.case import Case, normal, pool_of
from bench.kernels.layer import Shard
from bench.kernels.sampling import SAMPLING
from nki_kernels import roofline
from nki_kernels.attention.append_rows import append_rows_kernel
from nki_kernels.attention.prompt import prompt_attention_kernel
from nki_kernels.attention.verify import verify_attention_kernel
from nki_kernels.roofline import AttentionDims, Cost


def verify_arguments(d: AttentionDims) -> tuple[Any, ...]:
    """Arguments of verify_attention_kernel: causal rows at the end of sequences, pages in random order."""
    q = normal((d.batch, d.heads, d.candidates, d.dim), d.itemsize)
    new, (pool, table) = normal((d.batch, d.kv_heads, d.candidates, d.dim), d.itemsize), pool_of(d)
    positions = np.tile(np.arange(d.slots - d.candidates, d.slots, dtype=np.int32), (d.batch, 1))
    return q, new, new.copy(), pool, pool.copy(), positions, table


def verify_case(dims: tuple[int, ...], lnc: int = 1) -> Case:
    """One case from (B, H, G, N, S, D, bytes per number)."""
    batch, heads, kv_heads, count, slots, dim, itemsize = dims
    d = AttentionDims(batch, heads, kv_heads, count, slots, dim, itemsize)
    name = f"B{batch}-H{heads}-G{kv_heads}-S{slots}-N{count}-D{dim}-" + ("bf16" if itemsize == 2 else "fp32")
    return Case(name, verify_attention_kernel, partial(verify_arguments, d), partial(roofline.verify_attention, d), lnc)


def block_case(shard: Shard, lnc: int = 1) -> Case:
    """Attention of a shard's block draft: each row attends all rows of its sequence."""
    d = layer.attention_dims(shard)

    def arguments() -> tuple[Any, ...]:
        return *verify_arguments(d), np.full((d.batch, 1), d.slots - 1, np.int32)

    return Case(f"{shard.name}-block", verify_attention_kernel, arguments, partial(roofline.verify_attention, d), lnc)


# the Qwen3-32B shard at TP 32 over lengths and k, then other shapes
VERIFY_ATTENTION = (
    *(verify_case((4, 2, 1, 8, slots, 128, 2), lnc) for slots in layer.LENGTHS for lnc in (1, 2)),
    *(verify_case((4, 2, 1, count, slots, 128, 2)) for slots in (1024, 8192) for count in (1, 32)),
    verify_case((32, 2, 1, 8, 1024, 128, 2)),
    verify_case((1, 16, 2, 8, 4096, 128, 2)),
    verify_case((4, 4, 2, 8, 2048, 64, 4)),
)


def prompt_arguments(d: AttentionDims) -> tuple[Any, ...]:
    """Arguments of prompt_attention_kernel: the last rows of a sequence, pages in random order."""
    q = normal((1, d.heads, d.candidates, d.dim), d.itemsize)
    pool, table = pool_of(d)
    return q, pool, pool.copy(), np.array([[d.slots - d.candidates]], np.int32), table


def prompt_attention_case(dims: tuple[int, ...], lnc: int = 1) -> Case:
    """One case from (C, S, H, G, D, bytes per number)."""
    count, slots, heads, kv_heads, dim, itemsize = dims
    d = AttentionDims(1, heads, kv_heads, count, slots, dim, itemsize)
    name = f"C{count}-S{slots}-H{heads}-G{kv_heads}-D{dim}-" + ("bf16" if itemsize == 2 else "fp32")
    cost = partial(roofline.prompt_attention, d)
    return Case(name, prompt_attention_kernel, partial(prompt_arguments, d), cost, lnc, d)


def append_arguments(d: AttentionDims) -> tuple[Any, ...]:
    """Arguments of append_rows_kernel: the last rows of a sequence, pages in random order."""
    new, (pool, table) = normal((1, d.kv_heads, d.candidates, d.dim), d.itemsize), pool_of(d)
    positions = np.arange(d.slots - d.candidates, d.slots, dtype=np.int32)[None]
    return new, new.copy(), pool, pool.copy(), positions, table


def append_case(count: int, lnc: int = 1) -> Case:
    """The rows of a prefill chunk of the Qwen3-32B shard at TP 32."""
    d = AttentionDims(1, 2, 1, count, max(count, 1024), 128, 2)
    # keys and values in and out
    cost = Cost(4 * count * d.kv_heads * d.dim * d.itemsize, 0)
    return Case(f"C{count}-bf16", append_rows_kernel, partial(append_arguments, d), lambda: cost, lnc)


# the Qwen3-32B shard at TP 32
PROMPT_ATTENTION = (
    *(prompt_attention_case((2048, slots, 2, 1, 128, 2)) for slots in (2048, 4096, 8192)),
    *(prompt_attention_case((count, 8192, 2, 1, 128, 2)) for count in (128, 512)),
    prompt_attention_case((2048, 8192, 2, 1, 128, 2), lnc=2),
    prompt_attention_case((512, 4096, 2, 1, 128, 4)),
)

# a layer of a DFlash block as in a graph, and for comparison its attention with causal rows
_BLOCK = Shard(layer.DFLASH, 32, 4, 8)
BLOCK_LAYER = (
    *layer.prompt_cases(_BLOCK, _BLOCK.rows, lnc=2)[1:],
    *(make(_BLOCK, lnc=2) for make in (block_case, layer.mlp_case, layer.attention_case)),
)

# the 32B and the 1.7B on one chip and on two
_CHIPS = tuple(Shard(model, tp, 4, rows) for tp in (4, 8) for model, rows in (("32B", 8), ("1.7B", 1)))
ONE_CHIP = (
    *(make(shard, lnc=2) for shard in _CHIPS for make in (layer.attention_case, layer.mlp_case)),
    *(layer.layers_case(shard, 2) for shard in _CHIPS),
    *(layer.head_case(shard.rows, shard.config.hidden_size, shard.config.vocab_size // shard.tp) for shard in _CHIPS),
    *(prompt_attention_case((512, 2048, heads, heads // 8, 128, 2), lnc=2) for heads in (16, 8)),
)

APPENDS = (append_case(128), append_case(2048), append_case(2048, lnc=2))
ATTENTION = VERIFY_ATTENTION + PROMPT_ATTENTION + APPENDS
CASES: tuple[Case, ...] = ATTENTION + SAMPLING + ONE_CHIP + BLOCK_LAYER + layer.LAYERS
