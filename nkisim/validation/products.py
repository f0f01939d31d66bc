"""Sketches of published kernels around products: fp32 products and their bf16 splits, softmax, RMSNorm, attention.

On one core, written from the descriptions in their records; no code of their code. A split product takes the high and
the low bf16 part of each operand and adds three products.
"""

from __future__ import annotations

from collections.abc import Iterable

from nkisim.event import Event
from validation.sketch import Array, Sketch, Tile, View, static_sketch

P, BANK = 128, 512
FP32, BF16 = "float32", "bfloat16"


def copy(s: Sketch, dst: View, src: View, engine: str = "unknown") -> None:
    """A copy on an engine, or on the one that the compiler chooses."""
    s.compute("vector" if engine == "unknown" else engine, "tensor_copy", dst, src, engine=engine)


def load(s: Sketch, array: Array, rows: tuple[int, int], columns: tuple[int, int], dtype: str = FP32) -> Tile:
    tile = s.tile(columns[1] - columns[0], dtype, partitions=rows[1] - rows[0])
    s.dma_copy(tile.all(), array.block(rows, columns))
    return tile


def identity_matrix(s: Sketch, dtype: str = FP32) -> View:
    return load(s, s.array(P, P, dtype), (0, P), (0, P), dtype).all()


def transposed(s: Sketch, dst: View, data: View, identity: View) -> None:
    """Through PSUM, which takes a copy."""
    rows = data.partitions[1] - data.partitions[0]
    bank = s.tile(rows, data.dtype, "psum", partitions=dst.partitions[1] - dst.partitions[0])
    s.transpose(bank.all(), data, identity)
    copy(s, dst, bank.all())


def transposed_together(s: Sketch, parts: list[View], identity: View) -> View:
    """Transposes of 128 rows into neighbouring columns of one bank, from where one copy takes them.

    The compiler does so for four of them where nothing comes between. Their record counts copies out of PSUM: 21,568 in
    grouped attention where each part is multiplied as it is transposed and 9,280 where all are transposed first, 4,608
    and 4,224 in batches, 132 in the product before an RMSNorm.
    """
    first, last = parts[0].partitions
    columns = parts[0].elements // (last - first)
    bank = s.tile(len(parts) * P, FP32, "psum", partitions=columns)
    for i, part in enumerate(parts):
        s.transpose(bank.part(i * P, i * P + P), part, identity)
    return bank.all()


class Limbs:
    """An operand of (128, columns) in fp32, or as a high and a low part in bf16; `full` is its tile in fp32."""

    def __init__(self, s: Sketch, columns: int, split: bool, full: Tile | None = None) -> None:
        self.s = s
        self.tiles = [s.tile(columns, BF16) for _ in range(2)] if split else [full or s.tile(columns, FP32)]

    def take(self, start: int, source: View) -> None:
        """Store fp32 columns: as they are (which the caller does not need for loads), or both parts."""
        stop = start + source.elements // P
        views = [tile.part(start, stop) for tile in self.tiles]
        copy(self.s, views[0], source)
        if len(views) > 1:
            self.s.compute("vector", "tensor_tensor", views[1], source, views[0], inputs=2)

    def load(self, start: int, array: Array, rows: tuple[int, int], columns: tuple[int, int]) -> None:
        """Load fp32 columns, split where this is split."""
        stop = start + columns[1] - columns[0]
        if len(self.tiles) == 1:
            self.s.dma_copy(self.tiles[0].part(start, stop), array.block(rows, columns))
        else:
            self.take(start, load(self.s, array, rows, columns).all())

    def parts(self, start: int, stop: int) -> list[View]:
        """The same columns of each part."""
        return [tile.part(start, stop) for tile in self.tiles]


def accumulate(s: Sketch, bank: View, pairs: Iterable[tuple[list[View], list[View]]]) -> None:
    """Add the products of (stationary, moving) pairs; of two parts each, all but low with low."""
    first = True
    for stationary, moving in pairs:
        for i, weights in enumerate(stationary):
            for data in moving[: len(moving) - i]:
                s.nc_matmul(bank, weights, data, not first)
                first = False


