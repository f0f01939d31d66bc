"""A tile of 128 query rows of one head, and its visit to a chunk of keys: scores, softmax, weighted values, merge.

R are the rows of a tile, W the columns of a visit, T its key tiles, D. The order of the stages is in prompt.py.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.blocks import BLOCK
from nki_kernels.tiles import BANK, PSUM_BANK_BYTES, P, absent, itemsize

# key tiles of one pass over scores, two PSUM banks, and of one exponential and its sum
PIECE = 8
SPAN = 16
# the Tensor Engine turns one key tile of so many, and DMA the others: both are busy then, and the Scalar Engine too
TURNED_ONCE_IN = 6
# the score of a column without a key: its weight is 0
HIDDEN = -3.0e38


class QueryTile(nl.NKIObject):
    """Rows `row` to `row` + 127 of head `head`, and what they carry from chunk to chunk."""

    def __init__(self, head, row, limit_R1):
        self.head = head
        self.row = row
        # the last position that each row sees: fp32 (R, 1)
        self.limit_R1 = limit_R1
        # load_query: (D, R)
        self.q_DR = None
        # raise_shift: -max / sqrt(D) so far, fp32 (R, 1)
        self.shift_R1 = None
        # merge: the sum of weights and the weighted values so far, fp32 (R, 1) and (R, D)
        self.total_R1 = None
        self.values_RD = None


class Visit(nl.NKIObject):
    """A tile's visit to a chunk, of which it may see the first `tiles` key tiles."""

    def __init__(self, tile, chunk, tiles, last):
        self.tile = tile
        self.chunk = chunk
        self.tiles = tiles
        self.last = last
        self.spans = spans_of(tiles)
        # score: masked scores fp32 (R, W), and the maximum of each piece, fp32 (R, 1)
        self.masked_RW = None
        self.tops = []
        # raise_shift: the tile's shift after this chunk, and from the second chunk on the factor of what it carries
        self.shift_R1 = None
        self.factor_R1 = None
        # exponentials: weights (R, W / 128, 128), the sum of each span, fp32 (R, 1)
        self.weights_RTP = None
        self.sums = []
        # turn: (128 keys, T, R)
        self.turned_PTR = None
        # weigh: PSUM fp32 (R, D)
        self.part_psum_RD = None


def spans_of(tiles):
    """Where each span of a visit begins and ends, and where its keys end, in key tiles.

    A width is a power of two, so that hidden keys only add zeros to a row's sum of weights, in the order of any adder.
    """
    spans, each = [], SPAN
    for start in range(0, tiles, each):
        width = 1
        while width < min(each, tiles - start):
            width = 2 * width
        spans.append((start, start + width, min(start + each, tiles)))
    return spans


def load_query(tile, q_HCD):
    """Load the tile's queries, turned."""
    tile.q_DR = nl.ndarray((q_HCD.shape[2], P), dtype=q_HCD.dtype)
    nisa.dma_transpose(dst=tile.q_DR, src=q_HCD[tile.head, tile.row : tile.row + P, :])


