"""The arithmetic of a row: the bits that the kernels compute for a position, in NumPy, without `nki`.

Decode, verification and prefill round at the same places and add in the same order. So a position's bits do not depend
on the batch, N, the chunk of a prompt, its place in a launch, the block table, its length, or the number of cores.

    y = x W        K tiles of 128 inputs in ascending order; each tile's exact sum is rounded to fp32, tiles add in fp32
    norm           gamma x, rounded, is multiplied; 1 / rms multiplies the product
    q, k           the norm of a head cancels 1 / rms but for its eps; q includes 1 / sqrt(D)
    attention      groups of 4096 keys (fp32: 2048) share a running max; key tiles of 128 add in fp32 in a group;
                   weights are rounded before they multiply the values, and a one, which makes their sum
    result         rounded once to the dtype of x

Everything else is fp32, an operation at a time. Exponentials are those of the simulator; a device has other ones.
Dimension key: R or N rows, K inputs and C outputs of a product, E hidden, I intermediate, H query and G kv heads of D,
S positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Pair = tuple[Array, Array]
# gamma (E,), and the weights (D,) of the norms of keys and queries
Norms = tuple[Array, Array, Array]
# those of two FP8 weights
Scales = tuple[Array | None, Array | None]

# inputs of a K tile, keys of a key tile
P = 128
# rows from this length on are laid out in four sections
LONG_ROW, SECTIONS = 4096, 4
# bytes of one head dimension of the keys of a group, whose max and sums are joined with those before once
GROUP_BYTES = 8192
# adjacent keys of a partition, which are in different tiles
RUN = 4
# 2 ** (j / 64)
_POWERS = np.array([float(Decimal(2) ** (Decimal(j) / 64)) for j in range(64)])
_LN2 = 0.6931471805599453


def sums(a_RK: Array, b_KC: Array) -> Array:
    """a b: exact sums, each rounded to fp64 and then to fp32; zeros are +0.

    fp64 holds a product of two fp32 numbers exactly. Where an error of fp64 sums may change the result, math.fsum adds.
    """
    a, b = a_RK.astype(np.float64), b_KC.astype(np.float64)
    total, bound = a @ b, (len(b) + 4) * 2.0**-53 * (np.abs(a) @ np.abs(b))
    result, other = (total + bound).astype(np.float32), (total - bound).astype(np.float32)
    for r, c in np.argwhere(result != other):
        result[r, c] = math.fsum(a[r] * b[:, c])
    return result + np.float32(0)


def in_order(parts: Iterable[Array]) -> Array:
    """The first part plus the second, plus the third, ..., each sum rounded to fp32."""
    return reduce(np.add, parts)


def halved(x: Array) -> Array:
    """The sum over the first axis: the upper half is added to the lower one until one is left."""
    while len(x) > 1:
        half = (len(x) + 1) // 2
        x = np.concatenate([x[: len(x) - half] + x[half:], x[len(x) - half : half]])
    return x[0]


def exp(x: Array) -> Array:
    """e**x, rounded to fp32."""
    return _exp64(x.astype(np.float64)).astype(np.float32)


def silu(x: Array) -> Array:
    """x / (1 + e**-x), rounded to fp32."""
    wide = x.astype(np.float64)
    return (wide * (1 / (1 + _exp64(-wide)))).astype(np.float32)


def _exp64(x: Array) -> Array:
    """The simulator's e**x = 2**(k / 64) e**rest: within 2**-40, and the same on every processor, unlike NumPy's."""
    x = np.clip(x, -700.0, 700.0)
    k = np.rint(x * (64 / _LN2))
    rest = x - k * (_LN2 / 64)
    series = (((rest * (1 / 24) + 1 / 6) * rest + 1 / 2) * rest + 1) * rest + 1
    return series * np.ldexp(_POWERS[k.astype(int) % 64], k.astype(int) // 64)


def row_sections(hidden: int) -> int:
    """Sections of the rows of the residual."""
    return SECTIONS if hidden >= LONG_ROW and hidden % (SECTIONS * P) == 0 else 1


def k_tiles(depth: int, sections: int = 1) -> list[Array]:
    """The inputs of each K tile: every T-th of a section of 128 T; the last depth % 128 ones are a tile."""
    full = depth // P * P
    tiles = np.arange(full).reshape(sections, P, -1).swapaxes(1, 2).reshape(-1, P)
    return [*tiles, *[np.arange(full, depth)] * (depth > full)]


def product(x_RK: Array, packed: Array, sections: int = 1, scale: Array | None = None) -> Array:
    """x W of a packed weight (blocks, K, C), fp32 (R, blocks * C), times an FP8 weight's scales (blocks, 1, C)."""
    weight_KC = packed.swapaxes(0, 1).reshape(packed.shape[1], -1)
    total = in_order(sums(x_RK[:, tile], weight_KC[tile]) for tile in k_tiles(len(weight_KC), sections))
    return total if scale is None else total * scale.reshape(-1)


