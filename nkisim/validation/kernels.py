"""The measured kernels, sketched from their published descriptions: loops, tiles and transfers, none of their code.

All operands are bf16; `left` is (K, M), `right` is (K, N); the product accumulates in fp32.
"""

from __future__ import annotations

from nkisim.event import Event
from validation.sketch import Array, Sketch, Tile, View

P, COLUMNS = 128, 512
BF16, FP32 = "bfloat16", "float32"
Shape = tuple[int, int, int]


def plain_matmul(shape: Shape) -> list[Event]:
    """Three loops over tiles of 128 x 128 x 512; both operands are loaded for each product."""
    k, m, n = shape
    s = Sketch()
    left, right, out = s.array(k, m, BF16), s.array(k, n, BF16), s.array(m, n, BF16)
    for row in range(0, m, P):
        for column in range(0, n, COLUMNS):
            product = s.tile(COLUMNS, FP32, "psum")
            for depth in range(0, k, P):
                weights, moving = s.tile(P, BF16), s.tile(COLUMNS, BF16)
                s.dma_copy(weights.all(), left.block((depth, depth + P), (row, row + P)))
                s.dma_copy(moving.all(), right.block((depth, depth + P), (column, column + COLUMNS)))
                s.nc_matmul(product.all(), weights.all(), moving.all(), depth > 0)
            result = s.tile(COLUMNS, BF16)
            s.compute("vector", "tensor_copy", result.all(), product.all(), engine="unknown")
            s.dma_copy(out.block((row, row + P), (column, column + COLUMNS)), result.all())
    return s.events()


def _fitted(limit: int, count: int) -> int:
    """The largest block of at most `most` tiles that divides `count` tiles."""
    return max(size for size in range(1, min(limit, count) + 1) if count % size == 0)


