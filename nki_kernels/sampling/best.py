"""The best value and the smallest id that has it: over columns, over parts of a row, over shards.

Ids are fp32 below 2^23, so that an id that is not the best can be lifted above all others without loss.
"""

import nki.isa as nisa
import nki.language as nl

LIFT = float(1 << 23)


def smallest_best(values, ids, shape):
    """Over the last axis of values and ids (p, n, m): (p, n) best values, (p, n) ids, in fp32."""
    top, best = nl.ndarray((shape[0], shape[1]), dtype=nl.float32), nl.ndarray((shape[0], shape[1]), dtype=nl.float32)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=values, axis=2)
    lifted = nl.ndarray(shape, dtype=nl.float32)
    spread = top.reshape((shape[0], shape[1], 1)).broadcast(2, shape[2])
    nisa.tensor_tensor(dst=lifted, data1=values, data2=spread, op=nl.less)
    nisa.scalar_tensor_tensor(dst=lifted, data=lifted, op0=nl.multiply, operand0=LIFT, op1=nl.add, operand1=ids)
    nisa.tensor_reduce(dst=best, op=nl.minimum, data=lifted, axis=2)
    return top, best


def best_column(scores):
    """The best of each partition's scores (p, W) and its first column: fp32 (p, 1) each."""
    count = scores.shape[0]
    eight, places = nl.ndarray((count, 8), dtype=nl.float32), nl.ndarray((count, 8), dtype=nl.uint32)
    place = nl.ndarray((count, 1), dtype=nl.float32)
    nisa.max8(dst=eight, src=scores)
    nisa.nc_find_index8(dst=places, data=scores, vals=eight)
    nisa.tensor_copy(dst=place, src=places[:, 0:1])
    return eight[:, 0:1], place


def over_parts(t, value, best):
    """The best over the parts of each row, from (parts * R, 1) each: fp32 (1, R) each."""
    turned = nl.ndarray((1, 2, t.partitions()), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned[:, 0, :], data=value)
    nisa.nc_transpose(dst=turned[:, 1, :], data=best)
    moved = nl.ndarray((1, 2, t.parts, t.rows), dtype=nl.float32)
    nisa.tensor_copy(dst=moved, src=turned)
    by_row = moved.permute((0, 1, 3, 2))
    return smallest_best(by_row[:, 0], by_row[:, 1], (1, t.rows, t.parts))
