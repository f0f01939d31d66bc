"""Each NKI kernel at one small shape, by the seam that graphs launch it through, against the reference in torch.

The reference has laws of its own, in fp64 (`nki_kernels/*/law.py`, `tests/model`). Everything is fp32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.attention import KEY_TILE
from model.cache import AttentionMetadata, Cache
from model.config import PRESETS
from model.filters import Filters
from model.kernels import Kernels
from model.nki.fused_layer import FusedLayer, FusedLayers
from model.nki.kernels import NkiKernels
from model.nki.launches import Launch, Launcher, filled
from model.nki.table import KERNELS
from model.ops import EAGER, iota
from model.parallel import ONE_RANK, Shard
from model.qwen3 import Layer, Layers
from model.rope import rotation
from model.sampling import Draws, Sampling
from nki_kernels.layer.pack_weights import pack, pack_gate_up, pack_out, pack_qkv

# sums of a few hundred terms, relative to the largest number
_SUMS = 64 * float(np.finfo(np.float32).eps)
_CONFIG = dataclasses.replace(
    PRESETS["Qwen/Qwen3-0.6B"], hidden_size=256, intermediate_size=192, num_attention_heads=2, num_key_value_heads=1
)


def errors(name: str, launch: Launcher) -> list[tuple[float, float]]:
    """Error and bound of each result of a case whose kernels ``launch`` serves, relative to the largest number."""
    both = (CASES[name](kernels) for kernels in (NkiKernels(launch), Kernels()))
    return [(_error(*pair), _SUMS if pair[1].is_floating_point() else 0.0) for pair in zip(*both, strict=True)]


def _error(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape or not found.isfinite().all():
        return float("inf")
    return float((found.double() - expected).abs().max() / expected.double().abs().max().clamp(min=1e-30))


def on_device(launch: Launch, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Serve a launch by the vendor's nki, on numpy arrays."""
    arrays: list[Any] = [t.detach().clone(memory_format=torch.contiguous_format).numpy() for t in tensors]
    found = KERNELS[launch.kernel][launch.lnc](*filled(launch.arguments, arrays))
    results = (found if isinstance(found, tuple) else (found,))[: len(launch.results)]
    return tuple(torch.from_numpy(np.asarray(a)) for a in (*results, *(arrays[i] for i in launch.changed)))


def _normal(seed: int, *shape: int, size: float = 1.0) -> Tensor:
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _caches(heads: int, dim: int, layers: int = 1) -> list[Cache]:
    """Pools of 5 blocks; block 0 is the null block."""
    caches = [Cache(*(_normal(100 + 2 * i + j, 5, heads, KEY_TILE, dim) for j in (0, 1))) for i in range(layers)]
    for tensor in (t for cache in caches for t in cache):
        tensor[0] = 0
    return caches


def _rows(batch: int, count: int, first: list[int]) -> AttentionMetadata:
    table = 1 + torch.arange(4, dtype=torch.int32).reshape(batch, -1)
    return AttentionMetadata(torch.tensor(first, dtype=torch.int32)[:, None] + iota(count, table), table)


def _attention(kernels: Kernels, batch: int, count: int, first: list[int]) -> list[Tensor]:
    """4 query and 2 kv heads of 64."""
    q, k, v = (_normal(i, batch, heads, count, 64) for i, heads in ((1, 4), (2, 2), (3, 2)))
    out, cache = kernels.verify_attention(EAGER, q, (k, v), _caches(2, 64)[0], _rows(batch, count, first))
    return [out, *(pool[1:] for pool in cache)]


