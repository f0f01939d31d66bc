"""Products of streamed weights whose output features lie on the partitions: y^T = W^T x^T for up to 128 rows.

Here the weights are the stationary operand and the rows move: their loads hide behind the products, which are as long
as there are rows, so that few rows cost half of 512 moving columns. A block of C columns becomes J groups of
W <= 128; column w * J + j is on partition w of group j, so that a partition holds J neighbours of each row.
The contraction's order is stream_weights.product's: a row's bits depend on its own numbers alone.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.layer.stream_weights import turns
from nki_kernels.tiles import P, move

# up to this many rows are stored from where they are, in W pieces each; more are turned back, with the same bits
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


def heads_product(stream, turned_PTR, values, dim):
    """The next block's heads: the first `values` with the rows on the partitions, PSUM (R, values * D), the others
    turned, PSUM (D, heads, R); None where there are none.
    """
    weight, tile = stream.queue[stream.used].weight, 0
    last, rows, heads = -(-weight.shape[1] // P), turned_PTR.shape[2], weight.shape[2] // dim
    values_psum_RC, turned_psum_DHR = None, None
    if values > 0:
        values_psum_RC = nl.ndarray((rows, values * dim), dtype=nl.float32, buffer=nl.psum)
    if values < heads:
        turned_psum_DHR = nl.ndarray((dim, heads - values, rows), dtype=nl.float32, buffer=nl.psum)
    while tile < last:
        piece = stream.take()
        inside = slice(piece.start, piece.start + piece.rows)
        for t in range(piece.first, piece.last):
            weights, moving = piece.tile_PTC[inside, t - piece.first, :], turned_PTR[inside, t, :]
            if values > 0:
                first = weights[:, 0 : values * dim]
                nisa.nc_matmul(dst=values_psum_RC, stationary=moving, moving=first, accumulate=t > 0)
            for i in range(values, heads):
                own, target = weights[:, i * dim : (i + 1) * dim], turned_psum_DHR[:, i - values, :]
                nisa.nc_matmul(dst=target, stationary=own, moving=moving, accumulate=t > 0)
        tile = piece.last
    return values_psum_RC, turned_psum_DHR


def store_turned_block(out_RE, part_psum_WJR, block):
    """Round one block of columns and store it: rows as they lie if they are few, else turned back."""
    width, groups, rows = part_psum_WJR.shape
    columns = width * groups
    target = out_RE[:, block * columns : (block + 1) * columns]
    if rows <= FEW_ROWS:
        rounded_WRJ = nl.ndarray((width, rows, groups), dtype=out_RE.dtype)
        nisa.tensor_copy(dst=rounded_WRJ, src=part_psum_WJR.permute((0, 2, 1)))
        move(target.reshape((rows, width, groups)).permute((1, 0, 2)), rounded_WRJ)
        return
    rounded_WJR = nl.ndarray(part_psum_WJR.shape, dtype=out_RE.dtype)
    nisa.tensor_copy(dst=rounded_WJR, src=part_psum_WJR, engine=nisa.engine.vector)
    whole_RWJ = nl.ndarray((rows, width, groups), dtype=out_RE.dtype)
    # by two engines; of fp32 a bank holds half of a block's groups
    each = -(-groups // 2)
    for first in range(0, groups, each):
        last = min(first + each, groups)
        psum_RWJ = nl.ndarray((rows, width, last - first), dtype=out_RE.dtype, buffer=nl.psum)
        for j in range(first, last):
            nisa.nc_transpose(dst=psum_RWJ[:, :, j - first], data=rounded_WJR[:, j, :])
        nisa.tensor_copy(dst=whole_RWJ[:, :, first:last], src=psum_RWJ, engine=turns(first // each))
    move(target, whole_RWJ.reshape((rows, columns)))
