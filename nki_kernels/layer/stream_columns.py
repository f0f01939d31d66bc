"""Products of streamed weights whose output features lie on the partitions: y^T = W^T x^T for up to 128 rows.

Here the weights are the stationary operand and the rows move: their loads hide behind the products, which are as long
as there are rows, so that few rows cost half of 512 moving columns. A block of C columns becomes J groups of
W <= 128; column w * J + j is on partition w of group j, so that a partition holds J neighbours of each row.
The contraction's order is stream_weights.product's: a row's bits depend on its own numbers alone.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import P, move

# up to this many rows are stored from where they are, in W pieces each
FEW_ROWS = 8


def groups_of(columns):
    """The least number of equal groups of at most 128 columns."""
    count = -(-columns // P)
    while columns % count:
        count = count + 1
    return count


def turned_product(stream, turned_PTR):
    """The next block's product with the turned rows (128, tiles, R): PSUM (W, J, R)."""
    weight, tile = stream.queue[stream.used].weight, 0
    last, columns = -(-weight.shape[1] // P), weight.shape[2]
    groups, rows = groups_of(columns), turned_PTR.shape[2]
    part_psum_WJR = nl.ndarray((columns // groups, groups, rows), dtype=nl.float32, buffer=nl.psum)
    while tile < last:
        piece = stream.take()
        inside = slice(piece.start, piece.start + piece.rows)
        for t in range(piece.first, piece.last):
            by_group = piece.tile_PTC[inside, t - piece.first, :].reshape((piece.rows, columns // groups, groups))
            for j in range(groups):
                nisa.nc_matmul(
                    dst=part_psum_WJR[:, j, :],
                    stationary=by_group[:, :, j],
                    moving=turned_PTR[inside, t, :],
                    accumulate=t > 0,
                )
        tile = piece.last
    return part_psum_WJR


def heads_product(stream, turned_PTR, dim):
    """The next block's heads, turned: PSUM (D, heads, R)."""
    weight, tile = stream.queue[stream.used].weight, 0
    last, heads = -(-weight.shape[1] // P), weight.shape[2] // dim
    psum_DHR = nl.ndarray((dim, heads, turned_PTR.shape[2]), dtype=nl.float32, buffer=nl.psum)
    while tile < last:
        piece = stream.take()
        for t in range(piece.first, piece.last):
            for i in range(heads):
                nisa.nc_matmul(
                    dst=psum_DHR[:, i, :],
                    stationary=piece.tile_PTC[:, t - piece.first, i * dim : (i + 1) * dim],
                    moving=turned_PTR[:, t, :],
                    accumulate=t > 0,
                )
        tile = piece.last
    return psum_DHR


def store_turned_block(out_RE, part_psum_WJR, block):
    """Round one block of columns and store its few rows as they lie."""
    width, groups, rows = part_psum_WJR.shape
    columns = width * groups
    rounded_WRJ = nl.ndarray((width, rows, groups), dtype=out_RE.dtype)
    nisa.tensor_copy(dst=rounded_WRJ, src=part_psum_WJR.permute((0, 2, 1)))
    target = out_RE[:, block * columns : (block + 1) * columns]
    move(target.reshape((rows, width, groups)).permute((1, 0, 2)), rounded_WRJ)
