"""Attention of few rows with keys and values stationary: scores, softmax and weighted values by key groups.

out^T = V^T w^T / sum w,  w^T = exp(K q^T - max)

Queries have the factor 1 / sqrt(D). Keys are on the partitions and the rows move: few rows are few columns, weights are
laid out as the values need them, and the result as the output projection needs it. Key tile 4 g + j has positions
512 g + 4 p + j on partition p. The row max is reduced across partitions by a transpose, the row sum by matmuls with
ones. A key group is 4096 keys (fp32: 2048), aligned to absolute position: its max includes all its visible keys, its
values and weights accumulate in PSUM over its key tiles in ascending order. Groups are rescaled and added in order;
masked keys have weight zero.
Used by decode_attention, decode_layers and verify_attention.
"""

import math

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.paged_kv import HALVES, RUN, TILE_RUN
from nki_kernels.limits import CHUNK
from nki_kernels.tiles import LOWEST, P, absent


def begin_pack(chunk):
    """Start the softmax of a pack with its first chunk."""
    chunk.key_group.softmax.limit_PR = copy_to_sbuf(broadcast_to_partitions(chunk.key_group.pack.limit_R1))


def begin(chunk):
    """Compute a chunk's mask."""
    softmax = chunk.key_group.softmax
    if absent(softmax.limit_PR):
        begin_pack(chunk)
    chunk.visible_PJR = visible(chunk, softmax.limit_PR)


def attend(kv, queries, new, out):
    """Run all chunks (`begin` has run on the first); a key group's values are multiplied while the next one is scored.

    queries are transposed: for each group of this core a list of (D, H / G, N), one per tile of D. `new` are rows that
    are not in the pages yet, or None; `out` stores the output of each pack.
    """
    chunks, count = kv.chunks, len(kv.chunks)
    for i in range(count + 1):
        step = kv.steps[i]
        if i + 1 < count:
            kv.prefetch_keys(i + 2)
            begin(chunks[i + 1])
        kv.prefetch_values(i + 1)
        if i < count:
            score(step.chunk, scores(step.chunk, kv, queries, new))
            if step.chunk.is_last():
                exponentials(step.chunk.key_group, kv)
            kv.transpose_keys(i + 2)
        elif not absent(new):
            new.append_keys(kv.kv.keys)
        if step.parts[0] < step.parts[1]:
            multiply(step.before, step.parts, kv, out)


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


def visible(chunk, limit_PR):
    """Whether a row attends a key: uint8 (128, RUN, R)."""
    shape = (P, RUN, limit_PR.shape[1])
    position_PJ1, visible_PJR = nl.ndarray((P, RUN, 1), dtype=nl.float32), nl.ndarray(shape, dtype=nl.uint8)
    pattern = [[TILE_RUN * P, HALVES], [1, TILE_RUN]]
    nisa.iota(dst=position_PJ1, pattern=pattern, offset=chunk.start, channel_multiplier=TILE_RUN)
    limit_PJR = limit_PR.expand_dim(1).broadcast(1, RUN)
    nisa.tensor_tensor(dst=visible_PJR, data1=limit_PJR, data2=position_PJ1.broadcast(2, shape[2]), op=nl.greater_equal)
    return visible_PJR


