"""One chunk of verification attention: scores, softmax and weighted values of 1024 keys for a pack of rows.

Stages take a chunk and the launch (state.py); the order in which they run is in pipeline.py.
"""

import math

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.paged_kv import RUN
from nki_kernels.limits import CHUNK
from nki_kernels.tiles import BANK, P, absent, dma_static

# key tiles that are transposed and copied together
HALF = 4


def scores(chunk, launch):
    """Scores of every row with the keys of its group: PSUM (R, W).

    The groups go last to first, each over all rows up to its own; a later matmul overwrites the rows of other groups.
    """
    t, pack = launch.t, chunk.pack
    chunk.scores_psum_RW = nl.ndarray((pack.count * t.queries, CHUNK), dtype=nl.float32, buffer=nl.psum)
    for start in range(0, CHUNK, BANK):
        for back in range(pack.count):
            i = pack.count - 1 - back
            rows = (i + 1) * t.queries
            nisa.nc_matmul(
                dst=chunk.scores_psum_RW[0:rows, start : start + BANK],
                stationary=pack.q_DR[:, 0:rows],
                moving=chunk.keys_DGW[:, i, start : start + BANK],
                accumulate=False,
            )


def mask(chunk):
    """Scores (R, W), the lowest fp32 number beyond a row's limit, and one or two maxima (R, 1)."""
    pack, rows = chunk.pack, chunk.scores_psum_RW.shape[0]
    masked_RW, maxima, span = nl.ndarray((rows, CHUNK), dtype=nl.float32), [], BANK
    if rows > P // 2:
        # the Vector Engine is the bottleneck: one instruction costs less than two, though it starts later
        span = CHUNK
    for start in range(0, CHUNK, span):
        max_R1 = nl.ndarray((rows, 1), dtype=nl.float32)
        nisa.range_select(
            dst=masked_RW[:, start : start + span],
            on_true_tile=chunk.scores_psum_RW[:, start : start + span],
            comp_op0=nl.greater_equal,
            comp_op1=nl.less_equal,
            bound0=pack.zero_R1,
            bound1=pack.limit_R1,
            reduce_res=max_R1,
            range_start=chunk.start + start,
        )
        maxima.append(max_R1)
    return masked_RW, maxima


def update_neg_max(neg_max_R1, maxima, scale):
    """-max / sqrt(D) of each row after a chunk with these maxima: fp32 (R, 1); `neg_max_R1` is the previous or None."""
    if absent(neg_max_R1) and len(maxima) > 1:
        # one instruction on the critical path of a short cache instead of two
        updated_R1 = nl.ndarray(maxima[0].shape, dtype=nl.float32)
        nisa.tensor_scalar(
            dst=updated_R1, data=maxima[0], op0=nl.maximum, operand0=maxima[1], op1=nl.multiply, operand1=-scale
        )
        return updated_R1
    for max_R1 in maxima:
        updated_R1 = nl.ndarray(max_R1.shape, dtype=nl.float32)
        if absent(neg_max_R1):
            nisa.tensor_scalar(dst=updated_R1, data=max_R1, op0=nl.multiply, operand0=-scale)
        else:
            nisa.tensor_scalar(
                dst=updated_R1, data=max_R1, op0=nl.multiply, operand0=-scale, op1=nl.minimum, operand1=neg_max_R1
            )
        neg_max_R1 = updated_R1
    return neg_max_R1


