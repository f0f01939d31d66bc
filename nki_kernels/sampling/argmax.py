"""Argmax with ties to the smallest id: over columns, over parts of a row, over shards.

Ids are fp32 below 2^22, hence exact. LIFT is added to the ids of smaller values, which then exceed all tied ids; these
rounded sums are never read.
"""

import nki.isa as nisa
import nki.language as nl

LIFT = float(1 << 23)


def argmax(values, ids, shape):
    """Over the last axis of values and ids (p, n, m): max values (p, n) and their smallest ids (p, n), fp32."""
    top, best = nl.ndarray((shape[0], shape[1]), dtype=nl.float32), nl.ndarray((shape[0], shape[1]), dtype=nl.float32)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=values, axis=2)
    lifted = nl.ndarray(shape, dtype=nl.float32)
    max_of_all = top.reshape((shape[0], shape[1], 1)).broadcast(2, shape[2])
    nisa.tensor_tensor(dst=lifted, data1=values, data2=max_of_all, op=nl.less)
    nisa.scalar_tensor_tensor(dst=lifted, data=lifted, op0=nl.multiply, operand0=LIFT, op1=nl.add, operand1=ids)
    nisa.tensor_reduce(dst=best, op=nl.minimum, data=lifted, axis=2)
    return top, best


def argmax_of_columns(scores_PW):
    """The max of each partition's scores (P, W) and its first column: fp32 (P, 1) each."""
    partitions = scores_PW.shape[0]
    values_P8 = nl.ndarray((partitions, 8), dtype=nl.float32)
    columns_P8 = nl.ndarray((partitions, 8), dtype=nl.uint32)
    column_P1 = nl.ndarray((partitions, 1), dtype=nl.float32)
    nisa.max8(dst=values_P8, src=scores_PW)
    nisa.nc_find_index8(dst=columns_P8, data=scores_PW, vals=values_P8)
    nisa.tensor_copy(dst=column_P1, src=columns_P8[:, 0:1])
    return values_P8[:, 0:1], column_P1


def argmax_of_chunks(bests):
    """The max of each partition over its chunks, from a list of (value, id) columns (P, 1)."""
    if len(bests) == 1:
        return bests[0]
    shape = (bests[0][0].shape[0], 1, len(bests))
    values, ids = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32)
    for i in range(len(bests)):
        nisa.tensor_copy(dst=values[:, 0, i : i + 1], src=bests[i][0])
        nisa.tensor_copy(dst=ids[:, 0, i : i + 1], src=bests[i][1])
    return argmax(values, ids, shape)


def argmax_of_parts(t, value_P1, id_P1):
    """The max over the parts of each row, from (parts * R, 1) each: fp32 (1, R) each."""
    psum = nl.ndarray((1, 2, t.partitions()), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=psum[:, 0, :], data=value_P1)
    nisa.nc_transpose(dst=psum[:, 1, :], data=id_P1)
    by_part = nl.ndarray((1, 2, t.parts, t.rows), dtype=nl.float32)
    nisa.tensor_copy(dst=by_part, src=psum)
    by_row = by_part.permute((0, 1, 3, 2))
    return argmax(by_row[:, 0], by_row[:, 1], (1, t.rows, t.parts))