def _layers(kernels: Kernels, batch: int, count: int, first: list[int], most: int = 1) -> list[Tensor]:
    """Rows through three layers of one rank, of which ``most`` are one launch."""
    layers = [Layer(_CONFIG, ONE_RANK, Kernels()) for _ in range(3)]
    for seed, weight in enumerate(p for layer in layers for p in layer.parameters()):
        weight.data = _normal(seed, *weight.shape, size=0.06) if weight.dim() > 1 else torch.ones(weight.shape)
    run: Any = Layers(layers)
    if isinstance(kernels, NkiKernels):
        run = FusedLayers([_fused(layer, kernels) for layer in layers], most)
    x, rows = _normal(7, batch, count, 256), _rows(batch, count, first)
    angles = rotation(rows.positions_BN, 128, 1e6)
    states, caches = run.run(EAGER, x, angles, _caches(1, 128, 3), rows, ())
    return [states[3], *(pool[1:] for cache in caches for pool in cache)]


def _fused(layer: Layer, kernels: NkiKernels) -> FusedLayer:
    fused, half, mlp = FusedLayer(layer.config, ONE_RANK, kernels), layer.self_attn, layer.mlp
    q, k, v, out = (p.weight.data for p in (half.q_proj, half.k_proj, half.v_proj, half.o_proj))
    packed = {
        "self_attn.qkv_packed": pack_qkv(q, k, v, 128), "self_attn.out_packed": pack_out(out, 128),
        "mlp.gate_up_packed": pack_gate_up(mlp.gate_proj.weight.data, mlp.up_proj.weight.data),
        "mlp.down_packed": pack(mlp.down_proj.weight.data),
    }  # fmt: skip
    norms = {name: p for name, p in layer.state_dict().items() if "norm" in name}
    fused.load_state_dict(packed | norms)
    return fused.requires_grad_(False)


def _samples(kernels: Kernels) -> list[Tensor]:
    """Ids of a greedy row, a noisy one, and ones with filters, of 777."""
    temperature, seeds = torch.tensor([0, 0.7, 1.3, 0.9]), torch.tensor([[1, -2], [7, 1 << 30], [3, 4], [5, 6]])
    filters = Filters(torch.tensor([0.0, 0, 20, 0]), torch.tensor([1, 1, 0.9, 0.8]), torch.tensor([0, 0, 0, 0.02]))
    shard = Shard(torch.zeros(1, 1, dtype=torch.int32), 777)
    positions = torch.tensor([[3], [100000], [5], [6]], dtype=torch.int32)
    sampling = Sampling(temperature, seeds.to(torch.int32), filters)
    draw = kernels.prepare(EAGER, sampling, positions, shard)
    noise_RV = kernels._noise(EAGER, draw, shard)
    return [noise_RV, kernels.coupled_sample(EAGER, _normal(10, 4, 777, size=3), draw).merged()]


def _accept(kernels: Kernels) -> list[Tensor]:
    """Drafts of which 0, 2 and all of 3 are equal, and a limit of 1."""
    sampled = torch.tensor([[[5, 6, 7, 8]] * 4], dtype=torch.int32)
    drafts = torch.tensor([[9, 6, 7], [5, 6, 1], [5, 6, 7], [5, 6, 7]], dtype=torch.int32)
    limits = torch.tensor([3, 3, 3, 1], dtype=torch.int32)
    return list(kernels.accept(EAGER, drafts, Draws(torch.zeros(1, 4, 4), sampled), limits))


# by the kernels that a case launches, shortest programs first
CASES: dict[str, Callable[[Kernels], list[Tensor]]] = {
    "accept_drafts": _accept,
    "gumbel_noise, coupled_sample, weights_above": _samples,
    "verify_attention": lambda kernels: _attention(kernels, 2, 3, [40, 200]),
    "append_rows, prompt_attention": lambda kernels: _attention(kernels, 1, 256, [50]),
    "decode_attention, decode_mlp": lambda kernels: _layers(kernels, 2, 2, [30, 177]),
    "decode_layers": lambda kernels: _layers(kernels, 2, 2, [30, 177], 3),
    "prompt_product, prompt_mlp": lambda kernels: _layers(kernels, 1, 256, [50]),
}