def exponentials(chunk, launch):
    """Mask one chunk, update the row's max, and exponentiate: weights (R, 128, RUN) and their sums by half."""
    pack, scale = chunk.pack, launch.t.dim**-0.5
    masked_RW, maxima = mask(chunk)
    rows, before_R1 = masked_RW.shape[0], pack.neg_max_R1
    pack.neg_max_R1 = update_neg_max(before_R1, maxima, scale)
    chunk.weights_RPR = nl.ndarray((rows, P, RUN), dtype=launch.kv.dtype)
    for first in range(0, RUN, HALF):
        sum_R1 = nl.ndarray((rows, 1), dtype=nl.float32)
        nisa.activation(
            dst=chunk.weights_RPR[:, :, first : first + HALF],
            op=nl.exp,
            data=masked_RW.ap([[CHUNK, rows], [RUN, P], [1, HALF]], offset=first),
            bias=pack.neg_max_R1,
            scale=scale,
            reduce_op=nl.add,
            reduce_res=sum_R1,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
        chunk.sums_R1.append(sum_R1)
    if chunk.index > 0:
        chunk.rescale_R1 = nl.ndarray((rows, 1), dtype=nl.float32)
        nisa.activation(dst=chunk.rescale_R1, op=nl.exp, data=before_R1, bias=pack.neg_max_R1, scale=-1.0)


def transpose(chunk, launch):
    """Weights by key tile with keys on partitions: (128, RUN, R)."""
    rows, dtype = chunk.weights_RPR.shape[0], launch.kv.dtype
    chunk.weights_PRR = nl.ndarray((P, RUN, rows), dtype=dtype)
    for first in range(0, RUN, HALF):
        # a power of two, so that no key tile crosses a PSUM bank
        shape = (P, HALF, 2 ** math.ceil(math.log2(rows)))
        psum_PRR = nl.ndarray(shape, dtype=dtype, buffer=nl.psum)
        for j in range(HALF):
            nisa.nc_transpose(dst=psum_PRR[:, j, 0:rows], data=chunk.weights_RPR[:, :, first + j])
        nisa.tensor_copy(dst=chunk.weights_PRR[:, first : first + HALF, :], src=psum_PRR[:, :, 0:rows])


def multiply(chunk, launch):
    """Weighted values: PSUM (R, groups, D). A row's result is in the block of its group."""
    shape = (chunk.weights_PRR.shape[2], chunk.pack.count, launch.t.dim)
    chunk.part_psum_RGD = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    for span in chunk.spans:
        for j in range(RUN):
            nisa.nc_matmul(
                dst=chunk.part_psum_RGD[:, span[0] : span[1], :],
                stationary=chunk.weights_PRR[:, j, :],
                moving=chunk.values_PGRD[:, span[0] : span[1], j, :],
                accumulate=j > 0,
            )


def add_sums(chunk, launch):
    """Rescale and add the sum of weights; after the last chunk take 1 / sum and normalize the values so far."""
    pack, sum_R1 = chunk.pack, nl.ndarray(chunk.sums_R1[0].shape, dtype=nl.float32)
    nisa.tensor_tensor(dst=sum_R1, data1=chunk.sums_R1[0], data2=chunk.sums_R1[1], op=nl.add)
    if chunk.index == 0:
        pack.total_R1 = sum_R1
    else:
        total_R1 = nl.ndarray(sum_R1.shape, dtype=nl.float32)
        nisa.scalar_tensor_tensor(
            dst=total_R1, data=pack.total_R1, op0=nl.multiply, operand0=chunk.rescale_R1, op1=nl.add, operand1=sum_R1
        )
        pack.total_R1 = total_R1
    if not chunk.last:
        return
    pack.inverse_R1 = nl.ndarray(pack.total_R1.shape, dtype=nl.float32)
    nisa.reciprocal(dst=pack.inverse_R1, data=pack.total_R1)
    if chunk.index > 0:
        values_RGD = nl.ndarray(pack.values_RGD.shape, dtype=nl.float32)
        nisa.tensor_scalar(
            dst=values_RGD,
            data=pack.values_RGD,
            op0=nl.multiply,
            operand0=chunk.rescale_R1,
            op1=nl.multiply,
            operand1=pack.inverse_R1,
        )
        pack.values_RGD = values_RGD


def add_values(chunk, launch):
    """Rescale and add the weighted values; after the last chunk normalize and store."""
    pack, part, dtype = chunk.pack, chunk.part_psum_RGD, nl.float32
    if chunk.last:
        dtype = launch.out_BHND.dtype
    values_RGD = nl.ndarray(part.shape, dtype=dtype)
    if chunk.index == 0 and chunk.last:
        for span in chunk.spans:
            dst, data = values_RGD[:, span[0] : span[1], :], part[:, span[0] : span[1], :]
            nisa.tensor_scalar(dst=dst, data=data, op0=nl.multiply, operand0=pack.inverse_R1)
    elif chunk.index == 0:
        nisa.tensor_copy(dst=values_RGD, src=part, engine=nisa.engine.scalar)
    else:
        a, factor_R1, b = pack.values_RGD, chunk.rescale_R1, part
        if chunk.last:
            # the values so far are normalized
            a, factor_R1, b = part, pack.inverse_R1, a
        nisa.scalar_tensor_tensor(dst=values_RGD, data=a, op0=nl.multiply, operand0=factor_R1, op1=nl.add, operand1=b)
    pack.values_RGD = values_RGD
    if chunk.last:
        # each group's rows from its block; DMA may start at any partition
        t = launch.t
        for i in range(pack.count):
            offset = (pack.group + i) * t.queries * t.dim
            rows_RD = values_RGD[i * t.queries : (i + 1) * t.queries, i, :]
            dma_static(launch.out_BHND.ap([[t.dim, t.queries], [1, t.dim]], offset=offset), rows_RD)
