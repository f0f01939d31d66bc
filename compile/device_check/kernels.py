"""Each NKI kernel at one small shape, launched as in a graph, and compared with the reference in torch, in fp32.

Tests compare the reference with the laws in fp64 (`nki_kernels/*/law.py`, `tests/model`).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.cache import KEY_TILE, AttentionMetadata, Cache
from model.config import PRESETS
from model.context import ONE_RANK, Context
from model.errors import UserError
from model.filters import Filters
from model.nki.context import make_context
from model.nki.table import run_on_tensors
from model.ops import EAGER, iota
from model.parallel import VocabShard
from model.qwen3 import Qwen3
from model.sampling import SamplingParams, ShardArgmax
from nki_kernels.limits import SPARE_PAGES

# sums of a few hundred terms, relative to the largest number
_SUMS = 64 * float(np.finfo(np.float32).eps)
_IDLE = 0
_CONFIG = dataclasses.replace(
    PRESETS["Qwen/Qwen3-0.6B"], hidden_size=256, intermediate_size=192, num_attention_heads=2, num_key_value_heads=1,
    num_hidden_layers=3, vocab_size=64,
)  # fmt: skip


@torch.no_grad()
def compare_kernel(name: str, out: Path) -> dict[str, Any]:
    """The largest error of a case on two cores; UserError for a result beyond its bound."""
    nki, worst = make_context("nki", 1, EAGER, run_on_tensors, 3 if "decode_layers" in name else 1), 0.0
    for at, (result, expected) in enumerate(zip(CASES[name](nki), CASES[name](ONE_RANK), strict=True)):
        error = (result.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30)
        # true for NaN, too
        if not error <= (bound := _SUMS if expected.is_floating_point() else 0.0):
            raise UserError(f"result {at} is off by {error:.3g} of its largest number, and {bound:.3g} is its bound")
        worst = max(worst, float(error))
    return {"largest error": worst, "bound": _SUMS}


def _normal(seed: int, *shape: int, size: float = 1.0) -> Tensor:
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _caches(heads: int, dim: int, layers: int) -> list[Cache]:
    """Pools of the null block, four other blocks, and the spare blocks."""
    shape, ends = (4, heads, KEY_TILE, dim), (0, 0, 0, 0, 0, 0, 1, SPARE_PAGES)
    pools = [torch.nn.functional.pad(_normal(i, *shape), ends) for i in range(6)]
    return [Cache(*pools[2 * i : 2 * i + 2]) for i in range(layers)]


def _rows(first: list[int], count: int) -> AttentionMetadata:
    """Rows from these positions on; an idle slot has position 0 and no block."""
    first_B1 = torch.tensor(first).int()[:, None]
    table = torch.where(first_B1 == _IDLE, 0, 1 + torch.arange(4).int().reshape(len(first), -1))
    return AttentionMetadata(first_B1 + iota(count, table), table)


def _attention(ctx: Context, first: list[int], count: int) -> list[Tensor]:
    """Rows of 4 query and 2 kv heads of 64, from these positions on: output and pools without the spare blocks."""
    q, k, v = (_normal(i, len(first), heads, count, 64) for i, heads in enumerate((4, 2, 2), 10))
    out, cache = ctx.attention(q, k, v, _caches(2, 64, 1)[0], _rows(first, count))
    return [out, *(pool[:-SPARE_PAGES] for pool in cache)]


def _model(ctx: Context) -> Qwen3:
    """A small model."""
    model = Qwen3(_CONFIG, ctx)
    for seed, (name, weight) in enumerate(model.named_parameters()):
        if weight.is_floating_point():
            weight.data = torch.ones(weight.shape) if "norm" in name else _normal(seed, *weight.shape, size=0.06)
    return ctx.fuse(model)


def _layers(ctx: Context, first: list[int], count: int) -> list[Tensor]:
    """The layers of a small model on such rows: output and pools without the spare blocks."""
    ids = (torch.arange(len(first) * count) % _CONFIG.vocab_size).int().reshape(len(first), count)
    x_BNE, caches, _ = _model(ctx).hidden(ids, _caches(1, 128, 3), _rows(first, count))
    return [x_BNE, *(pool[:-SPARE_PAGES] for cache in caches for pool in cache)]


def _routes(ctx: Context) -> list[Tensor]:
    """1 for a tensor in which two rows of a prompt have other bits from a step than from prefill."""
    model, ids, rows = _model(ctx), (torch.arange(KEY_TILE) % _CONFIG.vocab_size).int()[None], slice(100, 102)
    prompt, caches, _ = model.hidden(ids, _caches(1, 128, 3), _rows([50], KEY_TILE))
    step, again, _ = model.hidden(ids[:, rows], caches, _rows([150], 2))
    pools = (pair for caches in zip(caches, again, strict=True) for pair in zip(*caches, strict=True))
    # torch promises no order of sums
    return [((a != b).any() & ctx.sharded).int() for a, b in ((prompt[:, rows], step), *pools)]


def _idle_slots(ctx: Context) -> list[Tensor]:
    """Batches with an idle slot, whose rows the kernels write to spare blocks only."""
    return [*_attention(ctx, [_IDLE, 200], 3), *_layers(ctx, [30, _IDLE], 2)]


def _samples(ctx: Context) -> list[Tensor]:
    """Noise and ids of a greedy row, a noisy one, and two with filters, of 777 ids."""
    seeds, positions = torch.tensor([[1, -2], [7, 1 << 30], [3, 4], [5, 6]]).int(), torch.tensor([3, 100000, 5, 6])
    filters = Filters(torch.tensor([0.0, 0, 20, 0]), torch.tensor([1, 1, 0.9, 0.8]), torch.tensor([0, 0, 0, 0.02]))
    params = SamplingParams(torch.tensor([0, 0.7, 1.3, 0.9]), seeds, filters)
    zero_11 = torch.zeros(1, 1).int()
    shard = VocabShard(zero_11, 777, zero_11)
    noise_RV = ctx.gumbel_noise(seeds, positions.int(), shard)
    return [noise_RV, ctx.sample(_normal(10, 4, 777, size=3), params, noise_RV, shard).token_ids()]


def _accept(ctx: Context) -> list[Tensor]:
    """0, 2 and 3 of 3 drafts equal the samples, and a limit of 1."""
    sampled = ShardArgmax(torch.zeros(1, 4, 4), torch.tensor([[[5, 6, 7, 8]] * 4]).int())
    drafts = torch.tensor([[9, 6, 7], [5, 6, 1], [5, 6, 7], [5, 6, 7]]).int()
    return list(ctx.accept(drafts, sampled, torch.tensor([3, 3, 3, 1]).int()))


# the kernels that a case launches, after a label if there are several cases; shortest programs first
CASES: dict[str, Callable[[Context], list[Tensor]]] = {
    "accept_drafts": _accept,
    "gumbel_noise, coupled_sample, weights_above": _samples,
    "verify_attention": partial(_attention, first=[40, 200], count=3),
    "append_rows, prompt_attention": partial(_attention, first=[50], count=256),
    "decode_attention, decode_mlp": partial(_layers, first=[30, 177], count=2),
    "decode_layers": partial(_layers, first=[30, 177], count=2),
    "prompt_qkv, prompt_product, prompt_mlp": partial(_layers, first=[50], count=256),
    "idle slots: verify_attention, decode_layers": _idle_slots,
    "bits of a position: prompt_qkv, prompt_attention, decode_layers": _routes,
}
