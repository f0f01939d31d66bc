"""The output projections of a layer's halves, out and down: several blocks of columns at once.

Up to 32 or 64 rows fill a quarter or a half of the PE columns; the other columns multiply the same rows with other
blocks, so that four or two blocks share a PSUM bank and its copy. Up to FEW_ROWS rows keep the weights stationary.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.layer.channel_scale import channel_groups
from nki_kernels.layer.weight_stream import RowStationary, WeightStationary, accumulate, next_block
from nki_kernels.tiles import P, dma_static

# up to FEW_ROWS rows are stored directly from the transposed layout; a block of up to SHALLOW K tiles is multiplied
# group by group: one PSUM tensor and one copy instead of four, and little work is left when its last tile arrives
FEW_ROWS, SHALLOW = 8, 4


def padded_rows(rows):
    """Columns of a tile of rows for `project`: a quarter, a half or all of the PE columns, or few."""
    if rows <= FEW_ROWS:
        return rows
    part = P // 4
    while part < rows:
        part = part * 2
    return part


def project(out_RE, stream, weight, x_PTR):
    """Store the product of rows (128, tiles, padded_rows), zero beyond the rows, with this core's blocks."""
    part, blocks = x_PTR.shape[2], weight.blocks
    if weight.is_fp8():
        project_fp8(out_RE, stream, weight, x_PTR)
        return
    if part <= FEW_ROWS:
        for block in range(blocks[0], blocks[1]):
            groups = channel_groups(weight.columns)
            sequential = weight.k_tiles <= SHALLOW
            product = WeightStationary(x_PTR, weight.columns // groups, groups, True, sequential)
            if sequential:
                product.add(next_block(stream, weight))
            else:
                accumulate(stream, weight, [product])
            store_transposed(out_RE, product.psum, block)
        return
    each = P // part
    for first in range(blocks[0], blocks[1], each):
        count = min(each, blocks[1] - first)
        psum_QC = nl.ndarray((count * part, weight.columns), dtype=nl.float32, buffer=nl.psum)
        for i in range(count):
            accumulate(stream, weight, [RowStationary(x_PTR, psum_QC[i * part : (i + 1) * part, :], i * part)])
        store_blocks(out_RE, psum_QC, first, part)


def project_fp8(out_RE, stream, weight, x_PTR):
    """Store the product with FP8 weights, which are stationary: each block is scaled, rounded and transposed to rows.

    A block is transposed after the next one's product: the Tensor Engine does not wait for the rounding.
    """
    groups, before = channel_groups(weight.columns), []
    width = weight.columns // groups
    for block in range(weight.blocks[0], weight.blocks[1]):
        product = WeightStationary(x_PTR, width, groups, False)
        accumulate(stream, weight, [product])
        store_groups(out_RE, block - 1, before)
        before = []
        for j in range(groups):
            rounded_WR = nl.ndarray((width, x_PTR.shape[2]), dtype=out_RE.dtype)
            scale_W1, psum_WR = weight.channels.of_group(block, j), product.psum[j][:, 0, :]
            nisa.tensor_scalar(dst=rounded_WR, data=psum_WR, op0=nl.multiply, operand0=scale_W1)
            before.append(rounded_WR)
    store_groups(out_RE, weight.blocks[1] - 1, before)


def store_groups(out_RE, block, groups_WR):
    """Store the groups of a block's columns, if there are any."""
    if len(groups_WR) > 0:
        width, padded = groups_WR[0].shape
        columns, rows = width * len(groups_WR), out_RE.shape[0]
        rows_RC = nl.ndarray((padded, columns), dtype=out_RE.dtype)
        rows_of_groups(rows_RC, 0, groups_WR)
        dma_static(out_RE[:, block * columns : (block + 1) * columns], rows_RC[0:rows])


def rows_of_groups(rows_RC, first, groups_WR):
    """Transpose groups of columns (W, R) to the columns of rows from `first` on."""
    width, rows = groups_WR[0].shape
    psum_RC = nl.ndarray((rows, width * len(groups_WR)), dtype=rows_RC.dtype, buffer=nl.psum)
    for j in range(len(groups_WR)):
        nisa.nc_transpose(dst=psum_RC[:, j * width : (j + 1) * width], data=groups_WR[j])
    nisa.tensor_copy(dst=rows_RC[0:rows, first : first + width * len(groups_WR)], src=psum_RC)


def store_transposed(out_RE, psum, block):
    """Round one block of columns, PSUM (W, n, R) of each n groups, and store its few rows."""
    width, each, rows = psum[0].shape
    groups = each * len(psum)
    columns = width * groups
    rounded_WRJ = nl.ndarray((width, rows, groups), dtype=out_RE.dtype)
    for i in range(len(psum)):
        rounded_WRN = rounded_WRJ[:, :, i * each : (i + 1) * each]
        nisa.tensor_copy(dst=rounded_WRN, src=psum[i].permute((0, 2, 1)), engine=nisa.engine.vector)
    target = out_RE[:, block * columns : (block + 1) * columns]
    dma_static(target.reshape((rows, width, groups)).permute((1, 0, 2)), rounded_WRJ)


def store_blocks(out_RE, psum_QC, block, part):
    """Round consecutive blocks from number `block` on, on two engines, and store each one's rows."""
    rows, columns = out_RE.shape[0], psum_QC.shape[1]
    rounded_QC, middle = nl.ndarray(psum_QC.shape, dtype=out_RE.dtype), columns // 2
    nisa.tensor_copy(dst=rounded_QC[:, 0:middle], src=psum_QC[:, 0:middle], engine=nisa.engine.vector)
    nisa.tensor_copy(dst=rounded_QC[:, middle:columns], src=psum_QC[:, middle:columns], engine=nisa.engine.scalar)
    for i in range(psum_QC.shape[0] // part):
        start = (block + i) * columns
        dma_static(out_RE[:, start : start + columns], rounded_QC[i * part : i * part + rows, :])
