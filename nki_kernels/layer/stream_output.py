"""The last product of a fused decode kernel: streamed weights past rows that stay, several blocks of columns at once.

Up to 32 or 64 rows fill a quarter or a half of the Tensor Engine's columns; the other columns multiply the same rows
with other blocks, so that four or two blocks share a PSUM bank and its copy. A product sums its contraction tiles in
stream_weights.product's order: a row's bits depend on its own numbers alone.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.layer.stream_columns import FEW_ROWS, store_turned_block, turned_product
from nki_kernels.tiles import P, move


def room(rows):
    """Columns of a tile for the rows of `store_product`: as many as fill a part of the array, or few."""
    if rows <= FEW_ROWS:
        return rows
    part = P // 4
    while part < rows:
        part = part * 2
    return part


def store_product(out_RE, stream, turned_PTR, blocks):
    """The product of turned rows (128, tiles, room) with the blocks of columns blocks[0] to blocks[1], stored.

    The columns behind the rows are zero.
    """
    part = turned_PTR.shape[2]
    if part <= FEW_ROWS:
        for block in range(blocks[0], blocks[1]):
            store_turned_block(out_RE, turned_product(stream, turned_PTR), block)
        return
    each = P // part
    for first in range(blocks[0], blocks[1], each):
        psum_QC = product_of_blocks(stream, turned_PTR, min(each, blocks[1] - first))
        store_blocks(out_RE, psum_QC, first, part)


def product_of_blocks(stream, turned_PTR, count):
    """The next `count` blocks' products, one under the other: PSUM fp32 (count * part, C)."""
    part, weight = turned_PTR.shape[2], stream.queue[stream.used].weight
    psum_QC = nl.ndarray((count * part, weight.shape[2]), dtype=nl.float32, buffer=nl.psum)
    for i in range(count):
        tile = 0
        while tile < -(-weight.shape[1] // P):
            piece = stream.take()
            for t in range(piece.first, piece.last):
                multiply(psum_QC[i * part : (i + 1) * part, :], piece, turned_PTR, (t, i * part))
            tile = piece.last
    return psum_QC


def multiply(psum_RC, piece, turned_PTR, at):
    """The product of contraction tile at[0] of a piece, in the columns of the array from at[1] on."""
    t, inside = at[0], slice(piece.start, piece.start + piece.rows)
    nisa.nc_matmul(
        dst=psum_RC,
        stationary=turned_PTR[inside, t, :],
        moving=piece.tile_PTC[inside, t - piece.first, :],
        accumulate=t > 0,
        tile_position=(0, at[1]),
        tile_size=(P, turned_PTR.shape[2]),
    )


def store_blocks(out_RE, psum_QC, block, part):
    """Round the products of neighbouring blocks from number `block` on, and store each one's rows."""
    rows, columns = out_RE.shape[0], psum_QC.shape[1]
    rounded_QC, middle = nl.ndarray(psum_QC.shape, dtype=out_RE.dtype), columns // 2
    nisa.tensor_copy(dst=rounded_QC[:, 0:middle], src=psum_QC[:, 0:middle], engine=nisa.engine.vector)
    nisa.tensor_copy(dst=rounded_QC[:, middle:columns], src=psum_QC[:, middle:columns], engine=nisa.engine.scalar)
    for i in range(psum_QC.shape[0] // part):
        start = (block + i) * columns
        move(out_RE[:, start : start + columns], rounded_QC[i * part : i * part + rows, :])
