"""A tile of 128 query rows of one head, and its step over a chunk of keys: scores, softmax, weighted values.

R are the rows of a tile, D, U = D + 1 the columns of weighted values and the sum of weights, W the even or odd keys of
a subchunk, T its key tiles, class by class: tile 4t + j of the values is tile t of class j, and K the keys of a class.
The order of the stages is in prompt.py.
"""

import math

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.kv_prefetch import PARITIES
from nki_kernels.attention.paged_kv import PAGE, TILE_RUN
from nki_kernels.tiles import BANK, P, absent, transpose_on_pe

# key tiles of a subchunk: the scores of its even keys, and of its odd ones, fill two PSUM banks
SUBCHUNK = 16
# even and odd keys of the subchunks of a chunk
QUARTERS = 4
# one of so many tiles of bf16 weights is transposed on the Tensor Engine, the rest by DMA: balances both queues
TRANSPOSED_ON_PE_IN = 6


class QueryTile(nl.NKIObject):
    """Rows `row` to `row` + 127 of head `head`, and their online softmax from chunk to chunk."""

    def __init__(self, head, row, limit_R2):
        self.head = head
        self.row = row
        # bounds of the even and of the odd keys that each row attends: fp32 (R, 2)
        self.limit_R2 = limit_R2
        # load_query: (D, D / 128, R)
        self.q_DKR = None
        # update_neg_max: -max so far, fp32 (R, 1)
        self.neg_max_R1 = None
        # accumulate_chunk: the weighted values and the sum of weights so far, fp32 (R, U)
        self.total_RU = None


class TileStep(nl.NKIObject):
    """A query tile's step over a chunk: it attends the first `pages` * 128 positions; the tile's last step or not."""

    def __init__(self, tile, chunk, pages, last):
        self.tile = tile
        self.chunk = chunk
        self.last = last
        self.parts = []
        for first in range(0, pages, SUBCHUNK):
            self.parts.append(StepPart(first, min(pages - first, SUBCHUNK)))
        if chunk.kv.dtype != nl.float32:
            part = self.parts[len(self.parts) - 1]
            part.by_dma = max(0, part.tiles - math.ceil((part.first + part.tiles) / TRANSPOSED_ON_PE_IN))
        # score: the max of each quarter, fp32 (R, 1)
        self.maxima = []
        # update_neg_max: -max after this chunk, and from the second chunk on the rescale factor
        self.neg_max_R1 = None
        self.rescale_R1 = None
        # multiply: PSUM fp32 (R, U)
        self.part_psum_RU = None


class StepPart(nl.NKIObject):
    """A step's part in a subchunk: `pages` * 128 positions from key tile `first` of the chunk on."""

    def __init__(self, first, pages):
        self.first = first
        # keys of a class, key tiles of a class and of the part; the last one of each class may be partial
        self.keys = pages * PAGE // TILE_RUN
        self.per_class = math.ceil(pages / TILE_RUN)
        self.tiles = self.per_class * TILE_RUN
        # weight tiles that DMA transposes, from the first on
        self.by_dma = self.tiles
        # score: masked scores of even and odd keys, fp32 (R, 2, W)
        self.masked_R2W = None
        # exponentials: weights (R, T, 128), and transposed weights (128 keys, T, R)
        self.weights_RTP = None
        self.weights_PTR = None


def rowwise_op(a_R1, b_R1, op):
    """a op b for each row: fp32 (R, 1), on GpSimd, which is otherwise idle."""
    result_R1 = nl.ndarray(a_R1.shape, dtype=nl.float32)
    nisa.tensor_tensor(dst=result_R1, data1=a_R1, data2=b_R1, op=op, engine=nisa.engine.gpsimd)
    return result_R1


def scale_rows(dst_RU, values_RU, factor_R1):
    """Multiply each row by its factor, on GpSimd."""
    factor_RU = factor_R1.broadcast(1, values_RU.shape[1])
    nisa.tensor_tensor(dst=dst_RU, data1=values_RU, data2=factor_RU, op=nl.multiply, engine=nisa.engine.gpsimd)


