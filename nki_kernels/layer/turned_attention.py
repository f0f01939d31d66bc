"""Attention of few rows with the slots on the partitions: scores, softmax and weighted values of 1024 keys at a time.

decode_attention uses it, always: a layer of a step with `--kernels nki`, up to 128 rows. A prompt, and a launch with
pages, ancestors or lse, use attention/verify.py, whose rows lie on the partitions. Here few rows are few columns, and
the result leaves as the output projection reads it. The two agree within rounding, not in their bits.

out^T = V^T w^T / sum w,  w^T = exp(K q^T / sqrt(D) - max)

Keys and values are the stationary operands and the rows move: few rows are a few columns, weights leave as the values
need them, and the result as the output projection needs it. A chunk is cut in two halves of T runs of four slots; run p
of both is on partition p: slot (h T + p) 4 + j of a chunk is in tile 4 h + j. A row's maximum and its sum cross the
partitions by a turn and by a product with ones.
Law of bits: every sum runs over the slots of a chunk in one order, and over the chunks in order; the weights of slots
that a row may not see are zero.
"""

import math

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.rows import RUN, row_limits
from nki_kernels.layer.turned_blocks import HALVES
from nki_kernels.tiles import LOWEST, P, absent


class Softmax(nl.NKIObject):
    """The state of a pack of R rows from chunk to chunk, on all partitions, fp32 (128, R)."""

    def __init__(self, limit_PR):
        # the last slot that a row may see
        self.limit_PR = limit_PR
        # -max so far: on the rows' partitions (R, 1), and on all
        self.shift_R1 = None
        self.shift_PR = None
        # sum of the weights so far, and the values weighted by them, (D, R)
        self.total_PR = None
        self.values_DR = None


class Turn(nl.NKIObject):
    """A chunk under way: its pack's Softmax, and its weights from `exponentials` on."""

    def __init__(self, chunk, softmax):
        self.chunk = chunk
        self.softmax = softmax
        # which slots a row may see: uint8 (T, RUN, R)
        self.visible_TJR = visible(chunk, softmax.limit_PR)
        # weights (T, RUN, R), their sums by partition, fp32 (T, R), and the factor of the sums so far, fp32 (128, R)
        self.weights_TJR = None
        self.sums_TR = None
        self.factor_PR = None


def set_limits(chunks, positions_BN, t):
    """Load the limits of all rows, before larger transfers are asked for."""
    for chunk in chunks:
        if chunk.index == 0:
            chunk.pack.limit_R1 = row_limits(positions_BN, t, chunk.pack, False)


def begin(chunk, softmax):
    """Set the slots that a chunk's rows may see; `softmax` is that of the chunk before it."""
    if chunk.index == 0:
        softmax = Softmax(kept(spread(chunk.pack.limit_R1)))
    return Turn(chunk, softmax)


def attend(launch, chunks, first, handed):
    """All chunks, the first of which has begun; each one's values are weighed behind the next one's scores."""
    turn, waiting, queries, attended_DHBN = first, None, handed.queries(), handed.attended()
    for i in range(len(chunks)):
        group = chunks[i].pack.group - launch.cache.first
        chunks[i].pack.queries = queries[group : group + chunks[i].pack.count]
        following = None
        if i + 1 < len(chunks):
            launch.cache.fetch_keys(i + 2)
            following = begin(chunks[i + 1], turn.softmax)
        launch.cache.fetch_values(turn.chunk)
        exponentials(turn, scores(turn.chunk, launch), launch)
        if i + 1 < len(chunks):
            launch.cache.turn_keys(i + 2)
        if i > 0:
            weigh(waiting, launch, attended_DHBN)
        turn, waiting = following, turn
    launch.cache.append_keys()
    weigh(waiting, launch, attended_DHBN)


def spread(column_R1):
    """One number per row on all partitions: PSUM fp32 (128, R)."""
    psum_PR = nl.ndarray((P, column_R1.shape[0]), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=psum_PR, data=column_R1.broadcast(1, P))
    return psum_PR


def kept(psum_PR):
    """A copy in SBUF."""
    copy_PR = nl.ndarray(psum_PR.shape, dtype=nl.float32)
    nisa.tensor_copy(dst=copy_PR, src=psum_PR)
    return copy_PR


