"""One uniform number of (seed, position) in a domain: what an acceptance test compares with.

u[r] = (top 23 bits of the first word + 1/2) / 2^23,  words = Threefry-2x32(seed, (0, position + domain * 2^24))

Layouts: seeds (R, 2) int32, positions (R, 1) int32; u (R, 1) fp32, strictly between 0 and 1. R <= 128.
Spec: docs/sampling.md. Cost: the latency of the rounds; it needs nothing that a model computes.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.sampling.gumbel_noise import counters
from nki_kernels.sampling.threefry import schedule, threefry


@nki.jit
def uniform_kernel(seeds, positions, domain):
    """u (R, 1) fp32."""
    rows = seeds.shape[0]
    u_R1 = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    key_R2, position_R1 = nl.ndarray((rows, 2), dtype=nl.int32), nl.ndarray((rows, 1), dtype=nl.int32)
    nisa.dma_copy(dst=key_R2, src=seeds)
    nisa.dma_copy(dst=position_R1, src=positions)
    zero_R11, bits_R1 = nl.ndarray((rows, 1, 1), dtype=nl.uint32), nl.ndarray((rows, 1), dtype=nl.uint32)
    nisa.memset(dst=zero_R11, value=0)
    injections = schedule(key_R2.view(nl.uint32).reshape((rows, 2, 1)))
    word_R11 = threefry(zero_R11, counters(position_R1, domain), injections)[0]
    nisa.tensor_scalar(dst=bits_R1, data=word_R11, op0=nl.right_shift, operand0=9)
    number_R1 = nl.ndarray((rows, 1), nl.float32)
    nisa.tensor_scalar(dst=number_R1, data=bits_R1, op0=nl.add, operand0=0.5, op1=nl.multiply, operand1=2.0**-23)
    nisa.dma_copy(dst=u_R1, src=number_R1)
    return u_R1
