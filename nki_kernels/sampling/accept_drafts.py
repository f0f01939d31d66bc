"""Merging the draws of all shards, and the acceptance of drafts: the end of a speculative step.

drawn[b, n] = the id of the best value over shards, the smallest among equals
count[b] = 1 + min(limit[b], number of leading n with drafts[b, n] == drawn[b, n])
accepted[b, n] = drawn[b, n] for n < count[b], else -1;  next = drawn[b, count - 1];  position += count

Layouts: values (M, B, N) fp32 and ids (M, B, N) int32 of M shards in ascending order of ids, drafts (B, N - 1),
positions and limits (B, 1) int32; accepted (B, N), counts, next ids and next positions (B, 1) int32. M <= 128.
Without drafts, N = 1, it merges the draws of one position: the draft's own. A second core has nothing to do.
Cost: a few kilobytes; latency is all.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.sampling.argmax import argmax
from nki_kernels.tiles import P, absent, dma_static, this_core


def load_on_one_partition(source, shape):
    """A small HBM tensor on one partition, as fp32 of the given shape (1, ...)."""
    count = 1
    for size in shape:
        count = count * size
    loaded, numbers = nl.ndarray((1, count), dtype=source.dtype), nl.ndarray(shape, dtype=nl.float32)
    dma_static(loaded, source.ap([[count, 1], [1, count]], offset=0))
    nisa.tensor_copy(dst=numbers, src=loaded)
    return numbers


def load_transposed(source, first, count):
    """Columns first to first + count of an HBM tensor (M, R), as fp32 (count, M) in PSUM."""
    shards, total = source.shape[0], source.shape[1]
    loaded_MR = nl.ndarray((shards, count), dtype=source.dtype)
    numbers_MR = nl.ndarray((shards, count), dtype=nl.float32)
    dma_static(loaded_MR, source.ap([[total, shards], [1, count]], offset=first))
    nisa.tensor_copy(dst=numbers_MR, src=loaded_MR)
    psum_RM = nl.ndarray((count, shards), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=psum_RM, data=numbers_MR)
    return psum_RM


def merged(values, ids, rows):
    """The drawn ids of all shards together, from (M, R) each: fp32 (1, R)."""
    drawn_1R = nl.ndarray((1, rows), dtype=nl.float32)
    for first in range(0, rows, P):
        count, shards = min(P, rows - first), values.shape[0]
        shape, pair_R2M = (count, 1, shards), nl.ndarray((count, 2, shards), dtype=nl.float32)
        nisa.tensor_copy(dst=pair_R2M[:, 0, :], src=load_transposed(values, first, count))
        nisa.tensor_copy(dst=pair_R2M[:, 1, :], src=load_transposed(ids, first, count))
        best_R1 = argmax(pair_R2M[:, 0:1, :], pair_R2M[:, 1:2, :], shape)[1]
        best_psum_1R = nl.ndarray((1, count), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=best_psum_1R, data=best_R1)
        nisa.tensor_copy(dst=drawn_1R[:, first : first + count], src=best_psum_1R)
    return drawn_1R


def emitted_count(passed_1BK, index_1BN, limits):
    """1 + min(limit, the drafts before the first that did not pass), from 1 or 0 each: fp32 (1, B, 1)."""
    batch, k = passed_1BK.shape[1], passed_1BK.shape[2]
    missed_1BK, count_1B1 = nl.ndarray((1, batch, k), nl.float32), nl.ndarray((1, batch, 1), nl.float32)
    # a draft that passed counts as k, one that did not as its index: the smallest is the first that did not
    nisa.scalar_tensor_tensor(
        dst=missed_1BK,
        data=passed_1BK,
        op0=nl.multiply,
        operand0=float(k),
        op1=nl.maximum,
        operand1=index_1BN[:, :, 0:k],
    )
    nisa.tensor_reduce(dst=count_1B1, op=nl.minimum, data=missed_1BK, axis=2)
    nisa.tensor_tensor(dst=count_1B1, data1=count_1B1, data2=load_on_one_partition(limits, (1, batch, 1)), op=nl.minimum)
    nisa.tensor_scalar(dst=count_1B1, data=count_1B1, op0=nl.add, operand0=1.0)
    return count_1B1


def indices(batch, candidates):
    """0 to N - 1 for each sequence: fp32 (1, B, N)."""
    index_1BN = nl.ndarray((1, batch, candidates), dtype=nl.float32)
    nisa.iota(dst=index_1BN, pattern=[[0, batch], [1, candidates]], offset=0, channel_multiplier=0)
    return index_1BN


def emitted(drawn_1BN, count_1B1, index_1BN):
    """Draws before count, else -1, and the last of them: fp32 (1, B, N) and (1, B, 1)."""
    shape = drawn_1BN.shape
    kept_1BN, last_1BN = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32)
    next_1B1 = nl.ndarray(count_1B1.shape, nl.float32)
    count_1BN = count_1B1.broadcast(2, shape[2])
    nisa.tensor_tensor(dst=kept_1BN, data1=index_1BN, data2=count_1BN, op=nl.less)
    nisa.scalar_tensor_tensor(
        dst=kept_1BN, data=drawn_1BN, op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=kept_1BN
    )
    nisa.tensor_scalar(dst=kept_1BN, data=kept_1BN, op0=nl.subtract, operand0=1.0)
    nisa.scalar_tensor_tensor(dst=last_1BN, data=index_1BN, op0=nl.add, operand0=1.0, op1=nl.equal, operand1=count_1BN)
    nisa.tensor_tensor(dst=last_1BN, data1=last_1BN, data2=drawn_1BN, op=nl.multiply)
    nisa.tensor_reduce(dst=next_1B1, op=nl.add, data=last_1BN, axis=2)
    return kept_1BN, next_1B1


def out(target, row):
    """An fp32 row of integers on one partition to an int32 output (B, columns)."""
    count = target.shape[0] * target.shape[1]
    whole = nl.ndarray(row.shape, dtype=nl.int32)
    nisa.tensor_copy(dst=whole, src=row)
    dma_static(target.ap([[count, 1], [1, count]], offset=0), whole)


def finish(outputs, tokens_1BN, count_1B1, index_1BN, positions):
    """Write the outputs of a step from the tokens of all rows and how many are emitted."""
    batch = tokens_1BN.shape[1]
    reached_1B1 = nl.ndarray((1, batch, 1), nl.float32)
    accepted_1BN, next_1B1 = emitted(tokens_1BN, count_1B1, index_1BN)
    nisa.tensor_tensor(dst=reached_1B1, data1=load_on_one_partition(positions, (1, batch, 1)), data2=count_1B1, op=nl.add)
    rows = (accepted_1BN, count_1B1, next_1B1, reached_1B1)
    for i in range(len(rows)):
        out(outputs[i], rows[i])


@nki.jit
def accept_drafts_kernel(values, ids, drafts, positions, limits):
    """accepted (B, N), counts (B, 1), next ids (B, 1), next positions (B, 1); drafts and limits None for N = 1."""
    shards, batch, candidates = values.shape
    outputs = []
    for columns in (candidates, 1, 1, 1):
        outputs.append(nl.ndarray((batch, columns), dtype=nl.int32, buffer=nl.shared_hbm))
    if this_core()[0] == 0:
        rows, index_1BN = batch * candidates, indices(batch, candidates)
        both, shape = (shards, rows), (1, batch, candidates)
        drawn_1BN = merged(values.reshape(both), ids.reshape(both), rows).reshape(shape)
        if not absent(drafts):
            passed_1BK = nl.ndarray((1, batch, candidates - 1), nl.float32)
            drafts_1BK = load_on_one_partition(drafts, (1, batch, candidates - 1))
            nisa.tensor_tensor(dst=passed_1BK, data1=drafts_1BK, data2=drawn_1BN[:, :, 0 : candidates - 1], op=nl.equal)
            count_1B1 = emitted_count(passed_1BK, index_1BN, limits)
        else:
            count_1B1 = nl.ndarray((1, batch, 1), nl.float32)
            nisa.memset(dst=count_1B1, value=1.0)
        finish(outputs, drawn_1BN, count_1B1, index_1BN, positions)
    return outputs[0], outputs[1], outputs[2], outputs[3]
