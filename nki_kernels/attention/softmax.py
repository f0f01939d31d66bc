"""One chunk of verification attention: scores, softmax and weighted values of 1024 keys for a pack of rows."""

import math

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.rows import BANK, HALF, RUN, P, move


def scores(step, t):
    """Products of every row with its own group's keys: PSUM (rows, W).

    The groups go last to first, each over all rows up to its own: later ones overwrite the rows that are not theirs.
    """
    count, width = step.pack.count, math.ceil(step.size / RUN) * RUN
    step.scores = nl.ndarray((count * t.queries, width), dtype=nl.float32, buffer=nl.psum)
    for back in range(count):
        i = count - 1 - back
        rows = (i + 1) * t.queries
        for start in range(0, width, BANK):
            stop = min(start + BANK, width)
            nisa.nc_matmul(
                dst=step.scores[0:rows, start:stop],
                stationary=step.pack.q[:, 0:rows],
                moving=step.keys[:, i, step.key + start : step.key + stop],
                accumulate=False,
            )


def hide(masked, step, t, top):
    """Lower the scores of candidates that are not ancestors, and take the maximum again."""
    pack, n, whole = step.pack, t.candidates, masked.shape[1]
    rows, width = masked.shape[0], whole - 2 * n
    nisa.memset(dst=masked[:, 0:n], value=0.0)
    nisa.memset(dst=masked[:, n + width : whole], value=0.0)
    for i in range(pack.count):
        sequence = (pack.group + i) // t.kv_heads
        column = pack.where[0:1, step.chunk, sequence : sequence + 1]
        part = masked.ap([[whole, rows], [1, n]], offset=0, scalar_offset=column, indirect_dim=1)
        nisa.tensor_tensor(dst=part, data1=part, data2=pack.hidden[:, i, :], op=nl.add)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=masked[:, n : n + width], axis=1)


def mask(step, t):
    """Hide what a row may not see: scores with a margin (rows, margin + W + margin), and one or two maxima."""
    pack, margin = step.pack, 0
    rows, width = step.scores.shape
    if pack.hidden != None:  # noqa: E711
        margin = t.candidates
    padded, tops, span = nl.ndarray((rows, width + 2 * margin), dtype=nl.float32), [], BANK
    if rows > P // 2:
        # the Vector Engine is the bound: fewer instructions rather than an early start
        span = width
    for start in range(0, width, span):
        stop, top = min(start + span, width), nl.ndarray((rows, 1), dtype=nl.float32)
        nisa.range_select(dst=padded[:, margin + start : margin + stop], on_true_tile=step.scores[:, start:stop],
                          comp_op0=nl.greater_equal, comp_op1=nl.less_equal, bound0=pack.zero, bound1=pack.limit,
                          reduce_res=top, range_start=step.start + start)  # fmt: skip
        tops.append(top)
    if margin:
        hide(padded, step, t, tops[0])
        tops = [tops[0]]
    return padded, tops