def transposed_left(block: int, split: bool, chunk: int = 456) -> list[Event]:
    """left.T @ right of (2048, 4096) and (2048, 10944): `block` x 128 rows stay, `right` streams in chunks."""
    s, depths, n = static_sketch(), 16, 10944
    left, right, out = s.array(P, depths * 4096, FP32), s.array(P, depths * n, FP32), s.array(4096, n, FP32)
    for first in range(0, 32, block):
        rows = block * P
        stays = Limbs(s, depths * rows, split)
        for i in range(depths):
            stays.load(i * rows, left, (0, P), (i * 4096 + first * P, i * 4096 + first * P + rows))
        for start in range(0, n, chunk):
            width = min(chunk, n - start)
            moving = Limbs(s, depths * width, split)
            for i in range(depths):
                moving.load(i * width, right, (0, P), (i * n + start, i * n + start + width))
            for row in range(block):
                bank = s.tile(width, FP32, "psum")
                accumulate(s, bank.all(), (
                    (stays.parts(i * rows + row * P, i * rows + row * P + P), moving.parts(i * width, (i + 1) * width))
                    for i in range(depths)
                ))  # fmt: skip
                result = s.tile(width, FP32)
                copy(s, result.all(), bank.all())
                at = (first + row) * P
                s.dma_copy(out.block((at, at + P), (start, start + width)), result.all())
    return s.events()


