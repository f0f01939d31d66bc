"""Sketches of published kernels that stream: activations, an optimizer's step, rotations, a selective scan.

All are fp32 on one core with static descriptors, written from the descriptions in their records; none of their code.
"""

from __future__ import annotations

import itertools

from nkisim.event import Event
from validation.sketch import Array, Sketch, Tile, View, static_sketch

P, FP32 = 128, "float32"


def silu(chunks: tuple[int, ...], in_place: bool = False) -> list[Event]:
    """SiLU over (128, sum of chunks), a chunk of columns at a time."""
    s = static_sketch()
    source, out = s.array(P, sum(chunks), FP32), s.array(P, sum(chunks), FP32)
    start = 0
    for width in chunks:
        tile = s.tile(width, FP32)
        result = tile if in_place else s.tile(width, FP32)
        where = (0, P), (start, start + width)
        s.dma_copy(tile.all(), source.block(*where))
        s.activation("silu", result.all(), tile.all())
        s.dma_copy(out.block(*where), result.all())
        start += width
    return s.events()


def adamw(tiles: tuple[tuple[int, int], ...], columns: int) -> list[Event]:
    """One AdamW step: four loads, two activations, four fused vector instructions and a store for each tile.

    `tiles` are (first row, rows) of an array with `columns` columns.
    """
    s = static_sketch()
    *sources, out = (s.array(tiles[-1][0] + tiles[-1][1], columns, FP32) for _ in range(5))
    for row, rows in tiles:
        where = (row, row + rows), (0, columns)
        theta, gradient, mean, variance = (_loaded(s, x, *where) for x in sources)
        squared, scaled, root, moved, term, result = (s.tile(columns, FP32) for _ in range(6))
        s.activation("square", squared.all(), gradient.all())
        s.compute("vector", "scalar_tensor_tensor", scaled.all(), variance.all(), squared.all(), inputs=2)
        s.activation("rsqrt", root.all(), scaled.all())
        s.compute("vector", "scalar_tensor_tensor", moved.all(), mean.all(), gradient.all(), inputs=2)
        s.compute("vector", "scalar_tensor_tensor", term.all(), moved.all(), root.all(), inputs=2)
        s.compute("vector", "scalar_tensor_tensor", result.all(), theta.all(), term.all(), inputs=2)
        s.dma_copy(out.block(*where), result.part(0, columns, 0, rows))
    return s.events()


def adamw_by_rows() -> list[Event]:
    """Over (10944, 2048), 128 rows at a time and 64 at the end."""
    return adamw(tuple((row, min(P, 10944 - row)) for row in range(0, 10944, P)), 2048)


