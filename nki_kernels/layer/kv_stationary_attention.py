"""Attention of few rows with keys and values stationary: scores, softmax and weighted values of 1024 keys at a time.

out^T = V^T w^T / sum w,  w^T = exp(K q^T / sqrt(D) - max)

Keys are on the partitions and the rows move: few rows are few columns, weights are laid out as the values need them,
and the result as the output projection needs it. A chunk has two halves of 128 runs of four positions; run p of both is
on partition p: position (h 128 + p) 4 + j of a chunk is in key tile 4 h + j. The row max is reduced across partitions
by a transpose, the row sum by a matmul with ones.
Every sum runs over the keys of a chunk in one order, and over the chunks in order; masked keys have weight zero.
Used by decode_attention and decode_layers; verify_attention has another order: they agree within rounding.
"""

import math

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.paged_kv import RUN
from nki_kernels.layer.layer_kv import HALF_RUN, HALVES
from nki_kernels.limits import CHUNK
from nki_kernels.tiles import LOWEST, P, absent


class OnlineSoftmax(nl.NKIObject):
    """The state of a pack of R rows from chunk to chunk."""

    def __init__(self, limit_PR):
        # the last position that a row attends, on all partitions: fp32 (128, R)
        self.limit_PR = limit_PR
        # -max so far: on the rows' partitions (R, 1), and on all (128, R)
        self.neg_max_R1 = None
        self.neg_max_PR = None
        # sum of the weights so far (128, R), and the weighted values (D, R)
        self.total_PR = None
        self.values_DR = None


def begin_pack(chunk):
    """Start the softmax of a pack with its first chunk."""
    chunk.softmax = OnlineSoftmax(copy_to_sbuf(broadcast_to_partitions(chunk.pack.limit_R1)))


def begin(chunk, softmax):
    """Compute a chunk's mask; `softmax` is the state of its pack after the previous chunk."""
    if chunk.index > 0:
        chunk.softmax = softmax
    elif absent(chunk.softmax):
        begin_pack(chunk)
    chunk.visible_PJR = visible(chunk, chunk.softmax.limit_PR)


def attend(kv, queries, attended_DHBN):
    """Run all chunks (`begin` has run on the first); values are multiplied after the next chunk's scores.

    queries are transposed, (D, H / G, N) per group of this core.
    """
    chunks, count = kv.chunks, len(kv.chunks)
    for i in range(count):
        if i + 1 < count:
            kv.prefetch_keys(i + 2)
            begin(chunks[i + 1], chunks[i].softmax)
        kv.prefetch_values(chunks[i])
        exponentials(chunks[i], scores(chunks[i], kv, queries), kv)
        if i + 1 < count:
            kv.transpose_keys(i + 2)
        if i > 0:
            multiply(chunks[i - 1], kv, attended_DHBN)
    kv.append(kv.kv.keys, kv.new_RGD)
    multiply(chunks[count - 1], kv, attended_DHBN)


def broadcast_to_partitions(column_R1):
    """One element per row on all partitions: PSUM fp32 (128, R)."""
    psum_PR = nl.ndarray((P, column_R1.shape[0]), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=psum_PR, data=column_R1.broadcast(1, P))
    return psum_PR


def copy_to_sbuf(psum_PR):
    """A copy in SBUF."""
    copy_PR = nl.ndarray(psum_PR.shape, dtype=nl.float32)
    nisa.tensor_copy(dst=copy_PR, src=psum_PR)
    return copy_PR


