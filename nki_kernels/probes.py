"""Kernels of the device check (`compile/device_check`), each for one question; no graph launches them."""

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.layer.decode_layers import all_reduce_partials, alloc_partial
from nki_kernels.tiles import P, core_slice, this_core

_PLACES = ("one tensor", "a bank of its own")


@nki.jit
def psum_chains_kernel(eye, x):
    """Return sums over T of x (128, T, J, R) by J interleaved accumulation chains: (cores, 2, J, 128, R) fp32.

    First with all chains in one PSUM tensor, then with a bank for each. eye is (128, 128).
    """
    core, cores = this_core()
    _, steps, chains, rows = x.shape
    eye_PP, x_PTJR = nl.ndarray(eye.shape, dtype=eye.dtype), nl.ndarray(x.shape, dtype=x.dtype)
    nisa.dma_copy(dst=eye_PP, src=eye)
    nisa.dma_copy(dst=x_PTJR, src=x)
    out = nl.ndarray((cores, 2, chains, P, rows), dtype=nl.float32, buffer=nl.shared_hbm)
    together_PJR = nl.ndarray((P, chains, rows), dtype=nl.float32, buffer=nl.psum)
    sums = [[], []]
    for j in range(chains):
        sums[0].append(together_PJR[:, j, :])
        # 512 columns of fp32 are a bank
        sums[1].append(nl.ndarray((P, 512), dtype=nl.float32, buffer=nl.psum)[:, 0:rows])
    for place in range(2):
        for t in range(steps):
            for j in range(chains):
                nisa.nc_matmul(dst=sums[place][j], stationary=eye_PP, moving=x_PTJR[:, t, j, :], accumulate=t > 0)
        for j in range(chains):
            sum_PR = nl.ndarray((P, rows), dtype=nl.float32)
            nisa.tensor_copy(dst=sum_PR, src=sums[place][j])
            nisa.dma_copy(dst=out[core, place, j], src=sum_PR)
    return out


def wrong_chains(launch):
    """A sentence for each accumulation chain whose sum is wrong; `launch` calls psum_chains_kernel."""
    # product t of chain j is 2^t (j + 1): a wrong sum says which products are lost
    x_TJ = np.outer([1, 2, 4], [1, 2, 3, 4])
    x_PTJR = np.broadcast_to(x_TJ[None, :, :, None], (P, 3, 4, 8)).astype(ml_dtypes.bfloat16)
    sums, wrong = np.asarray(launch(np.eye(P, dtype=x_PTJR.dtype), x_PTJR)), []
    for place, j in np.ndindex(sums.shape[1:3]):
        totals = np.unique(sums[:, place, j] / (j + 1)).tolist()
        wrong += [f"chain {j} in {_PLACES[place]} has {totals} of its products 1 + 2 + 4"] * (totals != [7])
    return wrong


@nki.jit
def sum_over_ranks_kernel(x, groups):
    """Return the sum of the ranks' x (128, C), by the all-reduce of decode_layers."""
    out, part_PC = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm), alloc_partial(x)
    first, last = core_slice(P)
    nisa.dma_copy(dst=part_PC[first:last], src=x[first:last])
    sum_PC = all_reduce_partials(part_PC, groups)
    nisa.dma_copy(dst=out[first:last], src=sum_PC[first:last])
    return out
