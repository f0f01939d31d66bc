"""The chunks of verification attention: scores, softmax and weighted values of 512 keys for a pack of rows.

`attend` runs all chunks of all packs as a software pipeline; where the keys and values come from is the
business of the cache object that it is given.
"""

import math

import nki.isa as nisa
import nki.language as nl

from nki_kernels.verify_attention_rows import (
    CHUNK,
    RUN,
    columns,
    hidden_candidates,
    move,
    row_limits,
    transposed,
)

# steps by which the keys travel ahead
AHEAD = 2


class Pack(nl.NKIObject):
    """Rows that share the engines, and what they carry from chunk to chunk: -max / sqrt(D), sum, weighted values."""

    def __init__(self, group, count):
        self.group = group
        self.count = count


class Step(nl.NKIObject):
    """One chunk of one pack."""

    def __init__(self, pack, chunk, slots):
        self.pack = pack
        self.chunk = chunk
        self.start = chunk * CHUNK
        self.size = min(CHUNK, slots - self.start)
        self.last = self.start + CHUNK >= slots


class Rows(nl.NKIObject):
    """The operands that every pack reads: queries, positions, ancestors or None, outputs, lse or None."""

    def __init__(self, q, positions, ancestors, out, lse):
        self.q = q
        self.positions = positions
        self.ancestors = ancestors
        self.out = out
        self.lse = lse


def plan(t, first, last):
    """Every chunk of every pack, in the order in which they start."""
    steps = []
    for group in range(first, last, t.pack):
        pack = Pack(group, min(t.pack, last - group))
        for chunk in range(math.ceil(t.slots / CHUNK)):
            steps.append(Step(pack, chunk, t.slots))
    return steps


def prepare(pack, rows, slots, t):
    """Load what a pack needs besides the cache: transposed queries, limits, and the hidden candidates of a tree."""
    tree = rows.ancestors != None  # noqa: E711
    pack.q = transposed(rows.q, pack.count * t.queries, t, pack.group * t.queries * t.dim)
    pack.limit = row_limits(rows.positions, t, pack, tree)
    pack.zero = nl.ndarray((pack.count * t.queries, 1), dtype=nl.float32)
    nisa.memset(dst=pack.zero, value=0.0)
    pack.hidden = None
    if tree:
        pack.hidden = hidden_candidates(rows.ancestors, t, pack)
        chunks = []
        for start in range(0, t.slots, CHUNK):
            chunks.append((start, min(CHUNK, t.slots - start)))
        pack.where = columns(slots, t, chunks)


def scores(step, t):
    """Products of every row with its own group's keys: PSUM (rows, W).

    The groups go last to first, each over all rows up to its own: later ones overwrite the rows that are not theirs.
    """
    count, width = step.pack.count, math.ceil(step.size / RUN) * RUN
    step.scores = nl.ndarray((count * t.queries, width), dtype=nl.float32, buffer=nl.psum)
    for back in range(count):
        i = count - 1 - back
        rows = (i + 1) * t.queries
        nisa.nc_matmul(dst=step.scores[0:rows, :], stationary=step.pack.q[:, 0:rows],
                       moving=step.keys[:, i, step.key : step.key + width], accumulate=False)  # fmt: skip


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


def exponentials(step, t, dtype):
    """Mask one chunk, raise the row's maximum, and exponentiate: weights (rows, W) and their sums (rows, 1)."""
    pack, scale, margin = step.pack, t.dim**-0.5, 0
    rows, width = step.scores.shape
    if pack.hidden != None:  # noqa: E711
        margin = t.candidates
    padded = nl.ndarray((rows, width + 2 * margin), dtype=nl.float32)
    masked = padded[:, margin : margin + width]
    top, shift = nl.ndarray((rows, 1), dtype=nl.float32), nl.ndarray((rows, 1), dtype=nl.float32)
    step.weights = nl.ndarray((rows, width), dtype=dtype)
    step.total = nl.ndarray((rows, 1), dtype=nl.float32)
    nisa.range_select(dst=masked, on_true_tile=step.scores, comp_op0=nl.greater_equal, comp_op1=nl.less_equal,
                      bound0=pack.zero, bound1=pack.limit, reduce_res=top, range_start=step.start)  # fmt: skip
    if margin:
        hide(padded, step, t, top)
    if step.chunk == 0:
        nisa.tensor_scalar(dst=shift, data=top, op0=nl.multiply, operand0=-scale)
    else:
        nisa.tensor_scalar(dst=shift, data=top, op0=nl.multiply, operand0=-scale, op1=nl.minimum, operand1=pack.shift)
    nisa.activation(dst=step.weights, op=nl.exp, data=masked, bias=shift, scale=scale,
                    reduce_op=nl.add, reduce_res=step.total, reduce_cmd=nisa.reduce_cmd.reset_reduce)  # fmt: skip
    if step.chunk > 0:
        step.factor = nl.ndarray((rows, 1), dtype=nl.float32)
        nisa.activation(dst=step.factor, op=nl.exp, data=pack.shift, bias=shift, scale=-1.0)
    pack.shift = shift


