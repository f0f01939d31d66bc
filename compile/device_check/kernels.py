"""Each NKI kernel at one small shape, through the seam that graphs launch it by, beside the reference in torch.

The reference has laws of its own, in fp64 (`nki_kernels/*/law.py`, `tests/model`). Everything is fp32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
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


@torch.no_grad()
def errors(name: str, launch: Launcher) -> list[tuple[float, float]]:
    """Error and bound of each result of a case whose kernels ``launch`` serves, relative to the largest number."""
    compared = list[tuple[float, float]]()
    for found, expected in zip(CASES[name](NkiKernels(launch)), CASES[name](Kernels()), strict=True):
        error = (found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30)
        # NaN is no error that is at most a bound
        compared.append((float(error.nan_to_num(torch.inf)), _SUMS if expected.is_floating_point() else 0.0))
    return compared


def on_device(launch: Launch, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Serve a launch by the vendor's nki, on numpy arrays."""
    arrays: list[Any] = [t.detach().clone(memory_format=torch.contiguous_format).numpy() for t in tensors]
    found = KERNELS[launch.kernel][launch.lnc](*filled(launch.arguments, arrays))
    results = (found if isinstance(found, tuple) else (found,))[: len(launch.results)]
    return tuple(torch.from_numpy(np.asarray(a)) for a in (*results, *(arrays[i] for i in launch.changed)))


def _normal(seed: int, *shape: int, size: float = 1.0) -> Tensor:
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _caches(heads: int, dim: int, layers: int) -> list[Cache]:
    """Pools of the null block and four others."""
    pools = [torch.cat((torch.zeros(1, heads, KEY_TILE, dim), _normal(i, 4, heads, KEY_TILE, dim))) for i in range(6)]
    return [Cache(*pools[2 * i : 2 * i + 2]) for i in range(layers)]


def _rows(first: list[int], count: int) -> AttentionMetadata:
    table = 1 + torch.arange(4).int().reshape(len(first), -1)
    return AttentionMetadata(torch.tensor(first).int()[:, None] + iota(count, table), table)


def _attention(kernels: Kernels, first: list[int], count: int) -> list[Tensor]:
    """Rows of 4 query and 2 kv heads of 64, from these positions on."""
    q, k, v = (_normal(10 + heads, len(first), heads, count, 64) for heads in (4, 2, 2))
    out, cache = kernels.verify_attention(EAGER, q, (k, v), _caches(2, 64, 1)[0], _rows(first, count))
    return [out, *(pool[1:] for pool in cache)]


def _layers(kernels: Kernels, first: list[int], count: int, most: int = 1) -> list[Tensor]:
    """Rows through three layers of one rank, of which ``most`` are one launch."""
    run: Any = Layers(Layer(_CONFIG, ONE_RANK, Kernels()) for _ in range(3))
    for seed, weight in enumerate(run.parameters()):
        weight.data = _normal(seed, *weight.shape, size=0.06) if weight.dim() > 1 else torch.ones(weight.shape)
    if isinstance(kernels, NkiKernels):
        run = FusedLayers([_fused(layer, kernels) for layer in run], most)
    rows = _rows(first, count)
    angles, x = rotation(rows.positions_BN, 128, 1e6), _normal(7, len(first), count, 256)
    states, caches = run.run(EAGER, x, angles, _caches(1, 128, 3), rows, ())
    return [states[3], *(pool[1:] for cache in caches for pool in cache)]


def _fused(layer: Layer, kernels: NkiKernels) -> FusedLayer:
    half, mlp = layer.self_attn, layer.mlp
    projections = (half.q_proj, half.k_proj, half.v_proj, half.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    q, k, v, out, gate, up, down = (p.weight.data for p in projections)
    weights = {name: p for name, p in layer.state_dict().items() if "norm" in name}
    weights |= {"self_attn.qkv_packed": pack_qkv(q, k, v, 128), "self_attn.out_packed": pack_out(out, 128)}
    fused = FusedLayer(layer.config, ONE_RANK, kernels)
    fused.load_state_dict(weights | {"mlp.gate_up_packed": pack_gate_up(gate, up), "mlp.down_packed": pack(down)})
    return fused


def _samples(kernels: Kernels) -> list[Tensor]:
    """Noise and ids of a greedy row, a noisy one, and two with filters, of 777 ids."""
    seeds, positions = torch.tensor([[1, -2], [7, 1 << 30], [3, 4], [5, 6]]).int(), torch.tensor([3, 100000, 5, 6])
    filters = Filters(torch.tensor([0.0, 0, 20, 0]), torch.tensor([1, 1, 0.9, 0.8]), torch.tensor([0, 0, 0, 0.02]))
    sampling, shard = Sampling(torch.tensor([0, 0.7, 1.3, 0.9]), seeds, filters), Shard(torch.zeros(1, 1).int(), 777)
    draw = kernels.prepare(EAGER, sampling, positions.int()[:, None], shard)
    return [draw.noise_RV, kernels.coupled_sample(EAGER, _normal(10, 4, 777, size=3), draw).merged()]  # type: ignore[list-item]


def _accept(kernels: Kernels) -> list[Tensor]:
    """Drafts of which 0, 2 and all of 3 are equal, and a limit of 1."""
    sampled = Draws(torch.zeros(1, 4, 4), torch.tensor([[[5, 6, 7, 8]] * 4]).int())
    drafts = torch.tensor([[9, 6, 7], [5, 6, 1], [5, 6, 7], [5, 6, 7]]).int()
    return list(kernels.accept(EAGER, drafts, sampled, torch.tensor([3, 3, 3, 1]).int()))


# by the kernels that a case launches, shortest programs first
CASES: dict[str, Callable[[Kernels], list[Tensor]]] = {
    "accept_drafts": _accept,
    "gumbel_noise, coupled_sample, weights_above": _samples,
    "verify_attention": partial(_attention, first=[40, 200], count=3),
    "append_rows, prompt_attention": partial(_attention, first=[50], count=256),
    "decode_attention, decode_mlp": partial(_layers, first=[30, 177], count=2),
    "decode_layers": partial(_layers, first=[30, 177], count=2, most=3),
    "prompt_product, prompt_mlp": partial(_layers, first=[50], count=256),
}