def batched(block: int, softmax: bool = False, copies: tuple[str, ...] = ("unknown",)) -> list[Event]:
    """16 products of (4096, 64) and (64, 4096): `block` row tiles are transposed before their products run.

    `copies` are the engines that take scores out of PSUM, in turn.
    """
    s, k, n = static_sketch(), 64, 4096
    left, right, out = s.array(16 * n, k, FP32), s.array(16 * k, n, FP32), s.array(16 * n, n, FP32)
    identity = identity_matrix(s)
    for b in range(16):
        moving = load(s, right, (b * k, b * k + k), (0, n))
        for first in range(0, 32, block):
            packed = s.tile(block * P, FP32, partitions=k)
            together = min(block, BANK // P)
            for i in range(0, block, together):
                rows = [b * n + (first + i + j) * P for j in range(together)]
                parts = [load(s, left, (row, row + P), (0, k)).all() for row in rows]
                copy(s, packed.part(i * P, (i + together) * P), transposed_together(s, parts, identity))
            for i in range(block):
                row = b * n + (first + i) * P
                weights = packed.part(i * P, i * P + P)
                if softmax:
                    _softmax_row(s, weights, moving, out.block((row, row + P), (0, n)), copies)
                else:
                    _product_row(s, weights, moving, out, row)
    return s.events()


def _product_row(s: Sketch, weights: View, moving: Tile, out: Array, row: int) -> None:
    for start in range(0, moving.columns, BANK):
        bank, result = s.tile(BANK, FP32, "psum"), s.tile(BANK, FP32)
        s.nc_matmul(bank.all(), weights, moving.part(start, start + BANK), False)
        copy(s, result.all(), bank.all())
        s.dma_copy(out.block((row, row + P), (start, start + BANK)), result.all())


def _softmax_row(s: Sketch, weights: View, moving: Tile, target: View, copies: tuple[str, ...]) -> None:
    n = moving.columns
    score, powers, result = (s.tile(n, FP32) for _ in range(3))
    for i, start in enumerate(range(0, n, BANK)):
        bank = s.tile(BANK, FP32, "psum")
        s.nc_matmul(bank.all(), weights, moving.part(start, start + BANK), False)
        copy(s, score.part(start, start + BANK), bank.all(), copies[i % len(copies)])
    limit, total, inverse = (s.tile(1, FP32) for _ in range(3))
    s.compute("vector", "tensor_reduce", limit.all(), score.all(), elements=n)
    s.activation("exp", powers.all(), score.all(), limit.all())
    s.compute("vector", "tensor_reduce", total.all(), powers.all(), elements=n)
    s.compute("vector", "reciprocal", inverse.all(), total.all())
    s.compute("vector", "tensor_scalar", result.all(), powers.all(), inverse.all(), scalar_operands=1)
    s.dma_copy(target, result.all())


def normed_product(split: bool, scale_after: bool, residual: bool = False) -> list[Event]:
    """RMSNorm of (4096, 1024), then a product with (1024, 2048), which stays on chip.

    With a residual it is added first, and a weight for each column scales the rows or, `scale_after`, the product's
    right side.
    """
    s, k, n = static_sketch(), 1024, 2048
    other, gain = s.array(4096, k, FP32), s.tile(k, FP32)
    source, weight, out = s.array(4096, k, FP32), s.array(k, n, FP32), s.array(4096, n, FP32)
    identity, stays = identity_matrix(s), [Limbs(s, n, split) for _ in range(k // P)]
    if residual:
        s.dma_copy(gain.all(), s.array(P, k, FP32).block((0, P), (0, k)))
    for i, part in enumerate(stays):
        rows = (i * P, i * P + P)
        if residual and scale_after:
            scaled = load(s, weight, rows, (0, n))
            s.compute("vector", "tensor_scalar", scaled.all(), scaled.all(), gain.part(i, i + 1), scalar_operands=1)
            part.take(0, scaled.all())
        else:
            part.load(0, weight, rows, (0, n))
    for row in range(0, 4096, P):
        data = load(s, source, (row, row + P), (0, k))
        if residual:
            more, added = load(s, other, (row, row + P), (0, k)), s.tile(k, FP32)
            s.compute("vector", "tensor_tensor", added.all(), data.all(), more.all(), inputs=2)
            data = added
        squares, total, root = s.tile(k, FP32), s.tile(1, FP32), s.tile(1, FP32)
        s.activation("square", squares.all(), data.all())
        s.compute("vector", "tensor_reduce", total.all(), squares.all(), elements=k)
        s.activation("rsqrt", root.all(), total.all())
        if not scale_after:
            scaled = s.tile(k, FP32)
            s.compute("vector", "tensor_scalar", scaled.all(), data.all(), root.all(), scalar_operands=1)
            if residual:
                s.compute("vector", "tensor_tensor", scaled.all(), scaled.all(), gain.all(), inputs=2)
            data = scaled
        transposed_tile = _transpose(s, data, split, identity)
        for start in range(0, n, BANK):
            bank, result = s.tile(BANK, FP32, "psum"), s.tile(BANK, FP32)
            pairs = (
                (transposed_tile.parts(i * P, i * P + P), b.parts(start, start + BANK)) for i, b in enumerate(stays)
            )
            accumulate(s, bank.all(), pairs)
            if scale_after:
                s.compute("vector", "tensor_scalar", result.all(), bank.all(), root.all(), scalar_operands=1)
            else:
                copy(s, result.all(), bank.all())
            s.dma_copy(out.block((row, row + P), (start, start + BANK)), result.all())
    return s.events()


def _transpose(s: Sketch, data: Tile, split: bool, identity: View) -> Limbs:
    """Transpose each 128 columns, four to a bank; parts are taken from a copy in SBUF."""
    transposed_tile = Limbs(s, data.columns, split)
    for start in range(0, data.columns, BANK):
        source = transposed_together(s, [data.part(i, i + P) for i in range(start, start + BANK, P)], identity)
        if split:
            scratch = s.tile(BANK, FP32).all()
            copy(s, scratch, source)
            source = scratch
        transposed_tile.take(start, source)
    return transposed_tile


def product_normed(split: bool, by_parts: bool) -> list[Event]:
    """A product of (4096, 2048) and (2048, 2048), which stays on chip, a residual, an RMSNorm and its weight.

    The result is scaled and stored at once, or 512 columns at a time.
    """
    s, n = static_sketch(), 2048
    source, weight, other, out = (
        s.array(4096, n, FP32),
        s.array(n, n, FP32),
        s.array(4096, n, FP32),
        s.array(4096, n, FP32),
    )
    identity, stays, gain = identity_matrix(s), [Limbs(s, n, split) for _ in range(n // P)], s.tile(n, FP32)
    s.dma_copy(gain.all(), s.array(P, n, FP32).block((0, P), (0, n)))
    for i, part in enumerate(stays):
        part.load(0, weight, (i * P, i * P + P), (0, n))
    for row in range(0, 4096, P):
        rows, sums = (row, row + P), s.tile(n, FP32)
        transposed_tile = _transpose(s, load(s, source, rows, (0, n)), split, identity)
        for start in range(0, n, BANK):
            span, bank = (start, start + BANK), s.tile(BANK, FP32, "psum")
            pairs = ((transposed_tile.parts(i * P, i * P + P), b.parts(*span)) for i, b in enumerate(stays))
            accumulate(s, bank.all(), pairs)
            more = load(s, other, rows, span).all()
            s.compute("vector", "tensor_tensor", sums.part(*span), bank.all(), more, inputs=2)
        squares, total, root = s.tile(n, FP32), s.tile(1, FP32).all(), s.tile(1, FP32).all()
        s.activation("square", squares.all(), sums.all())
        s.compute("vector", "tensor_reduce", total, squares.all(), elements=n)
        s.compute("vector", "tensor_scalar", total, total)
        s.activation("rsqrt", root, total)
        result, width = s.tile(n, FP32), BANK if by_parts else n
        for start in range(0, n, width):
            span = start, start + width
            s.compute("vector", "tensor_scalar", result.part(*span), sums.part(*span), root, scalar_operands=1)
            s.compute("vector", "tensor_tensor", result.part(*span), result.part(*span), gain.part(*span), inputs=2)
            s.dma_copy(out.block(rows, span), result.part(*span))
    return s.events()


def product(block: int) -> list[Event]:
    """(4096, 5120) @ (5120, 12288) in fp32: `block` transposed row tiles stay while `right` streams."""
    s, depths, n = static_sketch(), 40, 12288
    left, right, out = s.array(4096, depths * P, FP32), s.array(depths * P, n, FP32), s.array(4096, n, FP32)
    identity = identity_matrix(s)
    for first in range(0, 32, block):
        stays = [[s.tile(P, FP32).all() for _ in range(depths)] for _ in range(block)]
        for i, tiles in enumerate(stays):
            row = (first + i) * P
            for j, tile in enumerate(tiles):
                transposed(s, tile, load(s, left, (row, row + P), (j * P, j * P + P)).all(), identity)
        for start in range(0, n, BANK):
            banks = [s.tile(BANK, FP32, "psum") for _ in stays]
            for j in range(depths):
                moving = load(s, right, (j * P, j * P + P), (start, start + BANK))
                for tiles, bank in zip(stays, banks, strict=True):
                    s.nc_matmul(bank.all(), tiles[j], moving.all(), j > 0)
            for i, bank in enumerate(banks):
                result, row = s.tile(BANK, FP32), (first + i) * P
                copy(s, result.all(), bank.all())
                s.dma_copy(out.block((row, row + P), (start, start + BANK)), result.all())
    return s.events()


def attention(length: int, dtype: str) -> list[Event]:
    """Attention of one head of 128: scores, softmax and sums stay on chip, a tile of 128 queries at a time."""
    s = Sketch()
    q, k, v = (load(s, s.array(P, length, dtype), (0, P), (0, length), dtype) for _ in range(3))
    out, identity, transposed_tile = s.array(length, P, dtype), identity_matrix(s), s.tile(length, FP32)
    for at in range(0, length, P):
        transposed(s, transposed_tile.part(at, at + P), v.part(at, at + P), identity)
    for row in range(0, length, P):
        _attend(s, q.part(row, row + P), (k, transposed_tile), identity, out.block((row, row + P), (0, P)))
    return s.events()


def _attend(s: Sketch, query: View, cached: tuple[Tile, Tile], identity: View, target: View) -> None:
    keys, values = cached
    length, chunks = keys.columns, keys.columns // BANK
    score, powers, transposed_tile = (s.tile(length, FP32) for _ in range(3))
    peaks, totals = s.tile(chunks, FP32), s.tile(chunks, FP32)
    limit, total, inverse = (s.tile(1, FP32) for _ in range(3))
    spans = [(i * BANK, i * BANK + BANK) for i in range(chunks)]
    for span in spans:
        bank = s.tile(BANK, FP32, "psum")
        s.nc_matmul(bank.all(), query, keys.part(*span), False)
        copy(s, score.part(*span), bank.all())
    for i, span in enumerate(spans):
        s.compute("vector", "tensor_reduce", peaks.part(i, i + 1), score.part(*span), elements=BANK)
    s.compute("vector", "tensor_reduce", limit.all(), peaks.all(), elements=chunks)
    for i, span in enumerate(spans):
        s.activation("exp", powers.part(*span), score.part(*span), limit.all())
        s.compute("vector", "tensor_reduce", totals.part(i, i + 1), powers.part(*span), elements=BANK)
    s.compute("vector", "tensor_reduce", total.all(), totals.all(), elements=chunks)
    s.compute("vector", "reciprocal", inverse.all(), total.all())
    for at in range(0, length, P):
        transposed(s, transposed_tile.part(at, at + P), powers.part(at, at + P), identity)
    bank, result = s.tile(P, FP32, "psum"), s.tile(P, target.dtype)
    for at in range(0, length, P):
        s.nc_matmul(bank.all(), transposed_tile.part(at, at + P), values.part(at, at + P), at > 0)
    s.compute("vector", "tensor_scalar", result.all(), bank.all(), inverse.all(), scalar_operands=1)
    s.dma_copy(target, result.all())


def transposed_tile(rows: int, columns: int) -> list[Event]:
    """The transpose of an fp32 matrix by tiles of 128 x 128, each loaded, transposed, copied and stored."""
    s = Sketch()
    source, out, identity = s.array(rows, columns, FP32), s.array(columns, rows, FP32), s.tile(P, FP32).all()
    for row in range(0, rows, P):
        for column in range(0, columns, P):
            result = s.tile(P, FP32)
            tile = load(s, source, (row, row + P), (column, column + P))
            transposed(s, result.all(), tile.all(), identity)
            s.dma_copy(out.block((column, column + P), (row, row + P)), result.all())
    return s.events()
