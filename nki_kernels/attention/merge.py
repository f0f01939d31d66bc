"""Merging attention over shards of the sequence by their log-sum-exp.

out[r] = sum_m w[m, r] part[m, r] / sum_m w[m, r],  w[m, r] = exp(lse[m, r] - max_m lse[m, r])
lse[r] = max_m lse[m, r] + log(sum_m w[m, r])

part (M, R, D) and lse (M, R) fp32 of M shards, R rows in any order; shards are added in ascending order. A shard
in which a row sees nothing has an lse near -1e37 and weight zero.
Cost: parts and lse are read once; the gathering over ranks is the caller's. Kernel: R in tiles of 128 rows.
"""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128


def merge_tile(part, lse, out, merged, first):
    """Up to 128 rows from row `first` on."""
    shards, total_rows, dim = part.shape
    rows = min(P, total_rows - first)
    parts, logs = nl.ndarray((rows, shards, dim), dtype=part.dtype), nl.ndarray((rows, shards), dtype=nl.float32)
    nisa.dma_copy(dst=parts, src=part.ap([[dim, rows], [total_rows * dim, shards], [1, dim]], offset=first * dim))
    nisa.dma_copy(dst=logs, src=lse.ap([[1, rows], [total_rows, shards]], offset=first))
    lowest, weights = nl.ndarray((rows, 1), dtype=nl.float32), nl.ndarray((rows, shards), dtype=nl.float32)
    total, inverse = nl.ndarray((rows, 1), dtype=nl.float32), nl.ndarray((rows, 1), dtype=nl.float32)
    nisa.tensor_reduce(dst=lowest, op=nl.maximum, data=logs, axis=1, negate=True)
    nisa.activation(dst=weights, op=nl.exp, data=logs, bias=lowest,
                    reduce_op=nl.add, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reset_reduce)  # fmt: skip
    nisa.reciprocal(dst=inverse, data=total)
    nisa.tensor_scalar(dst=weights, data=weights, op0=nl.multiply, operand0=inverse)
    so_far = nl.ndarray((rows, dim), dtype=nl.float32)
    nisa.tensor_scalar(dst=so_far, data=parts[:, 0, :], op0=nl.multiply, operand0=weights[:, 0:1])
    for m in range(1, shards):
        added = nl.ndarray((rows, dim), dtype=nl.float32)
        nisa.scalar_tensor_tensor(dst=added, data=parts[:, m, :], op0=nl.multiply, operand0=weights[:, m : m + 1],
                                  op1=nl.add, operand1=so_far)  # fmt: skip
        so_far = added
    result, log = nl.ndarray((rows, dim), dtype=out.dtype), nl.ndarray((rows, 1), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=so_far)
    nisa.activation(dst=log, op=nl.log, data=total)
    nisa.tensor_tensor(dst=log, data1=log, data2=lowest, op=nl.subtract)
    nisa.dma_copy(dst=out[first : first + rows, :], src=result)
    nisa.dma_copy(dst=merged.ap([[1, rows], [1, 1]], offset=first), src=log)


@nki.jit
def merge_attention_kernel(part, lse):
    """out (R, D) in part's dtype and lse (R,) fp32 of all shards together."""
    rows, dim = part.shape[1], part.shape[2]
    out = nl.ndarray((rows, dim), dtype=part.dtype, buffer=nl.shared_hbm)
    merged = nl.ndarray((rows,), dtype=nl.float32, buffer=nl.shared_hbm)
    tiles = (rows + P - 1) // P
    first, step = 0, 1
    if nl.program_ndim() > 0:
        first, step = nl.program_id(0), nl.num_programs()
    for i in range(first, tiles, step):
        merge_tile(part, lse, out, merged, i * P)
    return out, merged
