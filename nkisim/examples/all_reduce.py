"""Row-parallel linear layer: every rank multiplies its slice of K, an all-reduce adds the partial products."""

import nki
import nki.isa as nisa
import nki.language as nl
from nki.collectives import ReplicaGroup, all_reduce

P = 128


@nki.jit
def row_parallel(x_t, weight, ranks):
    """x @ weight summed over `ranks` ranks, fp32 (R, N): x_t (K, R) and weight (K, N) are this rank's slices of K.

    K is a multiple of 128, R at most 128, N at most 512.
    """
    (depth, rows), columns = x_t.shape, weight.shape[1]
    sum_RN = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.psum)
    for k in range(depth // P):
        x_PR, weight_PN = nl.ndarray((P, rows), dtype=x_t.dtype), nl.ndarray((P, columns), dtype=weight.dtype)
        nisa.dma_copy(dst=x_PR, src=x_t[nl.ds(k * P, P), :])
        nisa.dma_copy(dst=weight_PN, src=weight[nl.ds(k * P, P), :])
        nisa.nc_matmul(dst=sum_RN, stationary=x_PR, moving=weight_PN, accumulate=k > 0)
    part_RN = nl.ndarray((rows, columns), dtype=nl.float32)
    nisa.tensor_copy(dst=part_RN, src=sum_RN)
    # collectives read and write HBM, and both sides have the same kind of it
    part = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.private_hbm)
    total = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.private_hbm)
    out = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=part, src=part_RN)
    all_reduce(srcs=[part], dsts=[total], replica_group=ReplicaGroup([list(range(ranks))]), op=nl.add)
    nisa.dma_copy(dst=out, src=total)
    return out