def scores(chunk, kv, queries, new):
    """Scores of each group's keys, the new ones over the stale ones, with its rows: PSUM (128, RUN, R)."""
    t, pack, part = kv.t, chunk.key_group.pack, min(kv.t.dim, P)
    if not absent(new):
        new.overlay_keys(chunk)
    # a power of two, so that no key tile crosses a PSUM bank
    padded = 2 ** math.ceil(math.log2(pack.count * t.queries))
    psum_PJR = nl.ndarray((P, RUN, padded), dtype=nl.float32, buffer=nl.psum)
    for i in range(pack.count):
        rows = slice(i * t.queries, (i + 1) * t.queries)
        for j in range(RUN):
            for d in range(kv.tiles):
                keys_DW = chunk.keys_DGW[d][:, i, kv.margin : kv.margin + CHUNK]
                keys_DHPJ = keys_DW.reshape((part, HALVES, P, TILE_RUN))
                nisa.nc_matmul(
                    dst=psum_PJR[:, j, rows],
                    stationary=keys_DHPJ[:, j // TILE_RUN, :, j % TILE_RUN],
                    moving=queries[pack.group + i - kv.plan.group][d],
                    accumulate=d > 0,
                )
    return psum_PJR[:, :, 0 : pack.count * t.queries]


def score(chunk, scores_psum_PJR):
    """Mask the scores, and update the largest of each partition in the key group."""
    key_group, shape = chunk.key_group, scores_psum_PJR.shape
    max_PR = nl.ndarray((P, shape[2]), dtype=nl.float32)
    chunk.masked_PJR = nl.ndarray(shape, dtype=nl.float32)
    nisa.select_reduce(dst=chunk.masked_PJR, predicate=chunk.visible_PJR, on_true=scores_psum_PJR, on_false=LOWEST)
    nisa.tensor_reduce(dst=max_PR, op=nl.maximum, data=chunk.masked_PJR.permute((0, 2, 1)), axis=2)
    if not absent(key_group.max_PR):
        nisa.tensor_tensor(dst=max_PR, data1=max_PR, data2=key_group.max_PR, op=nl.maximum)
    key_group.max_PR = max_PR


def exponentials(key_group, kv):
    """Update the row max after a key group, and exponentiate its scores."""
    softmax = key_group.softmax
    before_PR, neg_max_psum_PR = softmax.neg_max_PR, update_neg_max(softmax, key_group.max_PR)
    neg_max_PJR = neg_max_psum_PR.expand_dim(1).broadcast(1, RUN)
    for chunk in key_group.chunks:
        masked_PJR = chunk.masked_PJR
        nisa.tensor_tensor(dst=masked_PJR, data1=masked_PJR, data2=neg_max_PJR, op=nl.add)
        chunk.weights_PJR = nl.ndarray(masked_PJR.shape, dtype=kv.dtype)
        nisa.activation(dst=chunk.weights_PJR, op=nl.exp, data=masked_PJR)
    if not key_group.last:
        softmax.neg_max_PR = copy_to_sbuf(neg_max_psum_PR)
    if key_group.index > 0:
        key_group.rescale_PR = nl.ndarray(key_group.max_PR.shape, dtype=nl.float32)
        nisa.tensor_tensor(dst=key_group.rescale_PR, data1=neg_max_psum_PR, data2=before_PR, op=nl.subtract)
        nisa.activation(dst=key_group.rescale_PR, op=nl.exp, data=key_group.rescale_PR)


def update_neg_max(softmax, max_PR):
    """-max of each row after a key group with these maxima by partition, on all partitions: PSUM (128, R)."""
    slots, rows = max_PR.shape
    psum_RP, neg_max_R1 = nl.ndarray((rows, slots), nl.float32, buffer=nl.psum), nl.ndarray((rows, 1), nl.float32)
    nisa.nc_transpose(dst=psum_RP, data=max_PR)
    nisa.tensor_reduce(dst=neg_max_R1, op=nl.maximum, data=psum_RP, axis=1, negate=True)
    if not absent(softmax.neg_max_R1):
        nisa.tensor_tensor(dst=neg_max_R1, data1=neg_max_R1, data2=softmax.neg_max_R1, op=nl.minimum)
    softmax.neg_max_R1 = neg_max_R1
    return broadcast_to_partitions(neg_max_R1)


def multiply(key_group, parts, kv, out):
    """Accumulate the parts parts[0] to parts[1] of a key group's weighted values; after the last one join the group."""
    t, pack, part, chunks = kv.t, key_group.pack, min(kv.t.dim, P), len(key_group.chunks)
    rows = pack.count * t.queries
    if parts[0] == 0:
        key_group.sum_psum_PR = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.psum)
        for _ in range(kv.tiles):
            key_group.part_psum_DR.append(nl.ndarray((part, rows), dtype=nl.float32, buffer=nl.psum))
    for number in range(parts[0], parts[1]):
        i, c = number // chunks, number % chunks
        group, weights_PJR = slice(i * t.queries, (i + 1) * t.queries), key_group.chunks[c].weights_PJR
        if i == 0:
            # early enough that the reciprocal of the sums does not come last
            add_weights(key_group.sum_psum_PR, weights_PJR, kv.plan.ones_PP, c == 0)
        for d in range(kv.tiles):
            for j in range(RUN):
                nisa.nc_matmul(
                    dst=key_group.part_psum_DR[d][:, group],
                    stationary=key_group.values[number * HALVES + j // TILE_RUN][:, j % TILE_RUN, d * P : d * P + part],
                    moving=weights_PJR[:, j, group],
                    accumulate=c > 0 or j > 0,
                )
    if parts[1] == key_group.parts():
        join(key_group, out)


def add_weights(sum_psum_PR, weights_PJR, ones_PP, is_first):
    """Add a chunk's weights to the sums of weights, the same on all partitions."""
    for j in range(RUN):
        nisa.nc_matmul(
            dst=sum_psum_PR, stationary=ones_PP, moving=weights_PJR[:, j, :], accumulate=not is_first or j > 0
        )


def join(key_group, out):
    """Rescale the sums of earlier key groups and add this one's; after the last one normalize."""
    softmax, total_PR, values_DR = key_group.softmax, key_group.sum_psum_PR, key_group.part_psum_DR
    if key_group.index > 0 or not key_group.last:
        total_PR = rescale_and_add(softmax.total_PR, total_PR, key_group.rescale_PR)
        for d in range(len(values_DR)):
            before_DR = None
            if key_group.index > 0:
                before_DR = softmax.values_DR[d]
            values_DR[d] = rescale_and_add(before_DR, values_DR[d], key_group.rescale_PR)
        softmax.total_PR = total_PR
        softmax.values_DR = values_DR
    if key_group.last:
        inverse_PR = nl.ndarray(total_PR.shape, dtype=nl.float32)
        nisa.reciprocal(dst=inverse_PR, data=total_PR)
        out.store(key_group.pack, values_DR, inverse_PR)


def rescale_and_add(so_far_PR, part_psum_PR, rescale_PR):
    """A running sum after one more key group: so_far * rescale + part, on the partitions of the part."""
    if absent(so_far_PR):
        return copy_to_sbuf(part_psum_PR)
    sum_PR = nl.ndarray(part_psum_PR.shape, dtype=nl.float32)
    rescale = rescale_PR[0 : part_psum_PR.shape[0], :]
    nisa.tensor_tensor(dst=sum_PR, data1=so_far_PR, data2=rescale, op=nl.multiply)
    nisa.tensor_tensor(dst=sum_PR, data1=sum_PR, data2=part_psum_PR, op=nl.add)
    return sum_PR
