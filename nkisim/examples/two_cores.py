"""LNC 2: each physical core sums half of the rows, and both exchange their halves by sendrecv."""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128


@nki.jit
def column_sums(x):
    """The sums of the columns of x (256, C), C at most 512: (1, C) fp32. Launch it as column_sums[2]."""
    columns, core = x.shape[1], nl.program_id(0)
    out = nl.ndarray((1, columns), dtype=nl.float32, buffer=nl.shared_hbm)
    x_PC, ones_P1 = nl.ndarray((P, columns), dtype=x.dtype), nl.ndarray((P, 1), dtype=x.dtype)
    nisa.dma_copy(dst=x_PC, src=x[nl.ds(core * P, P), :])
    nisa.memset(dst=ones_P1, value=1.0)
    sum_1C = nl.ndarray((1, columns), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sum_1C, stationary=ones_P1, moving=x_PC, accumulate=False)
    mine_1C, other_1C = nl.ndarray((1, columns), dtype=nl.float32), nl.ndarray((1, columns), dtype=nl.float32)
    nisa.tensor_copy(dst=mine_1C, src=sum_1C)
    nisa.sendrecv(src=mine_1C, dst=other_1C, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
    # one core writes the result: two writers of the same bytes would be a race
    if core == 0:
        nisa.tensor_tensor(dst=mine_1C, data1=mine_1C, data2=other_1C, op=nl.add)
        nisa.dma_copy(dst=out, src=mine_1C)
    return out
