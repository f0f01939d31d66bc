"""Sketches of published layers: products with an adapter, gated and GELU layers, batches whose operands stay.

On one core, written from the descriptions in their records; no code of their code.
"""

from __future__ import annotations

from nkisim.event import Event
from validation.products import (
    BANK,
    FP32,
    Limbs,
    P,
    copy,
    identity_matrix,
    load,
    transposed,
    transposed_together,
)
from validation.sketch import Array, Sketch, Tile, View, static_sketch


class AdaptedProduct:
    """(4096, 5120) @ (5120, 12288) in fp32, `block` transposed row tiles at a time, `chunk` columns of the right side.

    `adapter` adds a product of rank 128: "after" to each sum, "folded" into the right side, which then goes through
    HBM, or "" for none. `split` is for the large product only.
    """

    depths, n = 40, 12288

    def __init__(self, block: int, chunk: int = BANK, split: bool = True, adapter: str = "after") -> None:
        self.block, self.chunk, self.split, self.adapter = block, chunk, split, adapter
        self.s = s = static_sketch()
        k = self.depths * P
        self.left, self.right, self.out = (s.array(rows, columns, FP32) for rows, columns in
                                           ((4096, k), (k, self.n), (4096, self.n)))  # fmt: skip
        self.identity = identity_matrix(s)
        self.down, self.up = s.array(k, P, FP32), s.array(P, self.n, FP32)
        # with an adapter, the result's layout is stored 128 columns at a time
        self.stored = P if adapter else chunk

    def events(self) -> list[Event]:
        """The right side first where the adapter is folded into it, then blocks of rows."""
        if self.adapter == "folded":
            self._fold()
        s, after = self.s, self.adapter == "after"
        low = [load(s, self.down, (i * P, i * P + P), (0, P)).all() for i in range(self.depths)] if after else []
        for first in range(0, 32, self.block):
            rows = [(first + i) * P for i in range(self.block)]
            transposed_tile = [self._transpose(row, low) for row in rows]
            for start in range(0, self.n, self.chunk):
                self._columns(rows, transposed_tile, start)
        return s.events()

    def _fold(self) -> None:
        s, right = self.s, self.s.array(self.depths * P, self.n, FP32)
        transposed_tile = [s.tile(P, FP32).all() for _ in range(self.depths)]
        for i, tile in enumerate(transposed_tile):
            transposed(s, tile, load(s, self.down, (i * P, i * P + P), (0, P)).all(), self.identity)
        for i, tile in enumerate(transposed_tile):
            for start in range(0, self.n, BANK):
                span, rows = (start, start + BANK), (i * P, i * P + P)
                bank, total = s.tile(BANK, FP32, "psum").all(), s.tile(BANK, FP32).all()
                s.nc_matmul(bank, tile, load(s, self.up, (0, P), span).all(), False)
                s.compute("vector", "tensor_tensor", total, load(s, self.right, rows, span).all(), bank, inputs=2)
                s.dma_copy(right.block(rows, span), total)
        self.right = right

    def _transpose(self, row: int, low: list[View]) -> tuple[Limbs, Tile]:
        """A row tile's transpose, and its product with the adapter's first matrix."""
        s, bank, small = self.s, self.s.tile(P, FP32, "psum"), self.s.tile(P, FP32)
        transposed_tile = Limbs(s, self.depths * P, self.split)
        for i in range(self.depths):
            part = s.tile(P, FP32).all() if self.split else transposed_tile.tiles[0].part(i * P, i * P + P)
            source = load(s, self.left, (row, row + P), (i * P, i * P + P)).all()
            transposed(s, part, source, self.identity)
            if low:
                s.nc_matmul(bank.all(), low[i], part, i > 0)
            if self.split:
                transposed_tile.take(i * P, part)
        if low:
            copy(s, small.all(), bank.all())
        return transposed_tile, small

    def _columns(self, rows: list[int], transposed_tile: list[tuple[Limbs, Tile]], start: int) -> None:
        s, span = self.s, (start, start + self.chunk)
        banks = [s.tile(self.chunk, FP32, "psum").all() for _ in rows]
        for i in range(self.depths):
            moving = Limbs(s, self.chunk, self.split)
            moving.load(0, self.right, (i * P, i * P + P), span)
            for (limbs, _), bank in zip(transposed_tile, banks, strict=True):
                stationary = limbs.parts(i * P, i * P + P)
                for j, weights in enumerate(stationary):
                    for k, data in enumerate(moving.parts(0, self.chunk)[: len(stationary) - j]):
                        s.nc_matmul(bank, weights, data, i + j + k > 0)
        more = load(s, self.up, (0, P), span).all() if self.adapter == "after" else None
        for row, (_, small), bank in zip(rows, transposed_tile, banks, strict=True):
            if more is not None:
                s.nc_matmul(bank, small.all(), more, True)
            result = s.tile(self.chunk, FP32)
            copy(s, result.all(), bank)
            for at in range(0, self.chunk, self.stored):
                columns = start + at, start + at + self.stored
                s.dma_copy(self.out.block((row, row + P), columns), result.part(at, at + self.stored))


