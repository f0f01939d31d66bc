"""Merge the samples of all shards and accept drafts: the end of a speculative step.

sampled[b, n] = the id of the largest value over shards, the smallest id of equals
count[b] = 1 + min(limit[b], number of leading n with drafts[b, n] == sampled[b, n])
accepted[b, n] = sampled[b, n] for n < count[b], else -1;  next = sampled[b, count - 1];  position += count

M <= 128 shards, B sequences, N = k + 1 rows. Without drafts (N = 1) it merges the shards' samples of a draft pass.

Layouts: values (M, B, N) fp32 and ids (M, B, N) int32 in ascending order of ids, drafts (B, N - 1), positions and
limits (B, 1) int32, drafts and limits None for N = 1; accepted (B, N), counts, next ids and next positions (B, 1)
int32. A second core idles.
Cost: a few kilobytes, latency-bound (roofline.accept). Launched by every step.
"""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.checks import FP32, INT32, check, check_rank, launcher, refuse
from nki_kernels.sampling.argmax import argmax
from nki_kernels.tiles import P, absent, dma_static, this_core


def load_on_one_partition(source, shape):
    """A small HBM tensor on one partition, as fp32 of the given shape (1, B, columns)."""
    count = shape[1] * shape[2]
    loaded, numbers = nl.ndarray((1, count), dtype=source.dtype), nl.ndarray(shape, dtype=nl.float32)
    dma_static(loaded, source.ap([[count, 1], [1, count]], offset=0))
    nisa.tensor_copy(dst=numbers, src=loaded)
    return numbers


def transposed_columns(source, first, count):
    """Columns first to first + count of an HBM tensor (M, R), as fp32 (count, M) in PSUM."""
    shards, total = source.shape
    loaded_MR, numbers_MR = nl.ndarray((shards, count), source.dtype), nl.ndarray((shards, count), nl.float32)
    dma_static(loaded_MR, source.ap([[total, shards], [1, count]], offset=first))
    nisa.tensor_copy(dst=numbers_MR, src=loaded_MR)
    psum_RM = nl.ndarray((count, shards), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=psum_RM, data=numbers_MR)
    return psum_RM


def merge_shards(values, ids):
    """The sampled ids over all shards, from values and ids (M, R): fp32 (1, R)."""
    shards, rows = values.shape
    sampled_1R = nl.ndarray((1, rows), dtype=nl.float32)
    for first in range(0, rows, P):
        count = min(P, rows - first)
        pair_R2M = nl.ndarray((count, 2, shards), dtype=nl.float32)
        nisa.tensor_copy(dst=pair_R2M[:, 0, :], src=transposed_columns(values, first, count))
        nisa.tensor_copy(dst=pair_R2M[:, 1, :], src=transposed_columns(ids, first, count))
        id_R1 = argmax(pair_R2M[:, 0:1, :], pair_R2M[:, 1:2, :], (count, 1, shards))[1]
        id_psum_1R = nl.ndarray((1, count), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=id_psum_1R, data=id_R1)
        nisa.tensor_copy(dst=sampled_1R[:, first : first + count], src=id_psum_1R)
    return sampled_1R


def emitted_count(drafts, sampled_1BN, index_1BN, limits):
    """1 + min(limit, the number of leading drafts that match): fp32 (1, B, 1)."""
    _, batch, candidates = sampled_1BN.shape
    count_1B1, k = nl.ndarray((1, batch, 1), nl.float32), candidates - 1
    if absent(drafts):
        nisa.memset(dst=count_1B1, value=1.0)
        return count_1B1
    shape = (1, batch, k)
    drafts_1BK, matches_1BK = load_on_one_partition(drafts, shape), nl.ndarray(shape, nl.float32)
    nisa.tensor_tensor(dst=matches_1BK, data1=drafts_1BK, data2=sampled_1BN[:, :, 0:k], op=nl.equal)
    # a match counts as k, a mismatch as its index: the smallest is the first mismatch
    leading_1BK, index_1BK = nl.ndarray(shape, nl.float32), index_1BN[:, :, 0:k]
    nisa.scalar_tensor_tensor(
        dst=leading_1BK, data=matches_1BK, op0=nl.multiply, operand0=float(k), op1=nl.maximum, operand1=index_1BK
    )
    nisa.tensor_reduce(dst=count_1B1, op=nl.minimum, data=leading_1BK, axis=2)
    limit_1B1 = load_on_one_partition(limits, (1, batch, 1))
    nisa.tensor_tensor(dst=count_1B1, data1=count_1B1, data2=limit_1B1, op=nl.minimum)
    nisa.tensor_scalar(dst=count_1B1, data=count_1B1, op0=nl.add, operand0=1.0)
    return count_1B1


