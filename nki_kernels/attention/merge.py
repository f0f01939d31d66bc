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

from nki_kernels.tiles import P, this_core


def shard_weights(lse_RM):
    """Each shard's share of a row, fp32 (R, M), and the row's -maximum and sum of exponentials, fp32 (R, 1)."""
    rows, shards = lse_RM.shape
    lowest_R1, weights_RM = nl.ndarray((rows, 1), dtype=nl.float32), nl.ndarray((rows, shards), dtype=nl.float32)
    total_R1, inverse_R1 = nl.ndarray((rows, 1), dtype=nl.float32), nl.ndarray((rows, 1), dtype=nl.float32)
    nisa.tensor_reduce(dst=lowest_R1, op=nl.maximum, data=lse_RM, axis=1, negate=True)
    nisa.activation(
        dst=weights_RM,
        op=nl.exp,
        data=lse_RM,
        bias=lowest_R1,
        reduce_op=nl.add,
        reduce_res=total_R1,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    nisa.reciprocal(dst=inverse_R1, data=total_R1)
    nisa.tensor_scalar(dst=weights_RM, data=weights_RM, op0=nl.multiply, operand0=inverse_R1)
    return weights_RM, lowest_R1, total_R1


def merge_tile(part_MRD, lse_MR, out_RD, merged_R, first):
    """Up to 128 rows from row `first` on."""
    shards, total_rows, dim = part_MRD.shape
    rows = min(P, total_rows - first)
    parts_RMD = nl.ndarray((rows, shards, dim), dtype=part_MRD.dtype)
    lse_RM = nl.ndarray((rows, shards), dtype=nl.float32)
    source = part_MRD.ap([[dim, rows], [total_rows * dim, shards], [1, dim]], offset=first * dim)
    nisa.dma_copy(dst=parts_RMD, src=source)
    nisa.dma_copy(dst=lse_RM, src=lse_MR.ap([[1, rows], [total_rows, shards]], offset=first))
    weights_RM, lowest_R1, total_R1 = shard_weights(lse_RM)
    sum_RD = nl.ndarray((rows, dim), dtype=nl.float32)
    nisa.tensor_scalar(dst=sum_RD, data=parts_RMD[:, 0, :], op0=nl.multiply, operand0=weights_RM[:, 0:1])
    for m in range(1, shards):
        added_RD, weight_R1 = nl.ndarray((rows, dim), dtype=nl.float32), weights_RM[:, m : m + 1]
        nisa.scalar_tensor_tensor(
            dst=added_RD, data=parts_RMD[:, m, :], op0=nl.multiply, operand0=weight_R1, op1=nl.add, operand1=sum_RD
        )
        sum_RD = added_RD
    rounded_RD, merged_R1 = nl.ndarray((rows, dim), dtype=out_RD.dtype), nl.ndarray((rows, 1), dtype=nl.float32)
    nisa.tensor_copy(dst=rounded_RD, src=sum_RD)
    nisa.activation(dst=merged_R1, op=nl.log, data=total_R1)
    nisa.tensor_tensor(dst=merged_R1, data1=merged_R1, data2=lowest_R1, op=nl.subtract)
    nisa.dma_copy(dst=out_RD[first : first + rows, :], src=rounded_RD)
    nisa.dma_copy(dst=merged_R.ap([[1, rows], [1, 1]], offset=first), src=merged_R1)


@nki.jit
def merge_attention_kernel(part, lse):
    """out (R, D) in part's dtype and lse (R,) fp32 of all shards together."""
    rows, dim = part.shape[1], part.shape[2]
    out_RD = nl.ndarray((rows, dim), dtype=part.dtype, buffer=nl.shared_hbm)
    merged_R = nl.ndarray((rows,), dtype=nl.float32, buffer=nl.shared_hbm)
    core, cores = this_core()
    for i in range(core, (rows + P - 1) // P, cores):
        merge_tile(part, lse, out_RD, merged_R, i * P)
    return out_RD, merged_R