def turn(step):
    """Weights by key tile with keys on partitions: (W / RUN, RUN, rows)."""
    rows, per = step.weights.shape[0], step.weights.shape[1] // RUN
    in_psum = nl.ndarray((per, RUN, rows), dtype=step.weights.dtype, buffer=nl.psum)
    by_tile = step.weights.reshape((rows, per, RUN))
    for j in range(RUN):
        nisa.nc_transpose(dst=in_psum[:, j, :], data=by_tile[:, :, j])
    step.turned = nl.ndarray((per, RUN, rows), dtype=step.weights.dtype)
    nisa.tensor_copy(dst=step.turned, src=in_psum)


def weigh(step, t):
    """Weighted values, key tile after key tile: PSUM (rows, groups, D); a row's own are in its own group's block."""
    step.part = nl.ndarray((step.turned.shape[2], step.pack.count, t.dim), dtype=nl.float32, buffer=nl.psum)
    for j in range(RUN):
        nisa.nc_matmul(dst=step.part, stationary=step.turned[:, j, :], moving=step.values[:, :, j, :],
                       accumulate=j > 0)  # fmt: skip


def add_sums(step, rows, t):
    """Add one chunk's sum of weights; after the last chunk scale the values so far as the result needs them."""
    pack = step.pack
    if step.chunk == 0:
        pack.total = step.total
    else:
        total = nl.ndarray(step.total.shape, dtype=nl.float32)
        nisa.scalar_tensor_tensor(dst=total, data=pack.total, op0=nl.multiply, operand0=step.factor,
                                  op1=nl.add, operand1=step.total)  # fmt: skip
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
    if step.chunk == 0 and step.last:
        nisa.tensor_scalar(dst=values, data=step.part, op0=nl.multiply, operand0=pack.inverse)
    elif step.chunk == 0:
        nisa.tensor_copy(dst=values, src=step.part, engine=nisa.engine.scalar)
    elif step.last:
        nisa.scalar_tensor_tensor(dst=values, data=step.part, op0=nl.multiply, operand0=pack.inverse,
                                  op1=nl.add, operand1=pack.values)  # fmt: skip
    else:
        nisa.scalar_tensor_tensor(dst=values, data=pack.values, op0=nl.multiply, operand0=step.factor,
                                  op1=nl.add, operand1=step.part)  # fmt: skip
    pack.values = values
    if step.last:
        # each group's rows from its own block; transfers may start at any partition
        for i in range(pack.count):
            target = rows.out.ap([[t.dim, t.queries], [1, t.dim]], offset=(pack.group + i) * t.queries * t.dim)
            move(target, values[i * t.queries : (i + 1) * t.queries, i, :])


def warm_up():
    """Let the Scalar Engine load its table of exponentials while the first keys travel."""
    made = nl.ndarray((1, 1), dtype=nl.float32)
    nisa.memset(dst=made, value=0.0)
    nisa.activation(dst=made, op=nl.exp, data=made)


def begin(step, rows, cache, slots, t):
    """Let a step's keys travel, and before a pack's first step what the pack needs besides."""
    if step.chunk == 0:
        prepare(step.pack, rows, slots, t)
    cache.load_keys(step)


def attend(rows, cache, slots, t, steps):
    """All steps, each spread over six turns of the loop so that the engines overlap on neighbouring chunks.

    Keys travel ahead of the values of earlier chunks, so that little is left to do when the last values arrive.
    """
    count = len(steps)
    for i in range(-AHEAD, count + 3):
        if 0 <= i - 1 < count:
            exponentials(steps[i - 1], t, cache.dtype)
        if 0 <= i - 2 < count:
            turn(steps[i - 2])
        if i + AHEAD < count:
            begin(steps[i + AHEAD], rows, cache, slots, t)
        if i == -AHEAD:
            warm_up()
        if 0 <= i < count:
            scores(steps[i], t)
        if 0 <= i - 1 < count:
            cache.load_values(steps[i - 1])
        if 0 <= i - 3 < count:
            add_values(steps[i - 3], rows, t)
        if 0 <= i - 2 < count:
            weigh(steps[i - 2], t)
            add_sums(steps[i - 2], rows, t)
