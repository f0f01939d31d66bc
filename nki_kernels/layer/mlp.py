"""The MLP half of a decoder layer for few rows: RMSNorm, gate and up, SwiGLU, down.

out[r] = (silu(n[r] Wg) * (n[r] Wu)) Wd,  n[r] = gamma * x[r] / sqrt(mean_e x[r, e]^2 + eps)

R <= 128 rows, E hidden, I intermediate of this rank. out is the rank's partial sum, which the graph all-reduces and
adds to x. Sums are fp32; the rows gamma * x, the products silu(g) u and out are rounded to x's dtype. A row's bits do
not depend on R, its index or the number of cores.

Layouts: x and out (R, E), gamma (E,), gate_up (blocks, E, 2 C) of pack_gate_up, down (blocks, I, C) of pack. Each of
two cores computes half of the blocks of gate and up, exchanges each block of silu(g) u, and computes half of the output
columns: no partial sums are added. Below the break-even size core 0 computes the full MLP and core 1 idles.
Cost: all weights once (roofline.decode_mlp). Design: docs/kernels.md. Launched by steps for layers that are not part of
a decode_layers launch, and for the MLP of block drafts.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.checks import check_mlp, check_rows, launcher
from nki_kernels.layer.core_split import MLP_PIPE, exchange, weight_bytes
from nki_kernels.layer.projections import padded_rows, project
from nki_kernels.layer.rmsnorm_rows import ResidualRows, load_gamma, rmsnorm, row_splits
from nki_kernels.layer.weight_stream import (
    TILE_BYTES,
    PackedWeight,
    WeightStream,
    accumulate,
    row_products,
    transpose_rows,
)
from nki_kernels.tiles import P, core_slice, preload_act_table, this_core

# break-even: above this many weight bytes, halving the HBM read saves more than one exchange (4.3 us, simulated)
MIN_BYTES_TO_SPLIT = 4700000


def swiglu(gated_RC, psum_RC, inv_rms_R1):
    """silu(gate / rms) * up / rms of one block, whose first half is the gate's columns."""
    width = gated_RC.shape[1]
    gate_RC, up_RC = psum_RC[:, 0:width], psum_RC[:, width : 2 * width]
    silu_RC = nl.ndarray(gated_RC.shape, dtype=nl.float32)
    nisa.activation(dst=silu_RC, op=nl.silu, data=gate_RC, scale=inv_rms_R1)
    nisa.scalar_tensor_tensor(
        dst=gated_RC, data=up_RC, op0=nl.multiply, operand0=inv_rms_R1, op1=nl.multiply, operand1=silu_RC
    )


class MLPHalf(nl.NKIObject):
    """A layer's MLP on this core, which is idle if it has no blocks."""

    def __init__(self, gate_up, down, layer=0):
        blocks, size = [], weight_bytes(gate_up) + weight_bytes(down)
        self.is_split = this_core()[1] == 2 and size > MIN_BYTES_TO_SPLIT
        for tensor in (gate_up, down):
            if self.is_split:
                blocks.append(core_slice(tensor.shape[0]))
            elif this_core()[0] == 0:
                blocks.append((0, tensor.shape[0]))
            else:
                blocks.append((0, 0))
        self.gate_up = PackedWeight(f"gate_up {layer}", gate_up, blocks[0], row_splits(gate_up.shape[1]))
        self.down = PackedWeight(f"down {layer}", down, blocks[1])
        self.is_idle = blocks[0][0] == blocks[0][1]

    def tiles(self, max_bytes=TILE_BYTES):
        """This core's weight tiles in the order of use; with two cores the peer waits for the last block."""
        return self.gate_up.tiles(self.is_split, max_bytes) + self.down.tiles(True, max_bytes)

    def bytes_per_partition(self):
        """Weight bytes per partition on a core that computes this MLP."""
        size = weight_bytes(self.gate_up.tensor) + weight_bytes(self.down.tensor)
        if self.is_split:
            size = size // 2
        return size // P

    def gate_and_up(self, rows, stream):
        """silu(gate) * up of RMSNormRows, transposed: (128, tiles, padded_rows)."""
        count, width = rows.scaled_PTR.shape[2], self.gate_up.columns // 2
        first, last = self.gate_up.blocks
        gated_RI = nl.ndarray((padded_rows(count), self.down.depth), dtype=self.down.tensor.dtype)
        if padded_rows(count) > count:
            nisa.memset(dst=gated_RI, value=0.0)
        for block in range(first, last):
            products = row_products(self.gate_up, [rows.scaled_PTR])
            accumulate(stream, self.gate_up, products)
            swiglu(gated_RI[0:count, block * width : (block + 1) * width], products[0].psum, rows.inv_rms())
            if self.is_split:
                received = (block + last - first) % (2 * (last - first))
                src = gated_RI[:, block * width : (block + 1) * width]
                dst = gated_RI[:, received * width : (received + 1) * width]
                exchange(src, dst, MLP_PIPE, nisa.dma_engine.gpsimd_dma)
        return transpose_rows(gated_RI)


@nki.jit
def decode_mlp_kernel(x, gamma, gate_up, down, eps=1e-6):
    """Return out in x's dtype."""
    out_RE = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    half = MLPHalf(gate_up, down)
    if not half.is_idle:
        preload_act_table(nl.silu)
        gamma_PT, residual = load_gamma(gamma, x.dtype), ResidualRows(x, 0, x.shape[0])
        rows, stream = rmsnorm(residual.transposed(), gamma_PT, eps), WeightStream(half.tiles())
        stream.prefetch()
        project(out_RE, stream, half.down, half.gate_and_up(rows, stream))
    return out_RE


def check_operands(x, gamma, gate_up, down, eps=1e-6):
    """Refuse operands that the kernel cannot serve."""
    check_rows(x, gamma)
    check_mlp(x, gamma, gate_up, down)


decode_mlp = launcher(decode_mlp_kernel, check_operands)
