"""The sums of a threshold search over a vocabulary shard: the weight above each of a few thresholds.

out[j, r] = sum_i exp(logits[r, i] * scale[r] + bias[r]) [logits[r, i] >= floor[r]] [logits[r, i] > thresholds[r, j]]

R <= 32 rows, V ids of the shard, J <= 128 thresholds. scale = 1 / T and bias = -max / T give the probability mass, for
top-p; scale = bias = 0 count, for top-k. The search over the bits of the threshold needs these J numbers per row and
shard, and no logit leaves its shard. A row's bits do not depend on R.

Layouts: logits (R, V) fp32 or bf16, scale, bias, floor (R, 1) fp32, thresholds (R, J) fp32; out (cores, J, R) fp32: a
core's half of the columns is a shard too.
Cost: J + 1 passes of the Vector Engine over V, J of the Scalar Engine in parallel (roofline.weights_above). Launched by
step and prefill graphs with filters.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.checks import FP32, check, check_logits, check_rank, launcher, refuse
from nki_kernels.limits import SUM_ROWS
from nki_kernels.sampling.vocab_tiling import chunks, load, per_row, vocab_tiling
from nki_kernels.tiles import LOWEST, P, this_core

LARGEST_CHUNK = 2048
# a constant number of parts: the order of a row's sums does not depend on R
PARTS = P // SUM_ROWS


def add_chunk(logits_PW, weights_PW, thresholds_PJ, total_PJ):
    """Add one chunk's weight above each threshold to total (P, J)."""
    shape, count = weights_PW.shape, thresholds_PJ.shape[1]
    sums_PJ = nl.ndarray((shape[0], count), dtype=nl.float32)
    for j in range(count):
        above_PW, copy_PW = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32)
        threshold_P1 = thresholds_PJ[:, j : j + 1]
        nisa.scalar_tensor_tensor(
            dst=above_PW, data=logits_PW, op0=nl.greater, operand0=threshold_P1, op1=nl.multiply, operand1=weights_PW
        )
        # the Scalar Engine sums while the Vector Engine compares with the next threshold
        nisa.activation(
            dst=copy_PW,
            op=nl.copy,
            data=above_PW,
            reduce_op=nl.add,
            reduce_res=sums_PJ[:, j : j + 1],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
    nisa.tensor_tensor(dst=total_PJ, data1=total_PJ, data2=sums_PJ, op=nl.add)


@nki.jit
def weights_above_kernel(logits, scale, bias, floor, thresholds):
    """Return out (cores, J, R) fp32."""
    rows, count = logits.shape[0], thresholds.shape[1]
    core, cores = this_core()
    out = nl.ndarray((cores, count, rows), dtype=nl.float32, buffer=nl.shared_hbm)
    t = vocab_tiling(rows, logits.shape[1], PARTS)
    scale_P1, bias_P1, floor_P1 = per_row(t, scale, 1), per_row(t, bias, 1), per_row(t, floor, 1)
    thresholds_PJ, total_PJ = per_row(t, thresholds, count), nl.ndarray((t.partitions(), count), nl.float32)
    nisa.memset(dst=total_PJ, value=0.0)
    for chunk in chunks(t, LARGEST_CHUNK):
        logits_PW = load(t, logits, chunk, LOWEST)
        weights_PW = nl.ndarray(logits_PW.shape, nl.float32)
        nisa.activation(dst=weights_PW, op=nl.exp, data=logits_PW, scale=scale_P1, bias=bias_P1)
        nisa.scalar_tensor_tensor(
            dst=weights_PW,
            data=logits_PW,
            op0=nl.greater_equal,
            operand0=floor_P1,
            op1=nl.multiply,
            operand1=weights_PW,
        )
        add_chunk(logits_PW, weights_PW, thresholds_PJ, total_PJ)
    psum = nl.ndarray((count, t.parts, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=psum, data=total_PJ)
    sums_JR = nl.ndarray((count, rows), nl.float32)
    nisa.tensor_reduce(dst=sums_JR, op=nl.add, data=psum.permute((0, 2, 1)), axis=2)
    nisa.dma_copy(dst=out.ap([[rows, count], [1, rows]], offset=core * count * rows), src=sums_JR)
    return out


def check_operands(logits, scale, bias, floor, thresholds):
    """Refuse operands that the kernel cannot serve."""
    rows, _ = check_logits(logits, SUM_ROWS)
    for name, column in (("scale", scale), ("bias", bias), ("floor", floor)):
        check(name, column, (rows, 1), FP32)
    _, count = check_rank("thresholds", thresholds, "R, J")
    refuse(not 1 <= count <= P, f"there are {count} thresholds per row, 1 to {P} are served: search in more passes")
    check("thresholds", thresholds, (rows, count), FP32)


weights_above = launcher(weights_above_kernel, check_operands)
