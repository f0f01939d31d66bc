"""The scales of an FP8 weight, one fp32 number per output channel: y = (x W) * scale.

W is float8_e4m3, trn2's, whose largest number is 240. The Tensor Engine multiplies FP8 weights by bf16 rows at bf16's
rate; the scale multiplies the fp32 sum in PSUM before anything else does, in decode and in prefill. A scale is
(blocks, 1, C), packed as its weight. Source of the mixed product: gate_up_projection of nki-library's mlp_tkg.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import P, absent, dma_static


def scale_of(scales, number):
    """One of a kernel's optional scales; None without them."""
    if absent(scales):
        return None
    return scales[number]


def channel_groups(columns):
    """The smallest number of equal groups of at most 128 columns."""
    groups = -(-columns // P)
    while columns % groups:
        groups = groups + 1
    return groups


class ChannelScale(nl.NKIObject):
    """The scales of blocks[0] to blocks[1] in groups of W columns, for products with channels on the partitions."""

    def __init__(self, scale, blocks, groups):
        self.first = blocks[0]
        columns, count = scale.shape[2], blocks[1] - blocks[0]
        self.shape = (columns // groups, groups, count)
        # up to 128 blocks each, fp32 (blocks, C)
        self.rows = []
        for start in range(0, count, P):
            rows_BC = nl.ndarray((min(P, count - start), columns), dtype=nl.float32)
            dma_static(
                rows_BC, scale.ap([[columns, rows_BC.shape[0]], [1, columns]], offset=(self.first + start) * columns)
            )
            self.rows.append(rows_BC)
        # transpose: fp32 (W, groups, blocks)
        self.scale_WJB = None

    def transpose(self):
        """Put the loaded scales' channels on the partitions."""
        width, groups, count = self.shape
        self.scale_WJB = nl.ndarray(self.shape, dtype=nl.float32)
        for j in range(groups):
            psum_WB = nl.ndarray((width, count), dtype=nl.float32, buffer=nl.psum)
            for i in range(len(self.rows)):
                rows_BC = self.rows[i]
                part_WB = psum_WB[:, i * P : i * P + rows_BC.shape[0]]
                nisa.nc_transpose(dst=part_WB, data=rows_BC[:, j * width : (j + 1) * width])
            nisa.tensor_copy(dst=self.scale_WJB[:, j, :], src=psum_WB)

    def of_group(self, block, j):
        """The scales of one group of a block: (W, 1)."""
        if absent(self.scale_WJB):
            self.transpose()
        return self.scale_WJB[:, j, block - self.first : block - self.first + 1]


def load_scale_rows(scale, block):
    """A block's scales on all partitions, for products with rows on the partitions: fp32 (128, C), or None."""
    if absent(scale):
        return None
    columns = scale.shape[2]
    scale_PC = nl.ndarray((P, columns), dtype=nl.float32)
    dma_static(scale_PC, scale.ap([[0, P], [1, columns]], offset=block * columns))
    return scale_PC


def scaled(psum_RC, scale_PC):
    """A product times a block's scales, fp32 (R, C) in SBUF; without scales the product itself."""
    if absent(scale_PC):
        return psum_RC
    scaled_RC = nl.ndarray(psum_RC.shape, dtype=nl.float32)
    nisa.tensor_tensor(dst=scaled_RC, data1=psum_RC, data2=scale_PC[0 : psum_RC.shape[0]], op=nl.multiply)
    return scaled_RC