def load_query(tile, q_HCD):
    """Load the tile's queries, transposed by DMA."""
    if absent(tile.q_DKR):
        dim = q_HCD.shape[2]
        width = min(dim, P)
        tile.q_DKR = nl.ndarray((width, dim // width, P), dtype=q_HCD.dtype)
        for k in range(dim // width):
            source_RD = q_HCD[tile.head, tile.row : tile.row + P, k * width : (k + 1) * width]
            nisa.dma_transpose(dst=tile.q_DKR[:, k, :], src=source_RD)


def score(step, quarter, prompt):
    """Masked scores with a quarter's keys; the same pass of the Vector Engine computes the max."""
    number, parity = quarter // PARITIES, quarter % PARITIES
    if number >= len(step.parts):
        return
    chunk, part, q_DKR = step.chunk, step.parts[number], step.tile.q_DKR
    start, columns = part.first * PAGE // PARITIES, part.keys * TILE_RUN // PARITIES
    chunk.transpose_until((part.first + part.tiles) // TILE_RUN)
    if parity == 0:
        part.masked_R2W = nl.ndarray((P, PARITIES, columns), dtype=nl.float32)
    psum_RW = nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.psum)
    for first in range(0, columns, BANK):
        last = min(first + BANK, columns)
        for k in range(q_DKR.shape[1]):
            nisa.nc_matmul(
                dst=psum_RW[:, first:last],
                stationary=q_DKR[:, k, :],
                moving=chunk.keys_DK2W[:, k, parity, start + first : start + last],
                accumulate=k > 0,
            )
    max_R1 = nl.ndarray((P, 1), dtype=nl.float32)
    nisa.range_select(
        dst=part.masked_R2W[:, parity, :],
        on_true_tile=psum_RW,
        comp_op0=nl.greater_equal,
        comp_op1=nl.less_equal,
        bound0=prompt.zero_R1,
        bound1=step.tile.limit_R2[:, parity : parity + 1],
        reduce_res=max_R1,
        range_start=chunk.first * PAGE // PARITIES + start,
    )
    step.maxima.append(max_R1)


def update_neg_max(step, prompt):
    """-max of the rows after this chunk, and the rescale factor of the tile's values and sum so far."""
    tile, max_R1 = step.tile, step.maxima[0]
    for i in range(1, len(step.maxima)):
        max_R1 = rowwise_op(max_R1, step.maxima[i], nl.maximum)
    step.neg_max_R1 = rowwise_op(prompt.zero_R1, max_R1, nl.subtract)
    if not absent(tile.neg_max_R1):
        step.neg_max_R1 = rowwise_op(step.neg_max_R1, tile.neg_max_R1, nl.minimum)
        step.rescale_R1 = nl.ndarray((P, 1), dtype=nl.float32)
        # exactly 1 where the max does not change
        nisa.activation(dst=step.rescale_R1, op=nl.exp, data=tile.neg_max_R1, bias=step.neg_max_R1, scale=-1.0)
    tile.neg_max_R1 = step.neg_max_R1


def exponentials(step, quarter, prompt):
    """Weights of a part by key tile, padded by zeros; most of them are transposed by DMA."""
    number = quarter // PARITIES
    if quarter % PARITIES > 0 or number >= len(step.parts):
        return
    part, dtype = step.parts[number], step.chunk.kv.dtype
    part.weights_RTP = nl.ndarray((P, part.tiles, PAGE), dtype=dtype)
    part.weights_PTR = nl.ndarray((PAGE, part.tiles, P), dtype=dtype)
    padded = part.per_class * PAGE
    # classes in the order 0, 2, 1, 3: even keys first
    weights_R22K = part.weights_RTP.reshape((P, PARITIES, TILE_RUN // PARITIES, padded))
    masked_R2K2 = part.masked_R2W.reshape((P, PARITIES, part.keys, TILE_RUN // PARITIES))
    if padded > part.keys:
        nisa.memset(dst=weights_R22K[:, :, :, part.keys : padded], value=0.0, engine=nisa.engine.gpsimd)
    nisa.activation(
        dst=weights_R22K[:, :, :, 0 : part.keys],
        op=nl.exp,
        data=masked_R2K2.permute((0, 1, 3, 2)),
        bias=step.neg_max_R1,
        scale=1.0,
    )
    if part.by_dma > 0:
        nisa.dma_transpose(dst=part.weights_PTR[:, 0 : part.by_dma, :], src=part.weights_RTP[:, 0 : part.by_dma, :])


def transpose_rest(step, prompt):
    """Transpose the other weight tiles on the Tensor Engine."""
    for part in step.parts:
        weights_RPT, span = part.weights_RTP.permute((0, 2, 1)), (part.by_dma, part.tiles)
        transpose_on_pe(part.weights_PTR, weights_RPT, span, (nisa.engine.scalar,))


def multiply(step, quarter, prompt):
    """Accumulate a quarter of the weighted values and the sum of weights, key tile by key tile."""
    number, half = quarter // PARITIES, quarter % PARITIES
    if number >= len(step.parts):
        return
    if quarter == 0:
        step.part_psum_RU = nl.ndarray((P, step.chunk.kv.dim + 1), dtype=nl.float32, buffer=nl.psum)
    part = step.parts[number]
    for t in range(half * part.per_class // 2, (half + 1) * part.per_class // 2):
        # keys beyond these are masked for all rows
        keys = min(PAGE, part.keys - t * PAGE)
        for j in range(TILE_RUN):
            tile = (j % PARITIES * PARITIES + j // PARITIES) * part.per_class + t
            nisa.nc_matmul(
                dst=step.part_psum_RU,
                stationary=part.weights_PTR[0:keys, tile, :],
                moving=step.chunk.values_PTU[0:keys, part.first + t * TILE_RUN + j, :],
                accumulate=part.first + t + j > 0,
            )


def accumulate_chunk(step, prompt):
    """Rescale the tile's values and sum and add the step's; after the tile's last step normalize and store."""
    tile, total_RU = step.tile, nl.ndarray(step.part_psum_RU.shape, dtype=nl.float32)
    if absent(step.rescale_R1):
        nisa.tensor_copy(dst=total_RU, src=step.part_psum_RU, engine=nisa.engine.scalar)
    else:
        rescaled_RU = nl.ndarray(total_RU.shape, dtype=nl.float32)
        scale_rows(rescaled_RU, tile.total_RU, step.rescale_R1)
        nisa.tensor_tensor(dst=total_RU, data1=rescaled_RU, data2=step.part_psum_RU, op=nl.add)
    tile.total_RU = total_RU
    if step.last:
        dim = step.chunk.kv.dim
        inverse_R1, out_RD = nl.ndarray((P, 1), dtype=nl.float32), nl.ndarray((P, dim), prompt.out_HCD.dtype)
        nisa.reciprocal(dst=inverse_R1, data=total_RU[:, dim : dim + 1])
        scale_rows(out_RD, total_RU[:, 0:dim], inverse_R1)
        nisa.dma_copy(
            dst=prompt.out_HCD[tile.head, tile.row : tile.row + P, :], src=out_RD, dge_mode=nisa.dge_mode.none
        )