def scores(chunk, kv, queries):
    """Scores of each group's keys, the new ones over the stale ones, with its rows: PSUM (128, RUN, R)."""
    t, pack = kv.t, chunk.pack
    kv.overlay_new_keys(chunk)
    # a power of two, so that no key tile crosses a PSUM bank
    padded = 2 ** math.ceil(math.log2(pack.count * t.queries))
    psum_PJR = nl.ndarray((P, RUN, padded), dtype=nl.float32, buffer=nl.psum)
    for i in range(pack.count):
        rows = slice(i * t.queries, (i + 1) * t.queries)
        keys_DW = chunk.keys_DGW[:, i, t.candidates : t.candidates + CHUNK]
        keys_DHPJ = keys_DW.reshape((t.dim, HALVES, P, HALF_RUN))
        for j in range(RUN):
            nisa.nc_matmul(
                dst=psum_PJR[:, j, rows],
                stationary=keys_DHPJ[:, j // HALF_RUN, :, j % HALF_RUN],
                moving=queries[pack.group + i - kv.plan.group],
                accumulate=False,
            )
    return psum_PJR[:, :, 0 : pack.count * t.queries]


def visible(chunk, limit_PR):
    """Whether a row attends a key: uint8 (128, RUN, R)."""
    shape = (P, RUN, limit_PR.shape[1])
    position_PJ1, visible_PJR = nl.ndarray((P, RUN, 1), dtype=nl.float32), nl.ndarray(shape, dtype=nl.uint8)
    pattern = [[HALF_RUN * P, HALVES], [1, HALF_RUN]]
    nisa.iota(dst=position_PJ1, pattern=pattern, offset=chunk.start, channel_multiplier=HALF_RUN)
    limit_PJR = limit_PR.expand_dim(1).broadcast(1, RUN)
    nisa.tensor_tensor(dst=visible_PJR, data1=limit_PJR, data2=position_PJ1.broadcast(2, shape[2]), op=nl.greater_equal)
    return visible_PJR


def exponentials(chunk, scores_psum_PJR, kv):
    """Mask the scores, update the row max, and exponentiate."""
    softmax, scale, shape = chunk.softmax, kv.t.dim**-0.5, scores_psum_PJR.shape
    column = (P, shape[2])
    masked_PJR, max_PR = nl.ndarray(shape, dtype=nl.float32), nl.ndarray(column, dtype=nl.float32)
    nisa.select_reduce(dst=masked_PJR, predicate=chunk.visible_PJR, on_true=scores_psum_PJR, on_false=LOWEST)
    nisa.tensor_reduce(dst=max_PR, op=nl.maximum, data=masked_PJR.permute((0, 2, 1)), axis=2)
    before_PR, neg_max_psum_PR = softmax.neg_max_PR, update_neg_max(softmax, max_PR)
    neg_max_PJR = neg_max_psum_PR.expand_dim(1).broadcast(1, RUN)
    nisa.tensor_tensor(dst=masked_PJR, data1=masked_PJR, data2=neg_max_PJR, op=nl.add)
    chunk.weights_PJR = nl.ndarray(shape, dtype=kv.dtype)
    chunk.sums_PR = nl.ndarray(column, dtype=nl.float32)
    nisa.activation(dst=chunk.weights_PJR, op=nl.exp, data=masked_PJR, scale=scale)
    nisa.tensor_reduce(dst=chunk.sums_PR, op=nl.add, data=chunk.weights_PJR.permute((0, 2, 1)), axis=2)
    if not chunk.last:
        softmax.neg_max_PR = copy_to_sbuf(neg_max_psum_PR)
    if chunk.index > 0:
        chunk.rescale_PR = nl.ndarray(column, dtype=nl.float32)
        nisa.tensor_tensor(dst=chunk.rescale_PR, data1=neg_max_psum_PR, data2=before_PR, op=nl.subtract)
        nisa.activation(dst=chunk.rescale_PR, op=nl.exp, data=chunk.rescale_PR, scale=scale)


def update_neg_max(softmax, max_PR):
    """-max of each row after a chunk with these maxima by partition, on all partitions: PSUM (128, R)."""
    slots, rows = max_PR.shape
    psum_RP, neg_max_R1 = nl.ndarray((rows, slots), nl.float32, buffer=nl.psum), nl.ndarray((rows, 1), nl.float32)
    nisa.nc_transpose(dst=psum_RP, data=max_PR)
    nisa.tensor_reduce(dst=neg_max_R1, op=nl.maximum, data=psum_RP, axis=1, negate=True)
    if not absent(softmax.neg_max_R1):
        nisa.tensor_tensor(dst=neg_max_R1, data1=neg_max_R1, data2=softmax.neg_max_R1, op=nl.minimum)
    softmax.neg_max_R1 = neg_max_R1
    return broadcast_to_partitions(neg_max_R1)


def multiply(chunk, kv, attended_DHBN):
    """Rescale and add a chunk's weighted values and its sum of weights; after the last chunk normalize."""
    t, softmax, pack, rows = kv.t, chunk.softmax, chunk.pack, chunk.sums_PR.shape[1]
    part_psum_DR = nl.ndarray((t.dim, rows), dtype=nl.float32, buffer=nl.psum)
    sum_psum_PR = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.psum)
    ones_PP = nl.ndarray((P, P), dtype=nl.float32)
    nisa.memset(dst=ones_PP, value=1.0)
    for i in range(pack.count):
        group = slice(i * t.queries, (i + 1) * t.queries)
        for j in range(RUN):
            if i == pack.count - 1 and j == RUN // 2:
                # late enough that no matmul waits for the sums, early enough that their reciprocal does not come last
                nisa.nc_matmul(dst=sum_psum_PR, stationary=ones_PP, moving=chunk.sums_PR, accumulate=False)
            nisa.nc_matmul(
                dst=part_psum_DR[:, group],
                stationary=chunk.values[i * HALVES + j // HALF_RUN][:, j % HALF_RUN, :],
                moving=chunk.weights_PJR[:, j, group],
                accumulate=j > 0,
            )
    total_PR, values_DR = sum_psum_PR, part_psum_DR
    if chunk.index > 0 or not chunk.last:
        total_PR = rescale_and_add(softmax.total_PR, sum_psum_PR, chunk.rescale_PR)
        values_DR = rescale_and_add(softmax.values_DR, part_psum_DR, chunk.rescale_PR)
        softmax.total_PR = total_PR
        softmax.values_DR = values_DR
    if chunk.last:
        inverse_PR = nl.ndarray((P, rows), dtype=nl.float32)
        nisa.reciprocal(dst=inverse_PR, data=total_PR)
        for i in range(pack.count):
            normalize(attended_DHBN, values_DR, inverse_PR, (pack.group + i - kv.plan.group, i), t)


def rescale_and_add(so_far_PR, part_psum_PR, rescale_PR):
    """A running sum after one more chunk: so_far * rescale + part."""
    if absent(so_far_PR):
        return copy_to_sbuf(part_psum_PR)
    sum_PR = nl.ndarray(part_psum_PR.shape, dtype=nl.float32)
    nisa.tensor_tensor(dst=sum_PR, data1=so_far_PR, data2=rescale_PR, op=nl.multiply)
    nisa.tensor_tensor(dst=sum_PR, data1=sum_PR, data2=part_psum_PR, op=nl.add)
    return sum_PR


def normalize(attended_DHBN, values_DR, inverse_PR, which, t):
    """Store the output of one group, `which` = (number on this core, index in the pack), at its heads."""
    heads = t.queries // t.candidates
    sequence, head = which[0] // t.kv_heads, which[0] % t.kv_heads * heads
    group = slice(which[1] * t.queries, (which[1] + 1) * t.queries)
    nisa.tensor_tensor(
        dst=attended_DHBN[:, head : head + heads, sequence, :],
        data1=values_DR[:, group].reshape((t.dim, heads, t.candidates)),
        data2=inverse_PR[:, group].reshape((t.dim, heads, t.candidates)),
        op=nl.multiply,
    )