def exponentials(step, t, dtype):
    """Mask one chunk, raise the row's maximum, and exponentiate: weights (rows, W) and their sums by half."""
    pack, scale = step.pack, t.dim**-0.5
    rows, width = step.scores.shape
    padded, tops = mask(step, t)
    before, whole = None, padded.shape[1]
    if step.chunk > 0:
        before = pack.shift
    shift = before
    for top in tops:
        raised = nl.ndarray((rows, 1), dtype=nl.float32)
        if shift == None:  # noqa: E711
            nisa.tensor_scalar(dst=raised, data=top, op0=nl.multiply, operand0=-scale)
        else:
            nisa.tensor_scalar(dst=raised, data=top, op0=nl.multiply, operand0=-scale, op1=nl.minimum, operand1=shift)
        shift = raised
    pack.shift = shift
    step.weights = nl.ndarray((rows, width), dtype=dtype)
    step.totals = []
    step.by_tile = step.weights.reshape((rows, width // RUN, RUN))
    for first in range(0, RUN, HALF):
        part = padded.ap([[whole, rows], [RUN, width // RUN], [1, HALF]], offset=(whole - width) // 2 + first)
        total = nl.ndarray((rows, 1), dtype=nl.float32)
        nisa.activation(dst=step.by_tile[:, :, first : first + HALF], op=nl.exp, data=part, bias=shift, scale=scale,
                        reduce_op=nl.add, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reset_reduce)  # fmt: skip
        step.totals.append(total)
    if step.chunk > 0:
        step.factor = nl.ndarray((rows, 1), dtype=nl.float32)
        nisa.activation(dst=step.factor, op=nl.exp, data=before, bias=shift, scale=-1.0)


def turn(step):
    """Weights by key tile with keys on partitions: (W / RUN, RUN, rows)."""
    rows, per = step.weights.shape[0], step.weights.shape[1] // RUN
    step.turned = nl.ndarray((per, RUN, rows), dtype=step.weights.dtype)
    for first in range(0, RUN, HALF):
        # a power of two, so that no key tile crosses the border of a PSUM bank
        shape = (per, HALF, 2 ** math.ceil(math.log2(rows)))
        in_psum = nl.ndarray(shape, dtype=step.weights.dtype, buffer=nl.psum)
        for j in range(HALF):
            nisa.nc_transpose(dst=in_psum[:, j, 0:rows], data=step.by_tile[:, :, first + j])
        nisa.tensor_copy(dst=step.turned[:, first : first + HALF, :], src=in_psum[:, :, 0:rows])


def weigh(step, tile, t):
    """Values weighted by the key tiles from `tile` on: PSUM (rows, groups, D); a row's own are in its group's block.

    Half of the tiles if `t.halves`, else all of them when `tile` is 0.
    """
    tiles = range(tile, tile + HALF)
    if not t.halves:
        tiles = range(RUN - 2 * tile)
    if tile == 0:
        step.part = nl.ndarray((step.turned.shape[2], step.pack.count, t.dim), dtype=nl.float32, buffer=nl.psum)
    for span in step.spans:
        first, last = span[0], span[1]
        for j in tiles:
            nisa.nc_matmul(dst=step.part[:, first:last, :], stationary=step.turned[:, j, :],
                           moving=step.values[:, first:last, j, :], accumulate=j > 0)  # fmt: skip


def add_sums(step, rows, t):
    """Add one chunk's sum of weights; after the last chunk scale the values so far as the result needs them."""
    pack, chunk = step.pack, nl.ndarray(step.totals[0].shape, dtype=nl.float32)
    nisa.tensor_tensor(dst=chunk, data1=step.totals[0], data2=step.totals[1], op=nl.add)
    if step.chunk == 0:
        pack.total = chunk
    else:
        total = nl.ndarray(chunk.shape, dtype=nl.float32)
        nisa.scalar_tensor_tensor(dst=total, data=pack.total, op0=nl.multiply, operand0=step.factor,
                                  op1=nl.add, operand1=chunk)  # fmt: skip
        pack.total = total
    if step.last:
        pack.inverse = nl.ndarray(pack.total.shape, dtype=nl.float32)
        nisa.reciprocal(dst=pack.inverse, data=pack.total)
        if step.chunk > 0:
            values = nl.ndarray(pack.values.shape, dtype=nl.float32)
            nisa.tensor_scalar(dst=values, data=pack.values, op0=nl.multiply, operand0=step.factor,
                               op1=nl.multiply, operand1=pack.inverse)  # fmt: skip
            pack.values = values
        if rows.lse != None:  # noqa: E711
            store_lse(pack, rows, t)


def store_lse(pack, rows, t):
    """max / sqrt(D) + log(sum): fp32, one per row."""
    count = pack.count * t.queries
    made = nl.ndarray((count, 1), dtype=nl.float32)
    nisa.activation(dst=made, op=nl.log, data=pack.total)
    nisa.tensor_tensor(dst=made, data1=made, data2=pack.shift, op=nl.subtract)
    move(rows.lse.ap([[1, count], [1, 1]], offset=pack.group * t.queries), made)


def add_values(step, rows, t):
    """Add one chunk's weighted values to the pack's, which shrink first; after the last chunk divide and store."""
    pack, dtype = step.pack, nl.float32
    if step.last:
        dtype = rows.out.dtype
    values = nl.ndarray(step.part.shape, dtype=dtype)
    for span in step.spans:
        add_span(values[:, span[0] : span[1], :], step, span[0], span[1])
        if step.last:
            store(values, step, rows, t, span)
    pack.values = values


def add_span(values, step, first, last):
    """The values of some groups of a pack after one more chunk."""
    pack, part = step.pack, step.part[:, first:last, :]
    if step.chunk == 0 and step.last:
        nisa.tensor_scalar(dst=values, data=part, op0=nl.multiply, operand0=pack.inverse)
    elif step.chunk == 0:
        nisa.tensor_copy(dst=values, src=part, engine=nisa.engine.scalar)
    elif step.last:
        nisa.scalar_tensor_tensor(dst=values, data=part, op0=nl.multiply, operand0=pack.inverse,
                                  op1=nl.add, operand1=pack.values[:, first:last, :])  # fmt: skip
    else:
        nisa.scalar_tensor_tensor(dst=values, data=pack.values[:, first:last, :], op0=nl.multiply,
                                  operand0=step.factor, op1=nl.add, operand1=part)  # fmt: skip


def store(values, step, rows, t, span):
    """Each group's rows from its own block; transfers may start at any partition."""
    for i in range(span[0], span[1]):
        target = rows.out.ap([[t.dim, t.queries], [1, t.dim]], offset=(step.pack.group + i) * t.queries * t.dim)
        move(target, values[i * t.queries : (i + 1) * t.queries, i, :])
