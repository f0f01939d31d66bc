"""A tile of 128 query rows of one head, and its step over a chunk of keys: scores, softmax, weighted values.

R are the rows of a tile, W the keys of a step, T its key tiles, D. The order of the stages is in prompt.py.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.kv_prefetch import SUBCHUNK
from nki_kernels.attention.paged_kv import PAGE
from nki_kernels.tiles import BANK, LOWEST, P, absent, transpose_on_pe

# key tiles of one exponential and its sum
SPAN = 16
# one of so many tiles of attention weights is transposed on the Tensor Engine, the rest by DMA: balances both queues
TRANSPOSED_ON_PE_IN = 6


class QueryTile(nl.NKIObject):
    """Rows `row` to `row` + 127 of head `head`, and their online softmax from chunk to chunk."""

    def __init__(self, head, row, limit_R1):
        self.head = head
        self.row = row
        # the last position that each row attends: fp32 (R, 1)
        self.limit_R1 = limit_R1
        # load_query: (D, R)
        self.q_DR = None
        # update_neg_max: -max / sqrt(D) so far, fp32 (R, 1)
        self.neg_max_R1 = None
        # accumulate_chunk: the sum of weights and the weighted values so far, fp32 (R, 1) and (R, D)
        self.total_R1 = None
        self.values_RD = None


class TileStep(nl.NKIObject):
    """A query tile's step over a chunk: it attends the first `tiles` key tiles."""

    def __init__(self, tile, chunk, tiles, last):
        self.tile = tile
        self.chunk = chunk
        self.tiles = tiles
        self.last = last
        self.spans = spans_of(tiles)
        # score: masked scores fp32 (R, W), and the max of each subchunk, fp32 (R, 1)
        self.masked_RW = None
        self.maxima = []
        # update_neg_max: -max / sqrt(D) after this chunk, and from the second chunk on the rescale factor
        self.neg_max_R1 = None
        self.rescale_R1 = None
        # exponentials: weights (R, T, 128), the sum of each span, fp32 (R, 1), and transposed weights (128 keys, T, R)
        self.weights_RTP = None
        self.sums = []
        self.weights_PTR = None
        # multiply: PSUM fp32 (R, D)
        self.part_psum_RD = None


def spans_of(tiles):
    """(start, stop, end) of each span in key tiles: a power of two wide, padded from `end` on.

    A row's sum of weights then has one order of additions, in which masked keys are zeros.
    """
    spans = []
    for start in range(0, tiles, SPAN):
        width = 1
        while width < min(SPAN, tiles - start):
            width = 2 * width
        spans.append((start, start + width, min(start + SPAN, tiles)))
    return spans


def rowwise_op(a_R1, b_R1, op):
    """a op b for each row: fp32 (R, 1), on GpSimd, which is otherwise idle."""
    result_R1 = nl.ndarray(a_R1.shape, dtype=nl.float32)
    nisa.tensor_tensor(dst=result_R1, data1=a_R1, data2=b_R1, op=op, engine=nisa.engine.gpsimd)
    return result_R1


def scale_rows(dst_RD, values_RD, factor_R1):
    """Multiply each row by its factor, on GpSimd."""
    factor_RD = factor_R1.broadcast(1, values_RD.shape[1])
    nisa.tensor_tensor(dst=dst_RD, data1=values_RD, data2=factor_RD, op=nl.multiply, engine=nisa.engine.gpsimd)


def load_query(tile, q_HCD):
    """Load the tile's queries, transposed by DMA."""
    if absent(tile.q_DR):
        tile.q_DR = nl.ndarray((q_HCD.shape[2], P), dtype=q_HCD.dtype)
        nisa.dma_transpose(dst=tile.q_DR, src=q_HCD[tile.head, tile.row : tile.row + P, :])