def score(visit, piece, zero_R1):
    """Products of the rows with a piece's keys, masked; the Vector Engine's pass gives the maximum too."""
    start, end = piece * PIECE, min(piece * PIECE + PIECE, visit.tiles)
    columns = visit.spans[len(visit.spans) - 1][1]
    if piece == 0:
        visit.masked_RW = nl.ndarray((P, columns * BLOCK), dtype=nl.float32)
        if columns > visit.tiles:
            padding = visit.masked_RW[:, visit.tiles * BLOCK : columns * BLOCK]
            nisa.memset(dst=padding, value=HIDDEN, engine=nisa.engine.gpsimd)
    psum_RTP = nl.ndarray((P, end - start, BLOCK), dtype=nl.float32, buffer=nl.psum)
    for first in range(start, end, BANK // BLOCK):
        last = min(first + BANK // BLOCK, end)
        nisa.nc_matmul(
            dst=psum_RTP[:, first - start : last - start, :],
            stationary=visit.tile.q_DR,
            moving=visit.chunk.keys_DTP[:, first:last, :],
            accumulate=False,
        )
    top_R1 = nl.ndarray((P, 1), dtype=nl.float32)
    nisa.range_select(
        dst=visit.masked_RW[:, start * BLOCK : end * BLOCK],
        on_true_tile=psum_RTP.reshape((P, (end - start) * BLOCK)),
        comp_op0=nl.greater_equal,
        comp_op1=nl.less_equal,
        bound0=zero_R1,
        bound1=visit.tile.limit_R1,
        reduce_res=top_R1,
        range_start=(visit.chunk.first + start) * BLOCK,
    )
    visit.tops.append(top_R1)


def raise_shift(visit, scale_R1):
    """-max / sqrt(D) of the rows after this chunk, and the factor that it gives what they carry.

    scale_R1 is -1 / sqrt(D) on each row.
    """
    tile, top_R1 = visit.tile, visit.tops[0]
    for i in range(1, len(visit.tops)):
        top_R1 = small_step(top_R1, visit.tops[i], nl.maximum)
    visit.shift_R1 = small_step(top_R1, scale_R1, nl.multiply)
    if not absent(tile.shift_R1):
        visit.shift_R1 = small_step(visit.shift_R1, tile.shift_R1, nl.minimum)
        visit.factor_R1 = nl.ndarray((P, 1), dtype=nl.float32)
        # of equal shifts this is exactly 1
        nisa.activation(dst=visit.factor_R1, op=nl.exp, data=tile.shift_R1, bias=visit.shift_R1, scale=-1.0)
    tile.shift_R1 = visit.shift_R1


def small_step(a_R1, b_R1, op):
    """One number a row from two, on the engine that has time for it."""
    result_R1 = nl.ndarray(a_R1.shape, dtype=nl.float32)
    nisa.tensor_tensor(dst=result_R1, data1=a_R1, data2=b_R1, op=op, engine=nisa.engine.gpsimd)
    return result_R1


def times_column(dst_RD, values_RD, factor_R1):
    """Values of each row times one number of it."""
    columns_RD = factor_R1.broadcast(1, values_RD.shape[1])
    nisa.tensor_tensor(dst=dst_RD, data1=values_RD, data2=columns_RD, op=nl.multiply, engine=nisa.engine.gpsimd)


def exponentials(visit, span):
    """Weights of a span and their sum."""
    start, stop, _ = visit.spans[span]
    dtype, dim = visit.chunk.pool.dtype, visit.chunk.pool.dim
    if span == 0:
        visit.weights_RTP = nl.ndarray((P, visit.spans[len(visit.spans) - 1][1], BLOCK), dtype=dtype)
    sum_R1 = nl.ndarray((P, 1), dtype=nl.float32)
    nisa.activation(
        dst=visit.weights_RTP[:, start:stop, :],
        op=nl.exp,
        data=visit.masked_RW[:, start * BLOCK : stop * BLOCK],
        bias=visit.shift_R1,
        scale=dim**-0.5,
        reduce_op=nl.add,
        reduce_res=sum_R1,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    visit.sums.append(sum_R1)


def turned_by_dma(visit):
    """How many of a visit's key tiles DMA turns: the first ones."""
    return visit.tiles - visit.tiles // TURNED_ONCE_IN


def turn_by_dma(visit, span):
    """A span's weights with its keys on the partitions, (128, T, R), without the last tiles of the visit."""
    start, _, end = visit.spans[span]
    stop = min(end, turned_by_dma(visit))
    if span == 0:
        visit.turned_PTR = nl.ndarray((BLOCK, visit.tiles, P), dtype=visit.weights_RTP.dtype)
    if stop > start:
        nisa.dma_transpose(dst=visit.turned_PTR[:, start:stop, :], src=visit.weights_RTP[:, start:stop, :])


def turn_rest(visit):
    """The last tiles of the visit, by the Tensor Engine."""
    dtype = visit.weights_RTP.dtype
    each = PSUM_BANK_BYTES // (P * itemsize(dtype))
    for first in range(turned_by_dma(visit), visit.tiles, each):
        last = min(first + each, visit.tiles)
        psum_PTR = nl.ndarray((BLOCK, last - first, P), dtype=dtype, buffer=nl.psum)
        for t in range(first, last):
            nisa.nc_transpose(dst=psum_PTR[:, t - first, :], data=visit.weights_RTP[:, t, :])
        nisa.tensor_copy(dst=visit.turned_PTR[:, first:last, :], src=psum_PTR, engine=nisa.engine.scalar)


def weigh(visit, piece):
    """Add a piece's weighted values, key tile by key tile."""
    if piece == 0:
        visit.part_psum_RD = nl.ndarray((P, visit.chunk.pool.dim), dtype=nl.float32, buffer=nl.psum)
    for t in range(piece * PIECE, min(piece * PIECE + PIECE, visit.tiles)):
        nisa.nc_matmul(
            dst=visit.part_psum_RD,
            stationary=visit.turned_PTR[:, t, :],
            moving=visit.chunk.values_PTD[:, t, :],
            accumulate=t > 0,
        )


def merge(visit):
    """Add the visit's sums and values to what the tile carries, which shrinks first."""
    tile, first = visit.tile, absent(visit.factor_R1)
    values_RD = nl.ndarray(visit.part_psum_RD.shape, dtype=nl.float32)
    if first:
        total_R1 = visit.sums[0]
        nisa.tensor_copy(dst=values_RD, src=visit.part_psum_RD, engine=nisa.engine.scalar)
    else:
        total_R1 = small_step(small_step(tile.total_R1, visit.factor_R1, nl.multiply), visit.sums[0], nl.add)
        shrunk_RD = nl.ndarray(values_RD.shape, dtype=nl.float32)
        times_column(shrunk_RD, tile.values_RD, visit.factor_R1)
        nisa.tensor_tensor(dst=values_RD, data1=shrunk_RD, data2=visit.part_psum_RD, op=nl.add)
    for i in range(1, len(visit.sums)):
        total_R1 = small_step(total_R1, visit.sums[i], nl.add)
    tile.total_R1 = total_R1
    tile.values_RD = values_RD


def divided(tile, dtype):
    """A tile's values over the sum of their weights: (R, D)."""
    inverse_R1, out_RD = nl.ndarray((P, 1), dtype=nl.float32), nl.ndarray(tile.values_RD.shape, dtype=dtype)
    nisa.reciprocal(dst=inverse_R1, data=tile.total_R1)
    times_column(out_RD, tile.values_RD, inverse_R1)
    return out_RD
