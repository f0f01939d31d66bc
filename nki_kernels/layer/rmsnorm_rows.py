"""The rows of a fused decode kernel: transposed loads, the residual, RMSNorm.

norm(x)[e] = gamma[e] x[e] / sqrt(mean_e x[e]^2 + eps). The products that follow are linear: gamma multiplies the
transposed rows, and 1 / rms, one number per row, the results, so that no matmul waits for it.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.layer.weight_stream import alternate_engine, transpose_rows
from nki_kernels.tiles import PSUM_BANK_BYTES, P, absent, dma_static, itemsize

# rows from this length on are split in four, so that 32 of them fill the partitions
LONG_ROW, ROW_SPLIT = 4096, 4
# up to this many short rows are DMA-transposed on load (128 descriptors each), more on the Tensor Engine
FEW_ROWS = 16


def row_splits(hidden):
    """The number of sections of E; each section is laid out over all partitions."""
    if hidden >= LONG_ROW and hidden % (ROW_SPLIT * P) == 0:
        return ROW_SPLIT
    return 1


class ResidualRows(nl.NKIObject):
    """R rows of x (rows, E) in HBM from row `start` on, in the layout that loads fastest."""

    def __init__(self, x, start, rows):
        self.hidden = x.shape[1]
        self.start = start
        self.rows = rows
        # long rows split over four partitions, up to 32 rows a tile; or all rows (R, E); or few, transposed (128, R, T)
        self.tiles = []
        each, shape = rows, (rows, self.hidden)
        if row_splits(self.hidden) == ROW_SPLIT:
            each = P // ROW_SPLIT
        elif rows <= FEW_ROWS:
            shape = (P, rows, self.hidden // P)
        for first in range(0, rows, each):
            if row_splits(self.hidden) == ROW_SPLIT:
                shape = (ROW_SPLIT * min(each, rows - first), self.hidden // ROW_SPLIT)
            tile = nl.ndarray(shape, dtype=x.dtype)
            dma_static(tile, self.in_hbm(x, first, tile))
            self.tiles.append(tile)

    def in_hbm(self, x, first, tile):
        """The elements of x of the tile whose first row is row `start` + `first`."""
        offset, tiles = (self.start + first) * self.hidden, self.hidden // P
        if len(tile.shape) == 3:
            return x.ap([[tiles, P], [self.hidden, self.rows], [1, tiles]], offset=offset)
        return x.ap([[tile.shape[1], tile.shape[0]], [1, tile.shape[1]]], offset=offset)

    def transposed(self):
        """(128, R, T), T = E / 128 = splits * per: (p, r, s * per + t) is x[r, s * E / splits + p * per + t]."""
        if len(self.tiles[0].shape) == 3:
            return self.tiles[0]
        if row_splits(self.hidden) == 1:
            return transpose_rows(self.tiles[0]).permute((0, 2, 1))
        x_PRT = nl.ndarray((P, self.rows, self.hidden // P), dtype=self.tiles[0].dtype)
        for i in range(len(self.tiles)):
            transpose_split_rows(x_PRT, self.tiles[i], i * P // ROW_SPLIT)
        return x_PRT

    def add(self, x):
        """Add the same rows of another tensor."""
        others = ResidualRows(x, self.start, self.rows)
        for i in range(len(self.tiles)):
            nisa.tensor_tensor(dst=self.tiles[i], data1=self.tiles[i], data2=others.tiles[i], op=nl.add)

    def store(self, x):
        """Store the rows to x."""
        for i in range(len(self.tiles)):
            dma_static(self.in_hbm(x, i * P // ROW_SPLIT, self.tiles[i]), self.tiles[i])


def transpose_split_rows(x_PRT, split_rows, first):
    """Up to 32 rows, each split over four partitions (4 R, E / 4), transposed to the rows from `first` on."""
    tile, part = split_rows.shape
    count, per = tile // ROW_SPLIT, part // P
    split_rows = split_rows.reshape((tile, P, per))
    by_section = x_PRT.reshape((P, x_PRT.shape[1], ROW_SPLIT, per))
    each = PSUM_BANK_BYTES // (tile * itemsize(split_rows.dtype))
    for t in range(0, per, each):
        size = min(each, per - t)
        psum = nl.ndarray((P, size, count, ROW_SPLIT), dtype=split_rows.dtype, buffer=nl.psum)
        for i in range(size):
            nisa.nc_transpose(dst=psum[:, i, :, :], data=split_rows[:, :, t + i])
        nisa.tensor_copy(
            dst=by_section[:, first : first + count, :, t : t + size],
            src=psum.permute((0, 2, 3, 1)),
            engine=alternate_engine(t // each),
        )


def load_gamma(gamma, dtype):
    """A norm's weight (E,) as (128, E / 128), laid out as the transposed rows."""
    hidden = gamma.shape[0]
    splits, tiles = row_splits(hidden), hidden // P
    gamma_PT = nl.ndarray((P, tiles), dtype=dtype)
    dma_static(gamma_PT, gamma.ap([[tiles // splits, P], [hidden // splits, splits], [1, tiles // splits]], offset=0))
    return gamma_PT


def scale_by_gamma(x_PRT, gamma_PT):
    """gamma * x, rounded once to x's dtype: a view (128, E / 128, R)."""
    _, rows, tiles = x_PRT.shape
    scaled_PRT = nl.ndarray((P, rows, tiles), dtype=x_PRT.dtype)
    gamma_PRT = gamma_PT.reshape((P, 1, tiles)).broadcast(1, rows)
    nisa.tensor_tensor(dst=scaled_PRT, data1=x_PRT, data2=gamma_PRT, op=nl.multiply)
    return scaled_PRT.permute((0, 2, 1))


def sums_of_squares(x_PRT):
    """Each row's sum over the elements of a partition: fp32 (128, R)."""
    _, rows, tiles = x_PRT.shape
    squares_PRT, sums_PR = nl.ndarray((P, rows, tiles), dtype=nl.float32), nl.ndarray((P, rows), dtype=nl.float32)
    nisa.activation(dst=squares_PRT, op=nl.square, data=x_PRT)
    nisa.tensor_reduce(dst=sums_PR, op=nl.add, data=squares_PRT, axis=2)
    return sums_PR


class RMSNormRows(nl.NKIObject):
    """Rows times gamma, (128, E / 128, R), and on demand their 1 / rms.

    squares_PR is each row's sum of squares over the elements of a partition, fp32 (128, R). 1 / rms comes after the
    first product: the sum over the partitions would delay the Tensor Engine before it.
    """

    def __init__(self, scaled_PTR, squares_PR, eps):
        self.eps = eps
        self.hidden = P * scaled_PTR.shape[1]
        self.scaled_PTR = scaled_PTR
        self.squares_PR = squares_PR
        # inv_rms: fp32 (R, 1); sum_all_partitions: PSUM fp32 (128, R); the others on all partitions: fp32 (128, R)
        self.inv_rms_R1 = None
        self.sum_psum_PR = None
        self.inv_rms_PR = None
        self.eps_PR = None

    def inv_rms(self):
        """1 / sqrt(mean x^2 + eps) for each row: fp32 (R, 1)."""
        if absent(self.inv_rms_R1):
            ones_P1 = nl.ndarray((P, 1), dtype=nl.float32)
            sum_psum_R1 = nl.ndarray((self.squares_PR.shape[1], 1), dtype=nl.float32, buffer=nl.psum)
            nisa.memset(dst=ones_P1, value=1.0)
            nisa.nc_matmul(dst=sum_psum_R1, stationary=self.squares_PR, moving=ones_P1, accumulate=False)
            self.inv_rms_R1 = inverse_root(sum_psum_R1, 1.0 / self.hidden, self.eps)
        return self.inv_rms_R1

    def sum_all_partitions(self):
        """Each row's sum of squares on all partitions: PSUM fp32 (128, R)."""
        if absent(self.sum_psum_PR):
            ones_PP = nl.ndarray((P, P), dtype=nl.float32)
            self.sum_psum_PR = nl.ndarray(self.squares_PR.shape, dtype=nl.float32, buffer=nl.psum)
            nisa.memset(dst=ones_PP, value=1.0)
            nisa.nc_matmul(dst=self.sum_psum_PR, stationary=ones_PP, moving=self.squares_PR, accumulate=False)
        return self.sum_psum_PR

    def inv_rms_all_partitions(self):
        """1 / rms on all partitions: fp32 (128, R)."""
        if absent(self.inv_rms_PR):
            self.inv_rms_PR = inverse_root(self.sum_all_partitions(), 1.0 / self.hidden, self.eps)
        return self.inv_rms_PR

    def eps_scaled(self):
        """eps * (mean x^2 + eps), fp32 (128, R): eps in the norm of a head that lacks the row's 1 / rms."""
        if absent(self.eps_PR):
            total_PR, scale, square = self.sum_all_partitions(), self.eps / self.hidden, self.eps**2
            self.eps_PR = nl.ndarray(total_PR.shape, dtype=nl.float32)
            nisa.tensor_scalar(
                dst=self.eps_PR, data=total_PR, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=square
            )
        return self.eps_PR


def rmsnorm(x_PRT, gamma_PT, eps):
    """RMSNorm of transposed rows (128, R, E / 128)."""
    return RMSNormRows(scale_by_gamma(x_PRT, gamma_PT), sums_of_squares(x_PRT), eps)


def inverse_root(total, scale, eps):
    """1 / sqrt(total * scale + eps), fp32: on GpSimd, which needs no activation table and is more precise."""
    mean, inverse = nl.ndarray(total.shape, dtype=nl.float32), nl.ndarray(total.shape, dtype=nl.float32)
    nisa.tensor_scalar(dst=mean, data=total, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=eps)
    nisa.tensor_scalar(dst=inverse, data=mean, op0=nl.rsqrt, operand0=None, engine=nisa.engine.gpsimd)
    return inverse