def scores(chunk, launch):
    """Products of each group's keys, the new ones over the stale ones, with its own rows: PSUM (T, RUN, R)."""
    t, pack = launch.t, chunk.pack
    launch.cache.merge(chunk)
    slots = math.ceil(chunk.size / RUN)
    # a power of two, so that no key tile crosses the border of a PSUM bank
    room = 2 ** math.ceil(math.log2(pack.count * t.queries))
    scores_psum_TJR = nl.ndarray((slots, RUN, room), dtype=nl.float32, buffer=nl.psum)
    for i in range(pack.count):
        rows = slice(i * t.queries, (i + 1) * t.queries)
        keys_DW = chunk.keys_DGW[:, i, chunk.margin : chunk.margin + slots * RUN]
        keys_DHTJ = keys_DW.reshape((t.dim, HALVES, slots, RUN // HALVES))
        for j in range(RUN):
            nisa.nc_matmul(
                dst=scores_psum_TJR[:, j, rows],
                stationary=keys_DHTJ[:, j // (RUN // HALVES), :, j % (RUN // HALVES)],
                moving=pack.queries[i],
                accumulate=False,
            )
    return scores_psum_TJR[:, :, 0 : pack.count * t.queries]


def visible(chunk, limit_PR):
    """Whether a row may see a slot: uint8 (T, RUN, R)."""
    shape = (math.ceil(chunk.size / RUN), RUN, limit_PR.shape[1])
    slot_TJ1, visible_TJR = nl.ndarray((shape[0], RUN, 1), dtype=nl.float32), nl.ndarray(shape, dtype=nl.uint8)
    each = RUN // HALVES
    nisa.iota(dst=slot_TJ1, pattern=[[each * shape[0], HALVES], [1, each]], offset=chunk.start, channel_multiplier=each)
    limit_TJR = limit_PR[0 : shape[0]].expand_dim(1).broadcast(1, RUN)
    nisa.tensor_tensor(dst=visible_TJR, data1=limit_TJR, data2=slot_TJ1.broadcast(2, shape[2]), op=nl.greater_equal)
    return visible_TJR


def exponentials(turn, scores_psum_TJR, launch):
    """Hide the slots that a row may not see, raise its maximum, and exponentiate."""
    softmax, scale, shape = turn.softmax, launch.t.dim**-0.5, scores_psum_TJR.shape
    slots, rows = shape[0], shape[2]
    masked_TJR, top_TR = nl.ndarray(shape, dtype=nl.float32), nl.ndarray((slots, rows), dtype=nl.float32)
    nisa.select_reduce(dst=masked_TJR, predicate=turn.visible_TJR, on_true=scores_psum_TJR, on_false=LOWEST)
    nisa.tensor_reduce(dst=top_TR, op=nl.maximum, data=masked_TJR.permute((0, 2, 1)), axis=2)
    before_PR, shift_psum_PR = softmax.shift_PR, raised_shift(softmax, top_TR)
    shift_TJR = shift_psum_PR[0:slots].expand_dim(1).broadcast(1, RUN)
    nisa.tensor_tensor(dst=masked_TJR, data1=masked_TJR, data2=shift_TJR, op=nl.add)
    turn.weights_TJR = nl.ndarray(shape, dtype=launch.cache.dtype)
    turn.sums_TR = nl.ndarray((slots, rows), dtype=nl.float32)
    nisa.activation(dst=turn.weights_TJR, op=nl.exp, data=masked_TJR, scale=scale)
    nisa.tensor_reduce(dst=turn.sums_TR, op=nl.add, data=turn.weights_TJR.permute((0, 2, 1)), axis=2)
    if not turn.chunk.last:
        softmax.shift_PR = kept(shift_psum_PR)
    if turn.chunk.index > 0:
        turn.factor_PR = nl.ndarray((P, rows), dtype=nl.float32)
        nisa.tensor_tensor(dst=turn.factor_PR, data1=shift_psum_PR, data2=before_PR, op=nl.subtract)
        nisa.activation(dst=turn.factor_PR, op=nl.exp, data=turn.factor_PR, scale=scale)


def raised_shift(softmax, top_TR):
    """-max of each row after a chunk whose maxima by partition are `top_TR`, on all partitions: PSUM (128, R)."""
    slots, rows = top_TR.shape
    psum_RT, shift_R1 = nl.ndarray((rows, slots), nl.float32, buffer=nl.psum), nl.ndarray((rows, 1), nl.float32)
    nisa.nc_transpose(dst=psum_RT, data=top_TR)
    nisa.tensor_reduce(dst=shift_R1, op=nl.maximum, data=psum_RT, axis=1, negate=True)
    if not absent(softmax.shift_R1):
        nisa.tensor_tensor(dst=shift_R1, data1=shift_R1, data2=softmax.shift_R1, op=nl.minimum)
    softmax.shift_R1 = shift_R1
    return spread(shift_R1)


def weigh(turn, launch, attended_DHBN):
    """Add a chunk's weighted values and its sum of weights to the pack's; after the last chunk divide."""
    t, chunk, softmax, pack = launch.t, turn.chunk, turn.softmax, turn.chunk.pack
    slots, rows = turn.sums_TR.shape
    each = RUN // HALVES
    part_psum_DR = nl.ndarray((t.dim, rows), dtype=nl.float32, buffer=nl.psum)
    sum_psum_PR = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.psum)
    ones_TP = nl.ndarray((slots, P), dtype=nl.float32)
    nisa.memset(dst=ones_TP, value=1.0)
    for i in range(pack.count):
        own = slice(i * t.queries, (i + 1) * t.queries)
        for j in range(RUN):
            if i == pack.count - 1 and j == RUN // 2:
                # late enough that no product waits for the sums, early enough that their inverse does not come last
                nisa.nc_matmul(dst=sum_psum_PR, stationary=ones_TP, moving=turn.sums_TR, accumulate=False)
            nisa.nc_matmul(
                dst=part_psum_DR[:, own],
                stationary=chunk.values[i * HALVES + j // each][:, j % each, :],
                moving=turn.weights_TJR[:, j, own],
                accumulate=j > 0,
            )
    total_PR, whole_DR = sum_psum_PR, part_psum_DR
    if chunk.index > 0 or not chunk.last:
        total_PR = grown(softmax.total_PR, sum_psum_PR, turn.factor_PR)
        whole_DR = grown(softmax.values_DR, part_psum_DR, turn.factor_PR)
        softmax.total_PR = total_PR
        softmax.values_DR = whole_DR
    if chunk.last:
        inverse_PR = nl.ndarray((P, rows), dtype=nl.float32)
        nisa.reciprocal(dst=inverse_PR, data=total_PR)
        for i in range(pack.count):
            divide(attended_DHBN, whole_DR, inverse_PR, (pack.group + i - launch.cache.first, i), t)


def grown(so_far_PR, part_psum_PR, factor_PR):
    """A running sum after one more part, shrunk as the maximum rose."""
    sum_PR = nl.ndarray(part_psum_PR.shape, dtype=nl.float32)
    if absent(so_far_PR):
        nisa.tensor_copy(dst=sum_PR, src=part_psum_PR)
    else:
        nisa.tensor_tensor(dst=sum_PR, data1=so_far_PR, data2=factor_PR, op=nl.multiply)
        nisa.tensor_tensor(dst=sum_PR, data1=sum_PR, data2=part_psum_PR, op=nl.add)
    return sum_PR


def divide(attended_DHBN, values_DR, inverse_PR, which, t):
    """The result of one group, (its number on this core, its place in the pack), where its heads belong."""
    heads = t.queries // t.candidates
    sequence, head = which[0] // t.kv_heads, which[0] % t.kv_heads * heads
    own = slice(which[1] * t.queries, (which[1] + 1) * t.queries)
    nisa.tensor_tensor(
        dst=attended_DHBN[:, head : head + heads, sequence, :],
        data1=values_DR[:, own].reshape((t.dim, heads, t.candidates)),
        data2=inverse_PR[:, own].reshape((t.dim, heads, t.candidates)),
        op=nl.multiply,
    )