def emit(sampled_1BN, count_1B1, index_1BN):
    """Samples up to count, else -1, and the last sample: fp32 (1, B, N) and (1, B, 1)."""
    shape = sampled_1BN.shape
    accepted_1BN, last_1BN = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32)
    next_1B1, count_1BN = nl.ndarray(count_1B1.shape, nl.float32), count_1B1.broadcast(2, shape[2])
    nisa.tensor_tensor(dst=accepted_1BN, data1=index_1BN, data2=count_1BN, op=nl.less)
    nisa.scalar_tensor_tensor(
        dst=accepted_1BN, data=sampled_1BN, op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=accepted_1BN
    )
    nisa.tensor_scalar(dst=accepted_1BN, data=accepted_1BN, op0=nl.subtract, operand0=1.0)
    nisa.scalar_tensor_tensor(dst=last_1BN, data=index_1BN, op0=nl.add, operand0=1.0, op1=nl.equal, operand1=count_1BN)
    nisa.tensor_tensor(dst=last_1BN, data1=last_1BN, data2=sampled_1BN, op=nl.multiply)
    nisa.tensor_reduce(dst=next_1B1, op=nl.add, data=last_1BN, axis=2)
    return accepted_1BN, next_1B1


@nki.jit
def accept_drafts_kernel(values, ids, drafts, positions, limits):
    """Return accepted, counts, next ids, next positions."""
    shards, batch, candidates = values.shape
    outputs, shape, rows = [], (1, batch, candidates), batch * candidates
    for columns in (candidates, 1, 1, 1):
        outputs.append(nl.ndarray((batch, columns), dtype=nl.int32, buffer=nl.shared_hbm))
    if this_core()[0] == 0:
        index_1BN, position_1B1 = nl.ndarray(shape, dtype=nl.float32), nl.ndarray((1, batch, 1), nl.float32)
        nisa.iota(dst=index_1BN, pattern=[[0, batch], [1, candidates]], offset=0, channel_multiplier=0)
        sampled_1BN = merge_shards(values.reshape((shards, rows)), ids.reshape((shards, rows))).reshape(shape)
        count_1B1 = emitted_count(drafts, sampled_1BN, index_1BN, limits)
        accepted_1BN, next_1B1 = emit(sampled_1BN, count_1B1, index_1BN)
        first_1B1 = load_on_one_partition(positions, (1, batch, 1))
        nisa.tensor_tensor(dst=position_1B1, data1=first_1B1, data2=count_1B1, op=nl.add)
        results = (accepted_1BN, count_1B1, next_1B1, position_1B1)
        for i in range(len(results)):
            ints, columns = nl.ndarray(results[i].shape, dtype=nl.int32), outputs[i].shape[1]
            nisa.tensor_copy(dst=ints, src=results[i])
            dma_static(outputs[i].ap([[batch * columns, 1], [1, batch * columns]], offset=0), ints)
    return outputs[0], outputs[1], outputs[2], outputs[3]


def check_operands(values, ids, drafts, positions, limits):
    """Refuse operands that the kernel cannot serve."""
    shards, batch, count = check_rank("values", values, "M, B, N")
    refuse(not 1 <= shards <= P, f"there are {shards} shards, 1 to {P} can be merged: merge in two steps")
    check("values", values, (shards, batch, count), FP32)
    check("ids", ids, (shards, batch, count), INT32)
    check("positions", positions, (batch, 1), INT32)
    if count > 1:
        missing = f"drafts are missing for N = {count} rows, None goes with N = 1: pass (B, {count - 1}) drafts"
        refuse(drafts is None, missing)
        check("drafts", drafts, (batch, count - 1), INT32)
        check("limits", limits, (batch, 1), INT32)
        refuse(np.asarray(limits).min() < 0, "a limit is negative, 0 or more drafts may be accepted: pass 0 for none")


accept_drafts = launcher(accept_drafts_kernel, check_operands)