def score(step, subchunk, prompt):
    """Masked scores of the rows with a subchunk's keys; the same pass of the Vector Engine computes the max."""
    start, end = subchunk * SUBCHUNK, min((subchunk + 1) * SUBCHUNK, step.tiles)
    if start >= step.tiles:
        return
    step.chunk.transpose_until(subchunk + 1)
    columns = step.spans[len(step.spans) - 1][1]
    if subchunk == 0:
        step.masked_RW = nl.ndarray((P, columns * PAGE), dtype=nl.float32)
        if columns > step.tiles:
            padding = step.masked_RW[:, step.tiles * PAGE : columns * PAGE]
            nisa.memset(dst=padding, value=LOWEST, engine=nisa.engine.gpsimd)
    psum_RTP = nl.ndarray((P, end - start, PAGE), dtype=nl.float32, buffer=nl.psum)
    for first in range(start, end, BANK // PAGE):
        last = min(first + BANK // PAGE, end)
        nisa.nc_matmul(
            dst=psum_RTP[:, first - start : last - start, :],
            stationary=step.tile.q_DR,
            moving=step.chunk.keys_DTP[:, first:last, :],
            accumulate=False,
        )
    max_R1 = nl.ndarray((P, 1), dtype=nl.float32)
    nisa.range_select(
        dst=step.masked_RW[:, start * PAGE : end * PAGE],
        on_true_tile=psum_RTP.reshape((P, (end - start) * PAGE)),
        comp_op0=nl.greater_equal,
        comp_op1=nl.less_equal,
        bound0=prompt.zero_R1,
        bound1=step.tile.limit_R1,
        reduce_res=max_R1,
        range_start=(step.chunk.first + start) * PAGE,
    )
    step.maxima.append(max_R1)


def update_neg_max(step, prompt):
    """-max / sqrt(D) of the rows after this chunk, and the rescale factor of the tile's sum and values so far."""
    tile, max_R1 = step.tile, step.maxima[0]
    for i in range(1, len(step.maxima)):
        max_R1 = rowwise_op(max_R1, step.maxima[i], nl.maximum)
    step.neg_max_R1 = rowwise_op(max_R1, prompt.neg_scale_R1, nl.multiply)
    if not absent(tile.neg_max_R1):
        step.neg_max_R1 = rowwise_op(step.neg_max_R1, tile.neg_max_R1, nl.minimum)
        step.rescale_R1 = nl.ndarray((P, 1), dtype=nl.float32)
        # exactly 1 where the max does not change
        nisa.activation(dst=step.rescale_R1, op=nl.exp, data=tile.neg_max_R1, bias=step.neg_max_R1, scale=-1.0)
    tile.neg_max_R1 = step.neg_max_R1


def exponentials(step, span, prompt):
    """Weights of a span and their sum; those of the first tiles of a step are transposed by DMA."""
    if span >= len(step.spans):
        return
    start, stop, end = step.spans[span]
    kv = step.chunk.kv
    if span == 0:
        step.weights_RTP = nl.ndarray((P, step.spans[len(step.spans) - 1][1], PAGE), dtype=kv.dtype)
        step.weights_PTR = nl.ndarray((PAGE, step.tiles, P), dtype=kv.dtype)
    sum_R1 = nl.ndarray((P, 1), dtype=nl.float32)
    nisa.activation(
        dst=step.weights_RTP[:, start:stop, :],
        op=nl.exp,
        data=step.masked_RW[:, start * PAGE : stop * PAGE],
        bias=step.neg_max_R1,
        scale=kv.dim**-0.5,
        reduce_op=nl.add,
        reduce_res=sum_R1,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    step.sums.append(sum_R1)
    last = min(end, transposed_by_dma(step))
    if last > start:
        nisa.dma_transpose(dst=step.weights_PTR[:, start:last, :], src=step.weights_RTP[:, start:last, :])


def transposed_by_dma(step):
    """The number of a step's weight tiles that DMA transposes, from the first on."""
    return step.tiles - step.tiles // TRANSPOSED_ON_PE_IN


def transpose_rest(step, prompt):
    """Transpose the last weight tiles of the step on the Tensor Engine."""
    span = (transposed_by_dma(step), step.tiles)
    transpose_on_pe(step.weights_PTR, step.weights_RTP.permute((0, 2, 1)), span, (nisa.engine.scalar,))


def multiply(step, subchunk, prompt):
    """Accumulate a subchunk's weighted values, key tile by key tile."""
    if subchunk == 0:
        step.part_psum_RD = nl.ndarray((P, step.chunk.kv.dim), dtype=nl.float32, buffer=nl.psum)
    for t in range(subchunk * SUBCHUNK, min((subchunk + 1) * SUBCHUNK, step.tiles)):
        nisa.nc_matmul(
            dst=step.part_psum_RD,
            stationary=step.weights_PTR[:, t, :],
            moving=step.chunk.values_PTD[:, t, :],
            accumulate=t > 0,
        )


def accumulate_chunk(step, prompt):
    """Rescale the tile's sum and values and add the step's; after the tile's last step normalize and store."""
    tile, values_RD = step.tile, nl.ndarray(step.part_psum_RD.shape, dtype=nl.float32)
    total_R1 = step.sums[0]
    if absent(step.rescale_R1):
        nisa.tensor_copy(dst=values_RD, src=step.part_psum_RD, engine=nisa.engine.scalar)
    else:
        total_R1 = rowwise_op(rowwise_op(tile.total_R1, step.rescale_R1, nl.multiply), step.sums[0], nl.add)
        rescaled_RD = nl.ndarray(values_RD.shape, dtype=nl.float32)
        scale_rows(rescaled_RD, tile.values_RD, step.rescale_R1)
        nisa.tensor_tensor(dst=values_RD, data1=rescaled_RD, data2=step.part_psum_RD, op=nl.add)
    for i in range(1, len(step.sums)):
        total_R1 = rowwise_op(total_R1, step.sums[i], nl.add)
    tile.total_R1 = total_R1
    tile.values_RD = values_RD
    if step.last:
        inverse_R1, out_RD = nl.ndarray((P, 1), dtype=nl.float32), nl.ndarray(values_RD.shape, prompt.out_HCD.dtype)
        nisa.reciprocal(dst=inverse_R1, data=total_R1)
        scale_rows(out_RD, values_RD, inverse_R1)
        nisa.dma_copy(
            dst=prompt.out_HCD[tile.head, tile.row : tile.row + P, :], src=out_RD, dge_mode=nisa.dge_mode.none
        )