def adamw_by_columns(width: int) -> list[Event]:
    """The same elements as (128, 175104), `width` columns at a time: tiles stack up in an array of that width."""
    return adamw(tuple((P * i, P) for i in range(175104 // width)), width)


def _loaded(s: Sketch, source: Array, rows: tuple[int, int], columns: tuple[int, int]) -> Tile:
    tile = s.tile(columns[1] - columns[0], FP32)
    s.dma_copy(tile.part(0, tile.columns, 0, rows[1] - rows[0]), source.block(rows, columns))
    return tile


def rope_by_halves(width: int, length: int = 262144) -> list[Event]:
    """Rotate (128, length): two halves of 64 partitions, each with its own two products and a sum."""
    s, half = static_sketch(), 64
    source, cos, sin, out = (s.array(rows, length, FP32) for rows in (P, half, half, P))
    for start in range(0, length, width):
        columns = start, start + width
        blocks = ((source, 0), (source, half), (cos, 0), (sin, 0))
        upper, lower, c, sn = (s.tile(width, FP32, partitions=half) for _ in blocks)
        for tile, (array, row) in zip((upper, lower, c, sn), blocks, strict=True):
            s.dma_copy(tile.all(), array.block((row, row + half), columns))
        for row, (first, second) in ((0, (c, sn)), (half, (sn, c))):
            left, right, result = (s.tile(width, FP32, partitions=half) for _ in range(3))
            s.compute("vector", "tensor_tensor", left.all(), upper.all(), first.all(), inputs=2)
            s.compute("vector", "tensor_tensor", right.all(), lower.all(), second.all(), inputs=2)
            s.compute("vector", "tensor_tensor", result.all(), left.all(), right.all(), inputs=2)
            s.dma_copy(out.block((row, row + half), columns), result.all())
    return s.events()


def rope_packed(width: int, by_product: bool, length: int = 262144) -> list[Event]:
    """Rotate (128, length) on all partitions: halves swapped by copies of the Scalar Engine or by a product."""
    s, half = static_sketch(), 64
    source, cos, sin, out = (s.array(rows, length, FP32) for rows in (P, half, half, P))
    swap = s.tile(P, FP32)
    if by_product:
        s.dma_copy(swap.all(), s.array(P, P, FP32).block((0, P), (0, P)))
    for start in range(0, length, width):
        columns = start, start + width
        both = _loaded(s, source, (0, P), columns)
        packed = []
        for table in (cos, sin):
            tile = s.tile(width, FP32)
            s.dma_copy(tile.part(0, width, 0, half), table.block((0, half), columns))
            s.activation("copy", tile.part(0, width, half, P), tile.part(0, width, 0, half))
            packed.append(tile)
        swapped = s.tile(width, FP32, "psum" if by_product else "sbuf")
        if by_product:
            s.nc_matmul(swapped.all(), swap.all(), both.all(), False)
        else:
            s.activation("copy", swapped.part(0, width, 0, half), both.part(0, width, half, P))
            s.activation("copy", swapped.part(0, width, half, P), both.part(0, width, 0, half))
        left, right, result = (s.tile(width, FP32) for _ in range(3))
        s.compute("vector", "tensor_tensor", left.all(), both.all(), packed[0].all(), inputs=2)
        s.compute("vector", "tensor_tensor", right.all(), swapped.all(), packed[1].all(), inputs=2)
        s.compute("vector", "tensor_tensor", result.all(), left.all(), right.all(), inputs=2)
        s.dma_copy(out.block((0, P), columns), result.all())
    return s.events()


class Mamba:
    """A selective scan over (256, 7168) with 16 states; rows of B and C reach all partitions by products with ones."""

    channels, length, states = 2, 7168, 16

    def __init__(self, width: int, shared_rows: bool, hoisted: bool) -> None:
        self.width, self.shared_rows, self.hoisted = width, shared_rows, hoisted
        self.s = s = static_sketch()
        self.delta, self.u, self.out = (s.array(2 * P, self.length, FP32) for _ in range(3))
        self.a = s.array(2 * P, self.states, FP32)
        self.b, self.c = (s.array(self.states, self.length, FP32) for _ in range(2))
        self.ones = s.tile(P, FP32, partitions=1)
        self.carried = [s.tile(self.states, FP32) for _ in range(self.channels)]
        for tile in (self.ones, *self.carried):
            s.compute("vector", "memset", tile.all(), engine="unknown")

    def events(self) -> list[Event]:
        """All tiles of the sequence; states outside of channels where rows are shared."""
        for start in range(0, self.length, self.width):
            self._tile((start, start + self.width))
        return self.s.events()

    def _tile(self, columns: tuple[int, int]) -> None:
        s, width = self.s, self.width
        rows = [(P * i, P * i + P) for i in range(self.channels)]
        delta, u = ([_loaded(s, x, r, columns) for r in rows] for x in (self.delta, self.u))
        sums = [s.tile(width, FP32) for _ in rows]
        for total in sums:
            s.compute("vector", "memset", total.all(), engine="unknown")
        products = [self._product(delta[i], u[i]) for i in range(self.channels)] if self.hoisted else []
        order = list(itertools.product(range(self.channels), range(self.states)))
        if self.shared_rows:
            order.sort(key=lambda pair: pair[1])
        shared: tuple[View, View] | None = None
        for i, n in order:
            if shared is None or not self.shared_rows or i == 0:
                shared = self._broadcast(self.b, n, columns), self._broadcast(self.c, n, columns)
            product = products[i] if self.hoisted else self._product(delta[i], u[i])
            self._state(i, n, (delta[i], product, sums[i]), shared)
        for i, total in enumerate(sums):
            s.dma_copy(self.out.block(rows[i], columns), total.all())

    def _product(self, delta: Tile, u: Tile) -> Tile:
        result = self.s.tile(self.width, FP32)
        self.s.compute("vector", "tensor_tensor", result.all(), delta.all(), u.all(), inputs=2)
        return result

    def _broadcast(self, array: Array, state: int, columns: tuple[int, int]) -> View:
        """One row on all partitions; copied to SBUF where two channels share it or it is wider than a bank.

        A shared row is assigned to a tile of the kernel, which the Vector Engine does: the record has it busy for 95 %.
        """
        s, width = self.s, self.width
        row, spread = s.tile(width, FP32, partitions=1), s.tile(width, FP32)
        s.dma_copy(row.all(), array.block((state, state + 1), columns))
        for start in range(0, width, 512):
            stop = min(width, start + 512)
            bank = s.tile(stop - start, FP32, "psum")
            s.nc_matmul(bank.all(), self.ones.all(), row.part(start, stop), False)
            if width <= 512 and not self.shared_rows:
                return bank.all()
            engine = "vector" if self.shared_rows else "unknown"
            s.compute("vector", "tensor_copy", spread.part(start, stop), bank.all(), engine=engine)
        return spread.all()

    def _state(self, channel: int, state: int, tiles: tuple[Tile, Tile, Tile], rows: tuple[View, View]) -> None:
        s, width, (delta, product, total) = self.s, self.width, tiles
        scale, carried = s.tile(1, FP32), self.carried[channel].part(state, state + 1)
        s.dma_copy(scale.all(), self.a.block((P * channel, P * channel + P), (state, state + 1)))
        decay, drive, scanned, weighted = (s.tile(width, FP32) for _ in range(4))
        s.activation("exp", decay.all(), delta.all(), scale.all())
        s.compute("vector", "tensor_tensor", drive.all(), product.all(), rows[0], inputs=2)
        s.compute("vector", "tensor_tensor_scan", scanned.all(), decay.all(), drive.all(), carried)
        s.compute("vector", "tensor_copy", carried, scanned.part(width - 1, width), engine="unknown")
        s.compute("vector", "tensor_tensor", weighted.all(), scanned.all(), rows[1], inputs=2)
        s.compute("vector", "tensor_tensor", total.all(), total.all(), weighted.all(), inputs=2)


def mamba(width: int, shared_rows: bool = False, hoisted: bool = False) -> list[Event]:
    """A selective scan, `width` positions at a time."""
    return Mamba(width, shared_rows, hoisted).events()