class BlockedMatmul:
    """Blocks of (M, N, K) tiles; sums over blocks of K stay in SBUF as fp32 and are converted by the store."""

    def __init__(self, shape: Shape, blocks: Shape, core: int = 0, cores: int = 1) -> None:
        self.k, self.m, n = shape
        self.n = n // cores
        self.offset = core * self.n
        self.s = Sketch(core, core << 20)
        self.left = self.s.array(self.k, self.m, BF16)
        self.right = self.s.array(self.k, n, BF16)
        self.out = self.s.array(self.m, n, BF16)
        self.rows = _fitted(blocks[0], self.m // P)
        self.columns = _fitted(blocks[1], self.n // COLUMNS) * COLUMNS
        self.depths = _fitted(blocks[2], self.k // P)

    def events(self) -> list[Event]:
        """All blocks of columns."""
        for start in range(self.offset, self.offset + self.n, self.columns):
            self._columns(start)
        return self.s.events()

    def _columns(self, start: int) -> None:
        s, stop = self.s, start + self.columns
        sums = [s.tile(self.columns, FP32) for _ in range(self.m // P)]
        for total in sums:
            s.compute("vector", "memset", total.all(), engine="unknown")
        for depth in range(0, self.k, self.depths * P):
            moving = self._load(self.right, depth, start, self.columns)
            for row in range(0, self.m // P, self.rows):
                weights = self._load(self.left, depth, row * P, self.rows * P)
                self._block(weights, moving, sums[row : row + self.rows])
        for row, total in enumerate(sums):
            s.dma_copy(self.out.block((row * P, row * P + P), (start, stop)), total.all())

    def _load(self, array: Array, depth: int, start: int, width: int) -> Tile:
        """A block as one tile, a transfer for each 128 rows."""
        tile = self.s.tile(self.depths * width, BF16)
        for i in range(self.depths):
            rows = depth + i * P, depth + i * P + P
            self.s.dma_copy(tile.part(i * width, i * width + width), array.block(rows, (start, start + width)))
        return tile

    def _block(self, weights: Tile, moving: Tile, sums: list[Tile]) -> None:
        s, width = self.s, self.rows * P
        for column in range(0, self.columns, COLUMNS):
            for row, total in enumerate(sums):
                product = s.tile(COLUMNS, FP32, "psum")
                for i in range(self.depths):
                    left = weights.part(i * width + row * P, i * width + row * P + P)
                    at = i * self.columns + column
                    s.nc_matmul(product.all(), left, moving.part(at, at + COLUMNS), i > 0)
                part = total.part(column, column + COLUMNS)
                s.compute("vector", "tensor_tensor", part, part, product.all(), inputs=2)


def blocked_matmul(shape: Shape, blocks: Shape) -> list[Event]:
    """On one core."""
    return BlockedMatmul(shape, blocks).events()


def split_matmul(shape: Shape, blocks: Shape) -> list[Event]:
    """On two cores, each with half of the columns."""
    return [event for core in (0, 1) for event in BlockedMatmul(shape, blocks, core, 2).events()]


def tiled_copy(shape: tuple[int, int]) -> list[Event]:
    """Load and store 128 rows at a time."""
    rows, columns = shape
    s = Sketch()
    source, out = s.array(rows, columns, BF16), s.array(rows, columns, BF16)
    for row in range(0, rows, P):
        tile = s.tile(columns, BF16)
        s.dma_copy(tile.all(), source.block((row, row + P), (0, columns)))
        s.dma_copy(out.block((row, row + P), (0, columns)), tile.all())
    return s.events()


def packed_copy(shape: tuple[int, int], chunk: int = 16384) -> list[Event]:
    """A partition takes rows that lie together, up to 32 KiB a transfer."""
    rows, columns = shape
    width = rows // P * columns
    s = Sketch()
    source, out = s.array(P, width, BF16), s.array(P, width, BF16)
    for start in range(0, width, chunk):
        stop = min(width, start + chunk)
        tile = s.tile(stop - start, BF16)
        s.dma_copy(tile.all(), source.block((0, P), (start, stop)))
        s.dma_copy(out.block((0, P), (start, stop)), tile.all())
    return s.events()


def rms_norm(shape: tuple[int, int]) -> list[Event]:
    """The weight is loaded into each partition by a transfer of its own; then 128 rows at a time."""
    rows, columns = shape
    s = Sketch()
    source, weight, out = s.array(rows, columns, BF16), s.array(1, columns, BF16), s.array(rows, columns, BF16)
    scale = s.tile(columns, BF16)
    for partition in range(P):
        s.dma_copy(scale.part(0, columns, partition, partition + 1), weight.block((0, 1), (0, columns)))
    for row in range(0, rows, P):
        tile = s.tile(columns, BF16)
        s.dma_copy(tile.all(), source.block((row, row + P), (0, columns)))
        _normalise(s, tile, scale.all(), out.block((row, row + P), (0, columns)))
    return s.events()


def _normalise(s: Sketch, tile: Tile, scale: View, target: View) -> None:
    columns = tile.columns
    squares, total, root = s.tile(columns, FP32), s.tile(1, FP32), s.tile(1, FP32)
    s.add("scalar", "activation", (tile.all(),), (squares.all(), total.all()), elements=columns, function="square")
    s.compute("scalar", "activation", root.all(), total.all(), function="rsqrt")
    scaled, result = s.tile(columns, FP32), s.tile(columns, BF16)
    s.compute("vector", "tensor_scalar", scaled.all(), tile.all(), root.all(), scalar_operands=1)
    s.compute("vector", "tensor_tensor", result.all(), scaled.all(), scale, inputs=2)
    s.dma_copy(target, result.all())


def added(count: int, partitions: int, columns: int, dge: str = "unknown") -> list[Event]:
    """The sum of two fp32 vectors by tiles: of neighbours if a tile has one column, else of a row a partition."""
    s, tall = Sketch(dge=dge), columns == 1
    rows, width = (count, 1) if tall else (partitions, count // partitions)
    left, right, out = (s.array(rows, width, FP32) for _ in range(3))
    for i in range(count // (partitions * columns)):
        first = i * partitions if tall else 0
        where = (first, first + partitions), (0, 1) if tall else (i * columns, (i + 1) * columns)
        a, b, total = (s.tile(columns, FP32, partitions=partitions) for _ in range(3))
        s.dma_copy(a.all(), left.block(*where))
        s.dma_copy(b.all(), right.block(*where))
        if tall:
            s.compute("vector", "tensor_scalar", total.all(), a.all(), b.all(), scalar_operands=1)
        else:
            s.compute("vector", "tensor_tensor", total.all(), a.all(), b.all(), inputs=2)
        s.dma_copy(out.block(*where), total.all())
    return s.events()
