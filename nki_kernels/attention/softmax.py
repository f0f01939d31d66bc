"""One chunk of verification attention: scores, softmax and weighted values of 1024 keys for a pack of rows.

Stages take a chunk and the launch (state.py); the order in which they run is in pipeline.py.
"""

import math

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.rows import HALF, RUN
from nki_kernels.tiles import BANK, P, absent, move


def scores(chunk, launch):
    """Products of every row with its own group's keys: PSUM (R, W).

    The groups go last to first, each over all rows up to its own: later ones overwrite the rows that are not theirs.
    """
    t, pack = launch.t, chunk.pack
    count, width = pack.count, math.ceil(chunk.size / RUN) * RUN
    chunk.scores_psum_RW = nl.ndarray((count * t.queries, width), dtype=nl.float32, buffer=nl.psum)
    for start in range(0, width, BANK):
        stop = min(start + BANK, width)
        for back in range(count):
            i = count - 1 - back
            rows = (i + 1) * t.queries
            nisa.nc_matmul(
                dst=chunk.scores_psum_RW[0:rows, start:stop],
                stationary=pack.q_DR[:, 0:rows],
                moving=chunk.keys_DGW[:, i, chunk.margin + start : chunk.margin + stop],
                accumulate=False,
            )


def hide(masked_RW, chunk, t, top_R1):
    """Lower the scores of candidates that are not ancestors, and take the maximum again."""
    pack, n, whole = chunk.pack, t.candidates, masked_RW.shape[1]
    rows, width = masked_RW.shape[0], whole - 2 * n
    # candidates outside of this chunk fall into the margins
    nisa.memset(dst=masked_RW[:, 0:n], value=0.0)
    nisa.memset(dst=masked_RW[:, n + width : whole], value=0.0)
    for i in range(pack.count):
        sequence = (pack.group + i) // t.kv_heads
        column = pack.columns_1CB[0:1, chunk.index, sequence : sequence + 1]
        candidates_RN = masked_RW.ap([[whole, rows], [1, n]], offset=0, scalar_offset=column, indirect_dim=1)
        nisa.tensor_tensor(dst=candidates_RN, data1=candidates_RN, data2=pack.hidden_RGN[:, i, :], op=nl.add)
    nisa.tensor_reduce(dst=top_R1, op=nl.maximum, data=masked_RW[:, n : n + width], axis=1)


def mask(chunk, t):
    """Hide the slots that a row may not see: scores (R, margin + W + margin), and one or two maxima (R, 1)."""
    pack, margin = chunk.pack, 0
    rows, width = chunk.scores_psum_RW.shape
    if not absent(pack.hidden_RGN):
        margin = t.candidates
    masked_RW, tops, span = nl.ndarray((rows, width + 2 * margin), dtype=nl.float32), [], BANK
    if rows > P // 2:
        # the Vector Engine is the bound: fewer instructions rather than an early start
        span = width
    for start in range(0, width, span):
        stop, top_R1 = min(start + span, width), nl.ndarray((rows, 1), dtype=nl.float32)
        nisa.range_select(
            dst=masked_RW[:, margin + start : margin + stop],
            on_true_tile=chunk.scores_psum_RW[:, start:stop],
            comp_op0=nl.greater_equal,
            comp_op1=nl.less_equal,
            bound0=pack.zero_R1,
            bound1=pack.limit_R1,
            reduce_res=top_R1,
            range_start=chunk.start + start,
        )
        tops.append(top_R1)
    if margin:
        hide(masked_RW, chunk, t, tops[0])
        tops = [tops[0]]
    return masked_RW, tops


def raised_shift(shift_R1, tops, scale):
    """-max / sqrt(D) of a row after a chunk with these maxima, from that before it or None: fp32 (R, 1)."""
    if absent(shift_R1) and len(tops) > 1:
        # one instruction on the path of a short cache instead of two
        raised_R1 = nl.ndarray(tops[0].shape, dtype=nl.float32)
        nisa.tensor_scalar(
            dst=raised_R1, data=tops[0], op0=nl.maximum, operand0=tops[1], op1=nl.multiply, operand1=-scale
        )
        return raised_R1
    for top_R1 in tops:
        raised_R1 = nl.ndarray(top_R1.shape, dtype=nl.float32)
        if absent(shift_R1):
            nisa.tensor_scalar(dst=raised_R1, data=top_R1, op0=nl.multiply, operand0=-scale)
        else:
            nisa.tensor_scalar(
                dst=raised_R1, data=top_R1, op0=nl.multiply, operand0=-scale, op1=nl.minimum, operand1=shift_R1
            )
        shift_R1 = raised_R1
    return shift_R1


