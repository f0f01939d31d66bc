"""The MLP half of a decoder layer for few rows: RMSNorm, gate and up, SwiGLU, down.

out[r] = (silu(n[r] Wg) * (n[r] Wu)) Wd,  n[r] = gamma * x[r] / sqrt(mean_e x[r, e]^2 + eps)

R <= 128 rows, E hidden, I intermediate of this rank. out is the rank's partial sum, which the graph all-reduces and
adds to x. Sums are fp32; the rows gamma * x, the products silu(g) u and out are rounded to x's dtype. A row's bits do
not depend on R, its index or the number of cores.

Layouts: x and out (R, E), gamma (E,), gate_up (blocks, E, 2 C) of pack_gate_up, down (blocks, I, C) of pack. Each of
two cores computes half of the blocks of gate and up, exchanges each block of silu(g) u, and computes half of the output
columns: no partial sums are added. Below the break-even size core 0 computes the full MLP and core 1 idles.
FP8 weights have scales (blocks, 1, columns) and are stationary.
Cost: all weights once (roofline.decode_mlp). Design: docs/kernels.md. Launched by steps for layers that are not part of
a decode_layers launch, and for the MLP of block drafts.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.checks import check_mlp, check_rows, launcher
from nki_kernels.layer.channel_scale import channel_groups, scale_of
from nki_kernels.layer.core_split import MLP_PIPE, exchange, weight_bytes
from nki_kernels.layer.projections import padded_rows, project, rows_of_groups
from nki_kernels.layer.rmsnorm_rows import ResidualRows, load_gamma, rmsnorm, row_splits
from nki_kernels.layer.weight_stream import (
    TILE_BYTES,
    PackedWeight,
    WeightStationary,
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


def swiglu_transposed(gated_WR, gate, up, inv_rms_PR):
    """SwiGLU of one group of W channels of FP8 weights; gate and up are pairs of PSUM (W, R) and scales (W, 1)."""
    inv_rms_WR = inv_rms_PR[0 : gated_WR.shape[0], :]
    scaled = []
    for half in (gate, up):
        scaled_WR = nl.ndarray(gated_WR.shape, dtype=nl.float32)
        nisa.scalar_tensor_tensor(
            dst=scaled_WR, data=half[0], op0=nl.multiply, operand0=half[1], op1=nl.multiply, operand1=inv_rms_WR
        )
        scaled.append(scaled_WR)
    nisa.activation(dst=scaled[0], op=nl.silu, data=scaled[0])
    nisa.tensor_tensor(dst=gated_WR, data1=scaled[1], data2=scaled[0], op=nl.multiply)


class MLPHalf(nl.NKIObject):
    """A layer's MLP on this core, which is idle if it has no blocks; `scales` are those of gate and up, and of down."""

    def __init__(self, gate_up, down, layer=0, scales=None):
        blocks, size = [], weight_bytes(gate_up) + weight_bytes(down)
        self.is_split = this_core()[1] == 2 and size > MIN_BYTES_TO_SPLIT
        for tensor in (gate_up, down):
            if self.is_split:
                blocks.append(core_slice(tensor.shape[0]))
            elif this_core()[0] == 0:
                blocks.append((0, tensor.shape[0]))
            else:
                blocks.append((0, 0))
        self.gate_up = PackedWeight(
            f"gate_up {layer}", gate_up, blocks[0], row_splits(gate_up.shape[1]), scale_of(scales, 0)
        )
        self.down = PackedWeight(f"down {layer}", down, blocks[1], 1, scale_of(scales, 1))
        self.is_idle = blocks[0][0] == blocks[0][1]
        # groups of channels of a block, FP8: those of gate, as many of up
        self.groups = channel_groups(gate_up.shape[2] // 2)

    def load_scales(self):
        """Load the scales of FP8 weights."""
        self.gate_up.load_scale(2 * self.groups)
        self.down.load_scale(channel_groups(self.down.columns))

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
        if self.gate_up.fills_tiles():
            return self.gate_and_up_tiles(rows, stream)
        count, width = rows.scaled_PTR.shape[2], self.gate_up.columns // 2
        first, last = self.gate_up.blocks
        gated_RI = nl.ndarray((padded_rows(count), self.down.depth), dtype=rows.scaled_PTR.dtype)
        if padded_rows(count) > count:
            nisa.memset(dst=gated_RI, value=0.0)
        if self.gate_up.is_fp8():
            self.gate_and_up_fp8(gated_RI, rows, stream)
            return transpose_rows(gated_RI)
        for block in range(first, last):
            products = row_products(self.gate_up, [rows.scaled_PTR])
            accumulate(stream, self.gate_up, products)
            swiglu(gated_RI[0:count, block * width : (block + 1) * width], products[0].psum, rows.inv_rms())
            self.exchange_block(gated_RI, block)
        return transpose_rows(gated_RI)

    def exchange_block(self, gated_RI, block):
        """Send a block of silu(gate) * up to the other core, if it has the other half, and receive one."""
        width, count = self.gate_up.columns // 2, self.gate_up.blocks[1] - self.gate_up.blocks[0]
        if self.is_split:
            received = (block + count) % (2 * count)
            src = gated_RI[:, block * width : (block + 1) * width]
            dst = gated_RI[:, received * width : (received + 1) * width]
            exchange(src, dst, MLP_PIPE, nisa.dma_engine.gpsimd_dma)

    def gate_and_up_tiles(self, rows, stream):
        """gate_and_up of FP8 weights whose blocks are K tiles of down, so that the result needs no transpose."""
        first, last = self.gate_up.blocks
        gated_PTR = nl.ndarray((P, self.down.k_tiles, rows.scaled_PTR.shape[2]), dtype=rows.scaled_PTR.dtype)
        for block in range(first, last):
            product, scales = WeightStationary(rows.scaled_PTR, P, 2, False), self.gate_up.channels
            accumulate(stream, self.gate_up, [product])
            gate = (product.psum[0][:, 0, :], scales.of_group(block, 0))
            up = (product.psum[1][:, 0, :], scales.of_group(block, 1))
            swiglu_transposed(gated_PTR[:, block, :], gate, up, rows.inv_rms_all_partitions())
            if self.is_split:
                received = (block + last - first) % (2 * (last - first))
                exchange(gated_PTR[:, block, :], gated_PTR[:, received, :], MLP_PIPE, nisa.dma_engine.gpsimd_dma)
        return gated_PTR

    def gate_and_up_fp8(self, gated_RI, rows, stream):
        """gate_and_up of FP8 weights: these are stationary, so that a channel's scale is one number per partition.

        A block is transposed after the next one's product: the Tensor Engine does not wait for SwiGLU.
        """
        before = []
        for block in range(self.gate_up.blocks[0], self.gate_up.blocks[1]):
            width = self.gate_up.columns // (2 * self.groups)
            product = WeightStationary(rows.scaled_PTR, width, 2 * self.groups, False)
            accumulate(stream, self.gate_up, [product])
            self.store_gated(gated_RI, block - 1, before)
            before = []
            for j in range(self.groups):
                gate, up, scales = product.psum[j], product.psum[self.groups + j], self.gate_up.channels
                gated_WR = nl.ndarray((width, rows.scaled_PTR.shape[2]), dtype=gated_RI.dtype)
                gate_pair = (gate[:, 0, :], scales.of_group(block, j))
                up_pair = (up[:, 0, :], scales.of_group(block, self.groups + j))
                swiglu_transposed(gated_WR, gate_pair, up_pair, rows.inv_rms_all_partitions())
                before.append(gated_WR)
        self.store_gated(gated_RI, self.gate_up.blocks[1] - 1, before)

    def store_gated(self, gated_RI, block, gated):
        """Put the groups (W, R) of a block into rows, if there are any, and exchange them."""
        if len(gated) > 0:
            rows_of_groups(gated_RI, block * self.groups * gated[0].shape[0], gated)
            self.exchange_block(gated_RI, block)


@nki.jit
def decode_mlp_kernel(x, gamma, gate_up, down, eps=1e-6, scales=None):
    """Return out in x's dtype; `scales` (gate_up's, down's) are those of FP8 weights."""
    out_RE = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    half = MLPHalf(gate_up, down, 0, scales)
    if not half.is_idle:
        preload_act_table(nl.silu)
        gamma_PT, residual = load_gamma(gamma, x.dtype), ResidualRows(x, 0, x.shape[0])
        rows, stream = rmsnorm(residual.transposed(), gamma_PT, eps), WeightStream(half.tiles())
        half.load_scales()
        stream.prefetch()
        project(out_RE, stream, half.down, half.gate_and_up(rows, stream))
    return out_RE


def check_operands(x, gamma, gate_up, down, eps=1e-6, scales=None):
    """Refuse operands that the kernel cannot serve."""
    check_rows(x, gamma)
    check_mlp(x, gamma, gate_up, down, scales)


decode_mlp = launcher(decode_mlp_kernel, check_operands)
