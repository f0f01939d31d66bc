"""Products without an order and reductions in one order: the same bits on every processor, at every shape.

docs/coverage.md, "Sums and functions", has the argument.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nkisim.dtypes import Array

Wide = NDArray[np.float64]
Index = NDArray[np.intp]

# mantissa bits of fp64
_BITS = 53
# unsure elements that are summed exactly at once: a closer look at a tile costs as much
_FEW = 24


class _Scratch(threading.local):
    """fp64 copies of the operands and their product: fresh memory would cost as much as the product."""

    def __init__(self) -> None:
        self.flat = [np.empty(0), np.empty(0), np.empty(0)]

    def array(self, number: int, shape: tuple[int, int]) -> Wide:
        size = shape[0] * shape[1]
        if len(self.flat[number]) < size:
            self.flat[number] = np.empty(size)
        return self.flat[number][:size].reshape(shape)


_SCRATCH = _Scratch()


def products(a: Array, b: Array) -> Array:
    """Return a.T @ b, fp32 of (K, M) and (K, N) to (M, N): exact sums, each rounded to fp64 and then to fp32.

    A BLAS chooses the order of its sums, and its error has a bound whatever the order. Where all numbers within the
    bound round to one fp32 number, that is the result; the others are summed exactly. Zeros are +0.
    """
    wide_a, wide_b = _SCRATCH.array(0, a.shape), _SCRATCH.array(1, b.shape)
    wide_a[...], wide_b[...] = a, b
    sums = np.matmul(wide_a.T, wide_b, out=_SCRATCH.array(2, (a.shape[1], b.shape[1])))
    flat_a, flat_b = wide_a.ravel(), wide_b.ravel()
    # Cauchy-Schwarz: no column is longer than its tile
    bound = _unit_bound(len(a)) * math.sqrt(flat_a.dot(flat_a)) * math.sqrt(flat_b.dot(flat_b))
    if not math.isfinite(bound):
        return _hostile(a, b, sums.copy())
    low, high = _between(sums, bound)
    unsure = low != high
    if unsure_count := np.count_nonzero(unsure):
        if unsure_count > _FEW:
            _settle((a, b), (wide_a, wide_b, sums), high, unsure)
        _sum_exactly(wide_a, wide_b, high, unsure)
    high += 0.0
    return high


def _unit_bound(depth: int) -> float:
    """How far a sum of `depth` exact products, and the ends around it, can be off, for columns of length 1."""
    return (depth + 4) * 2.0**-_BITS * 1.001


def _between(sums: Wide, bound: float | Wide) -> tuple[Array, Array]:
    """Return sums - bound and sums + bound, rounded to fp32."""
    low, high = np.empty(sums.shape, np.float32), np.empty(sums.shape, np.float32)
    np.subtract(sums, bound, out=low, casting="same_kind")
    np.add(sums, bound, out=high, casting="same_kind")
    return low, high


def _settle(tiles: tuple[Array, Array], wide: tuple[Wide, Wide, Wide], result: Array, unsure: Array) -> None:
    """Give results where no order rounds and where the bound of a pair of columns is enough; leave the rest unsure."""
    (a, b), (wide_a, wide_b, sums) = tiles, wide
    depth = len(a)
    # every partial sum is a multiple of one unit and at most 2**53 of them
    exact = _span(a)[:, None] + _span(b) <= _BITS - (depth - 1).bit_length()
    np.copyto(result, sums, where=exact, casting="same_kind")
    unsure &= ~exact
    rows, columns = _pairs(unsure)
    lengths = [np.sqrt(np.einsum("km,km->m", w, w)) for w in (wide_a, wide_b)]
    low, high = _between(sums[rows, columns], _unit_bound(depth) * lengths[0][rows] * lengths[1][columns])
    result[rows, columns] = high
    unsure[rows, columns] = low != high


def _pairs(flags: Array) -> tuple[Index, Index]:
    rows, columns = np.divmod(np.flatnonzero(flags), flags.shape[1])
    return rows, columns


def _sum_exactly(a: Wide, b: Wide, result: Array, unsure: Array) -> None:
    rows, columns = _pairs(unsure)
    for m, n in zip(rows.tolist(), columns.tolist(), strict=True):
        result[m, n] = math.fsum((a[:, m] * b[:, n]).tolist())


def _span(tile: Array) -> NDArray[np.int32]:
    """Return for each column the bits from its largest number's first to the last that any number has."""
    # without the sign: 8 bits of exponent, 23 of fraction, a zero
    words = tile.view(np.uint32) << 1
    # zero, the smallest, becomes the largest
    top, bottom = words.max(axis=0), (words - 1).min(axis=0) + 1
    fractions = np.bitwise_or.reduce(words, axis=0) & 0xFFFFFF | 0x1000000
    _, last = np.frexp((fractions & -fractions).astype(np.float64))
    exponents = [np.maximum(word >> 24, 1).astype(np.int32) for word in (top, bottom)]
    return exponents[0] - exponents[1] + 26 - last


def _hostile(a: Array, b: Array, sums: Wide) -> Array:
    """Products with infinities or NaN: no order affects these, and the finite sums are as ever."""
    rest = products(*(np.where(np.isfinite(tile), tile, np.float32(0)) for tile in (a, b)))
    special = np.where(np.isnan(sums), np.nan, sums).astype(np.float32)
    return np.where(np.isfinite(sums), rest, special)


def halved(op: Callable[..., Array], values: Array) -> Array:
    """Combine the last axis, keeping it with size 1: x[i] op x[i + ceil(n / 2)], until one is left.

    The order depends on the length only; that of numpy's reductions depends on strides and on the processor.
    """
    count = values.shape[-1]
    if count < 2:
        return values.copy()
    half = (count + 1) // 2
    result = values[..., :half].copy()
    rest = values[..., half:]
    while count > 1:
        first = result[..., : count - half]
        op(first, rest, out=first)
        count, half = half, (half + 1) // 2
        rest = result[..., half:count]
    return result[..., :1]


def total(values: Array, axis: int = -1) -> Array:
    """Sum an axis by halves in the dtype of the values, keeping it with size 1; no values make 0."""
    if values.shape[axis] == 0:
        return values.sum(axis=axis, keepdims=True)
    return np.swapaxes(halved(np.add, np.swapaxes(values, axis, -1)), -1, axis)