def adapted_product(block: int, chunk: int = BANK, split: bool = True, adapter: str = "after") -> list[Event]:
    """One version of the product with an adapter, or without one."""
    return AdaptedProduct(block, chunk, split, adapter).events()


class Gated:
    """SiLU(x gate) * (x up), then down, in fp32: 4096 rows, widths 1024 and 3072, `block` row tiles a weight stream."""

    def __init__(self, block: int, split: bool, split_down: bool) -> None:
        self.block, self.split, self.split_down = block, split, split_down
        self.s = s = static_sketch()
        self.x, self.out = s.array(4096, 1024, FP32), s.array(4096, 1024, FP32)
        self.gate, self.up, self.down = s.array(1024, 3072, FP32), s.array(1024, 3072, FP32), s.array(3072, 1024, FP32)
        self.identity = identity_matrix(s)

    def events(self) -> list[Event]:
        """All blocks of rows."""
        s = self.s
        for first in range(0, 32, self.block):
            rows = [(first + i) * P for i in range(self.block)]
            transposed_tile = [self._transpose(load(s, self.x, (row, row + P), (0, 1024)), self.split) for row in rows]
            hidden = [s.tile(3072, FP32) for _ in rows]
            for start in range(0, 3072, BANK):
                span = start, start + BANK
                gates, ups = self._weighed(transposed_tile, (self.gate, self.up), span, self.split)
                for tile, gate_bank, up_bank in zip(hidden, gates, ups, strict=True):
                    up, gate, silu = (s.tile(BANK, FP32).all() for _ in range(3))
                    copy(s, up, up_bank)
                    copy(s, gate, gate_bank)
                    s.activation("silu", silu, gate)
                    s.compute("vector", "tensor_tensor", tile.part(*span), silu, up, inputs=2)
            weights = [self._transpose(tile, self.split_down) for tile in hidden]
            for start in range(0, 1024, BANK):
                (banks,) = self._weighed(weights, (self.down,), (start, start + BANK), self.split_down)
                for row, bank in zip(rows, banks, strict=True):
                    result = s.tile(BANK, FP32).all()
                    copy(s, result, bank)
                    s.dma_copy(self.out.block((row, row + P), (start, start + BANK)), result)
        return s.events()

    def _transpose(self, data: Tile, split: bool) -> Limbs:
        transposed_tile = Limbs(self.s, data.columns, split)
        for start in range(0, data.columns, BANK):
            parts = [data.part(i, i + P) for i in range(start, start + BANK, P)]
            source = transposed_together(self.s, parts, self.identity)
            if split:
                scratch = self.s.tile(BANK, FP32).all()
                copy(self.s, scratch, source)
                source = scratch
            transposed_tile.take(start, source)
        return transposed_tile

    def _weighed(
        self, stationary: list[Limbs], arrays: tuple[Array, ...], span: tuple[int, int], split: bool
    ) -> list[list[View]]:
        """Sums in PSUM by array and row tile; weights are loaded once for all row tiles."""
        s = self.s
        banks = [[s.tile(BANK, FP32, "psum").all() for _ in stationary] for _ in arrays]
        for i in range(stationary[0].tiles[0].columns // P):
            for array, sums in zip(arrays, banks, strict=True):
                moving = Limbs(s, BANK, split)
                moving.load(0, array, (i * P, i * P + P), span)
                for limbs, bank in zip(stationary, sums, strict=True):
                    for j, weights in enumerate(limbs.parts(i * P, i * P + P)):
                        for k, data in enumerate(moving.parts(0, BANK)[: len(limbs.tiles) - j]):
                            s.nc_matmul(bank, weights, data, i + j + k > 0)
        return banks


def gated(block: int, split: bool = False, split_down: bool = False) -> list[Event]:
    """One version of the gated layer."""
    return Gated(block, split, split_down).events()


def gelu_product(shape: tuple[int, int, int], dtype: str, activation: str) -> list[Event]:
    """GELU(left.T @ right + bias) of (K, M, N), operands loaded for each product.

    `activation` is "table", "sigmoid" (by a series around one sigmoid), or "" for the product and bias only.
    """
    k, m, n = shape
    s = Sketch()
    left, right, bias, out = (s.array(*size, dtype) for size in ((k, m), (k, n), (1, n), (m, n)))
    ones = s.tile(P, dtype, partitions=1)
    s.compute("vector", "memset", ones.all(), engine="unknown")
    for row in range(0, m, P):
        for start in range(0, n, BANK):
            span, bank, spread = (start, start + BANK), s.tile(BANK, FP32, "psum"), s.tile(BANK, FP32, "psum")
            for depth in range(0, k, P):
                rows = depth, depth + P
                weights, moving = load(s, left, rows, (row, row + P), dtype), load(s, right, rows, span, dtype)
                s.nc_matmul(bank.all(), weights.all(), moving.all(), depth > 0)
            total, added = s.tile(BANK, dtype).all(), s.tile(BANK, dtype).all()
            copy(s, total, bank.all())
            s.nc_matmul(spread.all(), ones.all(), load(s, bias, (0, 1), span, dtype).all(), False)
            s.compute("vector", "tensor_tensor", added, total, spread.all(), inputs=2)
            s.dma_copy(out.block((row, row + P), span), _gelu(s, added, activation))
    return s.events()


def _gelu(s: Sketch, data: View, activation: str) -> View:
    if not activation:
        return data
    result, squares, cubes, inner, share, scaled = (s.tile(BANK, data.dtype).all() for _ in range(6))
    if activation == "table":
        s.activation("gelu", result, data)
        return result
    s.compute("vector", "tensor_tensor", squares, data, data, inputs=2)
    s.compute("vector", "tensor_tensor", cubes, squares, data, inputs=2)
    s.compute("vector", "tensor_scalar", cubes, cubes)
    s.compute("vector", "tensor_tensor", inner, data, cubes, inputs=2)
    s.compute("vector", "tensor_scalar", inner, inner)
    s.activation("sigmoid", share, inner)
    s.compute("vector", "tensor_scalar", share, share)
    s.compute("vector", "tensor_scalar", share, share)
    s.compute("vector", "tensor_scalar", scaled, data)
    s.compute("vector", "tensor_tensor", result, scaled, share, inputs=2)
    return result


def gelu(shape: tuple[int, int], dtype: str) -> list[Event]:
    """GELU of (M, N), 128 rows and 512 columns at a time."""
    s, (m, n) = Sketch(), shape
    source, out = s.array(m, n, dtype), s.array(m, n, dtype)
    for row in range(0, m, P):
        for start in range(0, n, BANK):
            where, result = ((row, row + P), (start, start + BANK)), s.tile(BANK, dtype).all()
            s.activation("gelu", result, load(s, source, *where, dtype).all())
            s.dma_copy(out.block(*where), result)
    return s.events()


def batched_together(batches: int) -> list[Event]:
    """16 products of (4096, 64) and (64, 4096): all operands of `batches` of them are on chip before products run."""
    s, k, n = static_sketch(), 64, 4096
    left, right, out = s.array(16 * n, k, FP32), s.array(16 * k, n, FP32), s.array(16 * n, n, FP32)
    identity = identity_matrix(s)
    for first in range(0, 16, batches):
        moving = s.tile(batches * n, FP32, partitions=k)
        packed = s.tile(batches * n, FP32, partitions=k)
        for i in range(batches):
            s.dma_copy(moving.part(i * n, i * n + n), right.block(((first + i) * k, (first + i) * k + k), (0, n)))
        for at in range(0, batches * n, BANK):
            rows = [first * n + at + j for j in range(0, BANK, P)]
            parts = [load(s, left, (row, row + P), (0, k)).all() for row in rows]
            copy(s, packed.part(at, at + BANK), transposed_together(s, parts, identity))
        for at in range(0, batches * n, P):
            row, base = first * n + at, at // n * n
            for start in range(0, n, 2 * BANK):
                result = s.tile(2 * BANK, FP32)
                for j in range(0, 2 * BANK, BANK):
                    bank = s.tile(BANK, FP32, "psum").all()
                    weights = packed.part(at, at + P)
                    s.nc_matmul(bank, weights, moving.part(base + start + j, base + start + j + BANK), False)
                    copy(s, result.part(j, j + BANK), bank)
                s.dma_copy(out.block((row, row + P), (start, start + 2 * BANK)), result.all())
    return s.events()


def softmax_in_psum() -> list[Event]:
    """The products above with a softmax: scores of 128 rows fill all eight banks and are read from there."""
    s, k, n, block = static_sketch(), 64, 4096, 16
    left, right, out = s.array(16 * n, k, FP32), s.array(16 * k, n, FP32), s.array(16 * n, n, FP32)
    identity = identity_matrix(s)
    for b in range(16):
        moving = load(s, right, (b * k, b * k + k), (0, n))
        for first in range(b * n, b * n + n, block * P):
            packed = s.tile(block * P, FP32, partitions=k)
            for at in range(0, block * P, BANK):
                rows = [first + at + j for j in range(0, BANK, P)]
                parts = [load(s, left, (row, row + P), (0, k)).all() for row in rows]
                copy(s, packed.part(at, at + BANK), transposed_together(s, parts, identity))
            for at in range(0, block * P, P):
                score, powers, result = s.tile(n, FP32, "psum"), s.tile(n, FP32).all(), s.tile(n, FP32).all()
                for start in range(0, n, BANK):
                    span = start, start + BANK
                    s.nc_matmul(score.part(*span), packed.part(at, at + P), moving.part(*span), False)
                limit, total, inverse = (s.tile(1, FP32).all() for _ in range(3))
                s.compute("vector", "tensor_reduce", limit, score.all(), elements=n)
                s.activation("exp", powers, score.all(), limit)
                s.compute("vector", "tensor_reduce", total, powers, elements=n)
                s.compute("vector", "reciprocal", inverse, total)
                s.compute("vector", "tensor_scalar", result, powers, inverse, scalar_operands=1)
                s.dma_copy(out.block((first + at, first + at + P), (0, n)), result)
    return s.events()
