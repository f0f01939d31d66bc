"""Merging the draws of all shards, and the acceptance of drafts: the end of a speculative step.

drawn[b, n] = the id of the best value over shards, the smallest among equals
count[b] = 1 + min(limit[b], number of leading n with drafts[b, n] == drawn[b, n])
accepted[b, n] = drawn[b, n] for n < count[b], else -1;  next = drawn[b, count - 1];  position += count

Layouts: values (M, B, N) fp32 and ids (M, B, N) int32 of M shards in ascending order of ids, drafts (B, N - 1),
positions and limits (B, 1) int32; accepted (B, N), counts, next ids and next positions (B, 1) int32. M <= 128.
Without drafts, N = 1, it merges the draws of one position: the draft's own.
Cost: a few kilobytes; latency is all.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.sampling.best import smallest_best

P = 128


def one_row(source, shape):
    """A small HBM tensor on one partition, as fp32 of the given shape (1, ...)."""
    count = 1
    for size in shape:
        count = count * size
    loaded, made = nl.ndarray((1, count), dtype=source.dtype), nl.ndarray(shape, dtype=nl.float32)
    nisa.dma_copy(dst=loaded, src=source.ap([[count, 1], [1, count]], offset=0), dge_mode=nisa.dge_mode.none)
    nisa.tensor_copy(dst=made, src=loaded)
    return made


def turned(source, first, count):
    """Columns first to first + count of an HBM tensor (M, R), as fp32 (count, M) in PSUM."""
    shards, total = source.shape[0], source.shape[1]
    loaded, numbers = nl.ndarray((shards, count), dtype=source.dtype), nl.ndarray((shards, count), dtype=nl.float32)
    nisa.dma_copy(dst=loaded, src=source.ap([[total, shards], [1, count]], offset=first), dge_mode=nisa.dge_mode.none)
    nisa.tensor_copy(dst=numbers, src=loaded)
    made = nl.ndarray((count, shards), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=made, data=numbers)
    return made


def merged(values, ids, rows):
    """The drawn ids of all shards together, from (M, R) each: fp32 (1, R)."""
    drawn = nl.ndarray((1, rows), dtype=nl.float32)
    for first in range(0, rows, P):
        count, shards = min(P, rows - first), values.shape[0]
        shape, pair = (count, 1, shards), nl.ndarray((count, 2, shards), dtype=nl.float32)
        nisa.tensor_copy(dst=pair[:, 0, :], src=turned(values, first, count))
        nisa.tensor_copy(dst=pair[:, 1, :], src=turned(ids, first, count))
        best = smallest_best(pair[:, 0:1, :], pair[:, 1:2, :], shape)[1]
        row = nl.ndarray((1, count), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=row, data=best)
        nisa.tensor_copy(dst=drawn[:, first : first + count], src=row)
    return drawn


def emitted_count(passed, index, limits):
    """1 + min(limit, the drafts before the first that did not pass), from 1 or 0 each: fp32 (1, B, 1)."""
    batch, k = passed.shape[1], passed.shape[2]
    missed, count = nl.ndarray((1, batch, k), nl.float32), nl.ndarray((1, batch, 1), nl.float32)
    # one that passed counts as k, another as its index: the smallest is the first that did not
    nisa.scalar_tensor_tensor(
        dst=missed, data=passed, op0=nl.multiply, operand0=float(k), op1=nl.maximum, operand1=index[:, :, 0:k]
    )
    nisa.tensor_reduce(dst=count, op=nl.minimum, data=missed, axis=2)
    nisa.tensor_tensor(dst=count, data1=count, data2=one_row(limits, (1, batch, 1)), op=nl.minimum)
    nisa.tensor_scalar(dst=count, data=count, op0=nl.add, operand0=1.0)
    return count


def indices(batch, rows):
    """0 to N - 1 for each sequence: fp32 (1, B, N)."""
    made = nl.ndarray((1, batch, rows), dtype=nl.float32)
    nisa.iota(dst=made, pattern=[[0, batch], [1, rows]], offset=0, channel_multiplier=0)
    return made


def emitted(drawn, count, index):
    """Draws before count, else -1, and the last of them: fp32 (1, B, N) and (1, B, 1)."""
    shape = drawn.shape
    kept, last = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32)
    following = nl.ndarray(count.shape, nl.float32)
    limit = count.broadcast(2, shape[2])
    nisa.tensor_tensor(dst=kept, data1=index, data2=limit, op=nl.less)
    nisa.scalar_tensor_tensor(dst=kept, data=drawn, op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=kept)
    nisa.tensor_scalar(dst=kept, data=kept, op0=nl.subtract, operand0=1.0)
    nisa.scalar_tensor_tensor(dst=last, data=index, op0=nl.add, operand0=1.0, op1=nl.equal, operand1=limit)
    nisa.tensor_tensor(dst=last, data1=last, data2=drawn, op=nl.multiply)
    nisa.tensor_reduce(dst=following, op=nl.add, data=last, axis=2)
    return kept, following


def out(tile, columns):
    """An fp32 row of integers as an int32 output (B, columns)."""
    batch = tile.shape[1]
    whole = nl.ndarray(tile.shape, dtype=nl.int32)
    made = nl.ndarray((batch, columns), dtype=nl.int32, buffer=nl.shared_hbm)
    nisa.tensor_copy(dst=whole, src=tile)
    target = made.ap([[batch * columns, 1], [1, batch * columns]], offset=0)
    nisa.dma_copy(dst=target, src=whole, dge_mode=nisa.dge_mode.none)
    return made


def finish(tokens, count, index, positions):
    """The outputs of a step from the tokens of all rows and how many are emitted."""
    batch, rows = tokens.shape[1], tokens.shape[2]
    reached = nl.ndarray((1, batch, 1), nl.float32)
    accepted, following = emitted(tokens, count, index)
    nisa.tensor_tensor(dst=reached, data1=one_row(positions, (1, batch, 1)), data2=count, op=nl.add)
    return out(accepted, rows), out(count, 1), out(following, 1), out(reached, 1)


@nki.jit
def accept_drafts_kernel(values, ids, drafts, positions, limits):
    """accepted (B, N), counts (B, 1), next ids (B, 1), next positions (B, 1); drafts and limits None for N = 1."""
    shards, batch, rows = values.shape
    index, both = indices(batch, rows), (shards, batch * rows)
    drawn = merged(values.reshape(both), ids.reshape(both), batch * rows).reshape((1, batch, rows))
    if drafts != None:  # noqa: E711
        passed = nl.ndarray((1, batch, rows - 1), nl.float32)
        drafted = one_row(drafts, (1, batch, rows - 1))
        nisa.tensor_tensor(dst=passed, data1=drafted, data2=drawn[:, :, 0 : rows - 1], op=nl.equal)
        count = emitted_count(passed, index, limits)
    else:
        count = nl.ndarray((1, batch, 1), nl.float32)
        nisa.memset(dst=count, value=1.0)
    return finish(drawn, count, index, positions)