class NormedRows(NamedTuple):
    """gamma x, rounded; 1 / rms, fp32 (R, 1); and eps * (mean x^2 + eps), eps of a head without the factor 1 / rms."""

    scaled_RE: Array
    inv_rms_R1: Array
    head_eps_R1: Array


def norm(x_RE: Array, gamma_E: Array, eps: float) -> NormedRows:
    """RMSNorm before a product."""
    wide, hidden = x_RE.astype(np.float32), x_RE.shape[1]
    by_tile = [np.square(wide[:, tile]) for tile in k_tiles(hidden, row_sections(hidden))]
    total_R1 = sums(halved(np.stack(by_tile)), np.ones((P, 1)))
    inv_rms_R1 = 1 / np.sqrt(total_R1 * np.float32(1 / hidden) + np.float32(eps))
    scaled_RE = (wide * gamma_E.astype(np.float32)).astype(x_RE.dtype)
    return NormedRows(scaled_RE, inv_rms_R1, total_R1 * np.float32(eps / hidden) + np.float32(eps**2))


def head_norm(x_RHD: Array, weight_D: Array, angles: Pair, eps_R1: Array, scale: float = 1.0) -> Array:
    """Norm and rotary embedding of heads, fp32; angles are cosines and sines (R, D / 2), the weight has `scale`."""
    dim = x_RHD.shape[2]
    cos_R1D, sin_R1D = (np.concatenate([a, a], -1)[:, None] for a in angles)
    weight = weight_D.astype(np.float32) * np.float32(scale)
    signed = np.where(np.arange(dim) < dim // 2, sin_R1D * weight, -(sin_R1D * weight))
    rotated = x_RHD * (cos_R1D * weight) + np.roll(x_RHD * signed, dim // 2, -1)
    mean = sums(np.square(x_RHD).reshape(-1, dim), np.full((dim, 1), 1 / dim)).reshape(*x_RHD.shape[:2], 1)
    return rotated * (1 / np.sqrt(mean + eps_R1[:, None]))


def key_tiles(count: int) -> list[Array]:
    """The keys of each key tile: of 512 keys, partition p of tile j has key 4 p + j."""
    return list(np.arange(count).reshape(-1, P, RUN).swapaxes(1, 2).reshape(-1, P))


def attention(q_RD: Array, keys_SD: Array, values_SD: Array, limit_R: Array) -> Array:
    """Softmax attention of rows that include 1 / sqrt(D), each over the positions up to its limit; in q's dtype."""
    dim, dtype, padding = q_RD.shape[1], q_RD.dtype, -len(keys_SD) % (RUN * P)
    keys, values = (np.pad(a, ((0, padding), (0, 0))) for a in (keys_SD, values_SD))
    values = np.concatenate([values, np.ones((len(values), 1), dtype)], 1)
    scores = in_order(sums(q_RD[:, d : d + P], keys[:, d : d + P].T) for d in range(0, dim, P))
    masked = np.where(np.arange(len(keys)) <= limit_R[:, None], scores, np.float32(-np.inf))
    total, max_R1, count = np.zeros((len(q_RD), dim + 1), np.float32), masked[:, :1], GROUP_BYTES // dtype.itemsize
    for first in range(0, len(keys), count):
        group, before_R1 = slice(first, first + count), max_R1
        max_R1 = np.maximum(before_R1, masked[:, group].max(1, keepdims=True))
        weights = exp(masked[:, group] - max_R1).astype(dtype)
        part = in_order(sums(weights[:, t], values[group][t]) for t in key_tiles(weights.shape[1]))
        total = total * exp(before_R1 - max_R1) + part if first else part
    return (total[:, :-1] * (1 / total[:, -1:])).astype(dtype)


def qkv(
    x_NE: Array, norms: Norms, packed: Array, angles: Pair, kv_heads: int, eps: float, scale: Array | None = None
) -> list[Array]:
    """Queries times 1 / sqrt(D) (H, N, D), keys and values (G, N, D), in x's dtype; angles as in `head_norm`."""
    rows, dim, hidden = norm(x_NE, norms[0], eps), len(norms[1]), x_NE.shape[1]
    heads = product(rows.scaled_RE, packed, row_sections(hidden), scale).reshape(len(x_NE), -1, dim)
    v, k, q = np.split(heads, [kv_heads, 2 * kv_heads], 1)
    q = head_norm(q, norms[2], angles, rows.head_eps_R1, dim**-0.5)
    k, v = head_norm(k, norms[1], angles, rows.head_eps_R1), v * rows.inv_rms_R1[:, None]
    return [part.astype(x_NE.dtype).swapaxes(0, 1) for part in (q, k, v)]


def attention_half(
    x_NE: Array, norms: Norms, packed: Pair, angles: Pair, cache: Pair, positions_N: Array, eps: float, scales: Scales
) -> Array:
    """A rank's partial sum of attention for rows of one sequence; writes keys and values (G, S, D) first, in place."""
    kv_heads = len(cache[0])
    q, *new = qkv(x_NE, norms, packed[0], angles, kv_heads, eps, scales[0])
    for stored, rows in zip(cache, new, strict=True):
        stored[:, positions_N] = rows
    per = len(q) // kv_heads
    attended = [attention(q[h], cache[0][h // per], cache[1][h // per], positions_N) for h in range(len(q))]
    # the packed weight's inputs are in the order D, H
    return product(np.stack(attended, 2).reshape(len(x_NE), -1), packed[1], scale=scales[1]).astype(x_NE.dtype)


def mlp_half(x_RE: Array, gamma_E: Array, packed: Pair, eps: float, scales: Scales) -> Array:
    """A rank's partial sum of the MLP, with packed weights gate_up and down."""
    rows, (blocks, _, columns) = norm(x_RE, gamma_E, eps), packed[0].shape
    both = product(rows.scaled_RE, packed[0], row_sections(x_RE.shape[1]), scales[0])
    gate, up = np.moveaxis(both.reshape(-1, blocks, 2, columns // 2), 2, 0) * rows.inv_rms_R1[:, None]
    gated = (up * silu(gate)).astype(x_RE.dtype).reshape(len(x_RE), -1)
    if scales[0] is not None and columns == 2 * P:
        # pack_down: the inputs of a K tile were adjacent
        gated = gated.reshape(len(x_RE), -1, P).swapaxes(1, 2).reshape(gated.shape)
    return product(gated, packed[1], scale=scales[1]).astype(x_RE.dtype)


def decoder_layer(x_NE: Array, attention_operands: tuple[Any, ...], mlp_operands: tuple[Any, ...]) -> Array:
    """The residual of one sequence after a layer of a model on one rank; operands of the halves after x."""
    for half, operands in ((attention_half, attention_operands), (mlp_half, mlp_operands)):
        x_NE = (x_NE.astype(np.float32) + half(x_NE, *operands).astype(np.float32)).astype(x_NE.dtype)
    return x_NE