def exponentials(chunk, launch):
    """Mask one chunk, raise the row's maximum, and exponentiate: weights (R, T, RUN) and their sums by half."""
    pack, scale = chunk.pack, launch.t.dim**-0.5
    rows, width = chunk.scores_psum_RW.shape
    masked_RW, tops = mask(chunk, launch.t)
    before_R1, whole = pack.shift_R1, masked_RW.shape[1]
    pack.shift_R1 = raised_shift(before_R1, tops, scale)
    chunk.weights_RTR = nl.ndarray((rows, width // RUN, RUN), dtype=launch.cache.dtype)
    for first in range(0, RUN, HALF):
        half = masked_RW.ap([[whole, rows], [RUN, width // RUN], [1, HALF]], offset=(whole - width) // 2 + first)
        sum_R1 = nl.ndarray((rows, 1), dtype=nl.float32)
        nisa.activation(
            dst=chunk.weights_RTR[:, :, first : first + HALF],
            op=nl.exp,
            data=half,
            bias=pack.shift_R1,
            scale=scale,
            reduce_op=nl.add,
            reduce_res=sum_R1,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
        chunk.sums_R1.append(sum_R1)
    if chunk.index > 0:
        chunk.factor_R1 = nl.ndarray((rows, 1), dtype=nl.float32)
        nisa.activation(dst=chunk.factor_R1, op=nl.exp, data=before_R1, bias=pack.shift_R1, scale=-1.0)


def turn(chunk, launch):
    """Weights by key tile with keys on partitions: (T, RUN, R)."""
    rows, runs, _ = chunk.weights_RTR.shape
    dtype = launch.cache.dtype
    chunk.turned_TRR = nl.ndarray((runs, RUN, rows), dtype=dtype)
    for first in range(0, RUN, HALF):
        # a power of two, so that no key tile crosses the border of a PSUM bank
        shape = (runs, HALF, 2 ** math.ceil(math.log2(rows)))
        half_psum_TRR = nl.ndarray(shape, dtype=dtype, buffer=nl.psum)
        for j in range(HALF):
            nisa.nc_transpose(dst=half_psum_TRR[:, j, 0:rows], data=chunk.weights_RTR[:, :, first + j])
        nisa.tensor_copy(dst=chunk.turned_TRR[:, first : first + HALF, :], src=half_psum_TRR[:, :, 0:rows])


def weigh_first_half(chunk, launch):
    """Values weighted by the first half of the key tiles, without `halves` by all of them: PSUM (R, groups, D).

    A row's own values are in its group's block.
    """
    shape, stop = (chunk.turned_TRR.shape[2], chunk.pack.count, launch.t.dim), RUN
    chunk.part_psum_RGD = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    if launch.t.halves:
        stop = HALF
    weigh(chunk, 0, stop)


def weigh_second_half(chunk, launch):
    """With `halves` the rest of the key tiles."""
    if launch.t.halves:
        weigh(chunk, HALF, RUN)


def weigh(chunk, start, stop):
    """Add the values weighted by the key tiles `start` to `stop`."""
    for span in chunk.spans:
        first, last = span[0], span[1]
        for j in range(start, stop):
            nisa.nc_matmul(
                dst=chunk.part_psum_RGD[:, first:last, :],
                stationary=chunk.turned_TRR[:, j, :],
                moving=chunk.values_TGRD[:, first:last, j, :],
                accumulate=j > 0,
            )


def add_sums(chunk, launch):
    """Add one chunk's sum of weights; after the last chunk scale the values so far as the result needs them."""
    pack, sum_R1 = chunk.pack, nl.ndarray(chunk.sums_R1[0].shape, dtype=nl.float32)
    nisa.tensor_tensor(dst=sum_R1, data1=chunk.sums_R1[0], data2=chunk.sums_R1[1], op=nl.add)
    if chunk.index == 0:
        pack.total_R1 = sum_R1
    else:
        total_R1 = nl.ndarray(sum_R1.shape, dtype=nl.float32)
        nisa.scalar_tensor_tensor(
            dst=total_R1, data=pack.total_R1, op0=nl.multiply, operand0=chunk.factor_R1, op1=nl.add, operand1=sum_R1
        )
        pack.total_R1 = total_R1
    if chunk.last:
        finish_sums(chunk, launch)


def finish_sums(chunk, launch):
    """1 / sum, the values so far divided by it, and lse if the launch returns it."""
    pack = chunk.pack
    pack.inverse_R1 = nl.ndarray(pack.total_R1.shape, dtype=nl.float32)
    nisa.reciprocal(dst=pack.inverse_R1, data=pack.total_R1)
    if chunk.index > 0:
        values_RGD = nl.ndarray(pack.values_RGD.shape, dtype=nl.float32)
        nisa.tensor_scalar(
            dst=values_RGD,
            data=pack.values_RGD,
            op0=nl.multiply,
            operand0=chunk.factor_R1,
            op1=nl.multiply,
            operand1=pack.inverse_R1,
        )
        pack.values_RGD = values_RGD
    if not absent(launch.lse_BHN):
        store_lse(pack, launch)


def store_lse(pack, launch):
    """max / sqrt(D) + log(sum): fp32, one per row."""
    rows = pack.count * launch.t.queries
    lse_R1 = nl.ndarray((rows, 1), dtype=nl.float32)
    nisa.activation(dst=lse_R1, op=nl.log, data=pack.total_R1)
    nisa.tensor_tensor(dst=lse_R1, data1=lse_R1, data2=pack.shift_R1, op=nl.subtract)
    move(launch.lse_BHN.ap([[1, rows], [1, 1]], offset=pack.group * launch.t.queries), lse_R1)


def add_values(chunk, launch):
    """Add one chunk's weighted values to the pack's, which shrink first; after the last chunk divide and store."""
    pack, dtype = chunk.pack, nl.float32
    if chunk.last:
        dtype = launch.out_BHND.dtype
    values_RGD = nl.ndarray(chunk.part_psum_RGD.shape, dtype=dtype)
    for span in chunk.spans:
        add_span(values_RGD[:, span[0] : span[1], :], chunk, span[0], span[1])
        if chunk.last:
            store(values_RGD, chunk, launch, span)
    pack.values_RGD = values_RGD


def add_span(values_RGD, chunk, first, last):
    """The values of some groups of a pack after one more chunk."""
    pack, part = chunk.pack, chunk.part_psum_RGD[:, first:last, :]
    if chunk.index == 0 and chunk.last:
        nisa.tensor_scalar(dst=values_RGD, data=part, op0=nl.multiply, operand0=pack.inverse_R1)
    elif chunk.index == 0:
        nisa.tensor_copy(dst=values_RGD, src=part, engine=nisa.engine.scalar)
    elif chunk.last:
        so_far = pack.values_RGD[:, first:last, :]
        nisa.scalar_tensor_tensor(
            dst=values_RGD, data=part, op0=nl.multiply, operand0=pack.inverse_R1, op1=nl.add, operand1=so_far
        )
    else:
        so_far = pack.values_RGD[:, first:last, :]
        nisa.scalar_tensor_tensor(
            dst=values_RGD, data=so_far, op0=nl.multiply, operand0=chunk.factor_R1, op1=nl.add, operand1=part
        )


def store(values_RGD, chunk, launch, span):
    """Each group's rows from its own block; transfers may start at any partition."""
    t = launch.t
    for i in range(span[0], span[1]):
        offset = (chunk.pack.group + i) * t.queries * t.dim
        own = values_RGD[i * t.queries : (i + 1) * t.queries, i, :]
        move(launch.out_BHND.ap([[t.dim, t.queries], [1, t.dim]], offset=offset), own)
