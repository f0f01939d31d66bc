"""RMSNorm: x / sqrt(mean(x^2) + eps) * weight, 128 rows at a time."""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128


@nki.jit
def rms_norm(x, weight, eps=1e-6):
    """The norm of each row of x (R, C), in x's dtype; weight is (1, C). Any R, statistics in fp32."""
    rows, columns = x.shape
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    # a step of 0 reads the same row of HBM into every partition
    weight_PC = nl.ndarray((P, columns), dtype=weight.dtype)
    nisa.dma_copy(dst=weight_PC, src=weight.ap([[0, P], [1, columns]], offset=0))
    eps_P1 = nl.ndarray((P, 1), dtype=nl.float32)
    nisa.memset(dst=eps_P1, value=eps)
    for first in range(0, rows, P):
        count = min(P, rows - first)
        x_RC, square_RC = nl.ndarray((count, columns), dtype=x.dtype), nl.ndarray((count, columns), dtype=nl.float32)
        scale_R1 = nl.ndarray((count, 1), dtype=nl.float32)
        nisa.dma_copy(dst=x_RC, src=x[nl.ds(first, count), :])
        nisa.activation_reduce(dst=square_RC, op=nl.square, data=x_RC, reduce_op=nl.add, reduce_res=scale_R1)
        nisa.activation(dst=scale_R1, op=nl.rsqrt, data=scale_R1, scale=1 / columns, bias=eps_P1[0:count])
        out_RC = nl.ndarray((count, columns), dtype=x.dtype)
        nisa.scalar_tensor_tensor(
            dst=out_RC, data=x_RC, op0=nl.multiply, operand0=scale_R1, op1=nl.multiply, operand1=weight_PC[0:count]
        )
        nisa.dma_copy(dst=out[nl.ds(first, count), :], src=out_RC)
    return out
