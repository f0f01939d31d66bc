"""The rows that a fused decode kernel works on: loading them turned, and their RMSNorm.

norm(x)[e] = gamma[e] x[e] / sqrt(mean_e x[e]^2 + eps). The products that follow are linear, so that gamma goes into
the turned rows and the reciprocal root, one number per row, to the results: it is off the path of the first product.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.layer.stream_weights import turn_rows, turns
from nki_kernels.tiles import PSUM_BANK_BYTES, P, absent, itemsize, move

# rows from this length on are cut in four, so that 32 of them fill the partitions
LONG, CUT = 4096, 4
# short rows are loaded turned, in 128 pieces each, up to this many; more are turned by the Tensor Engine
FEW_ROWS = 16


def sections(hidden):
    """Into how many parts E is cut before each part is spread over the partitions: long rows are turned on chip."""
    if hidden >= LONG and hidden % (CUT * P) == 0:
        return CUT
    return 1


class Loaded(nl.NKIObject):
    """R rows of x (rows, E) in HBM from row `start` on, on chip as they travel fastest."""

    def __init__(self, x, start, rows):
        self.hidden = x.shape[1]
        self.start = start
        self.rows = rows
        # long rows cut over four partitions, up to 32 rows a tile; or all rows (R, E); or few, turned (128, R, T)
        self.tiles = []
        each, shape = rows, (rows, self.hidden)
        if sections(self.hidden) == CUT:
            each = P // CUT
        elif rows <= FEW_ROWS:
            shape = (P, rows, self.hidden // P)
        for first in range(0, rows, each):
            if sections(self.hidden) == CUT:
                shape = (CUT * min(each, rows - first), self.hidden // CUT)
            tile = nl.ndarray(shape, dtype=x.dtype)
            move(tile, self.place(x, first, tile))
            self.tiles.append(tile)

    def place(self, x, first, tile):
        """Where a tile, whose first row is number `first` of these, is in x."""
        offset, tiles = (self.start + first) * self.hidden, self.hidden // P
        if len(tile.shape) == 3:
            return x.ap([[tiles, P], [self.hidden, self.rows], [1, tiles]], offset=offset)
        return x.ap([[tile.shape[1], tile.shape[0]], [1, tile.shape[1]]], offset=offset)

    def turned(self):
        """(128, R, T), T = E / 128: with T = sections * per, place (p, s * per + t) of a row holds its element
        s * E / sections + p * per + t.
        """
        if len(self.tiles[0].shape) == 3:
            return self.tiles[0]
        if sections(self.hidden) == 1:
            return turn_rows(self.tiles[0]).permute((0, 2, 1))
        turned_PRT = nl.ndarray((P, self.rows, self.hidden // P), dtype=self.tiles[0].dtype)
        for i in range(len(self.tiles)):
            turn_long_rows(turned_PRT, self.tiles[i], i * P // CUT)
        return turned_PRT

    def add(self, x):
        """Add the same rows of a different x."""
        others = Loaded(x, self.start, self.rows)
        for i in range(len(self.tiles)):
            nisa.tensor_tensor(dst=self.tiles[i], data1=self.tiles[i], data2=others.tiles[i], op=nl.add)

    def store(self, x):
        """Store the rows to their places in x."""
        first = 0
        for tile in self.tiles:
            move(self.place(x, first, tile), tile)
            first = first + P // CUT


def turn_long_rows(turned_PRT, cut_rows, first):
    """Up to 32 rows, each cut over four partitions (4 R, E / 4), turned by the Tensor Engine: the result's from
    row `first` on.
    """
    tile, part = cut_rows.shape
    count, per = tile // CUT, part // P
    cut_rows = cut_rows.reshape((tile, P, per))
    by_section = turned_PRT.reshape((P, turned_PRT.shape[1], CUT, per))
    each = PSUM_BANK_BYTES // (tile * itemsize(cut_rows.dtype))
    for t in range(0, per, each):
        size = min(each, per - t)
        turned_psum = nl.ndarray((P, size, count, CUT), dtype=cut_rows.dtype, buffer=nl.psum)
        for i in range(size):
            nisa.nc_transpose(dst=turned_psum[:, i, :, :], data=cut_rows[:, :, t + i])
        nisa.tensor_copy(
            dst=by_section[:, first : first + count, :, t : t + size],
            src=turned_psum.permute((0, 2, 3, 1)),
            engine=turns(t // each),
        )


def load_gamma(gamma, dtype):
    """A norm's weight (E,) as (128, E / 128), laid out as the turned rows."""
    hidden = gamma.shape[0]
    cut, tiles = sections(hidden), hidden // P
    gamma_PT = nl.ndarray((P, tiles), dtype=dtype)
    move(gamma_PT, gamma.ap([[tiles // cut, P], [hidden // cut, cut], [1, tiles // cut]], offset=0))
    return gamma_PT


def scaled(turned_PRT, gamma_PT):
    """gamma * x, rounded once to x's dtype: a view (128, E / 128, R)."""
    _, rows, tiles = turned_PRT.shape
    scaled_PRT = nl.ndarray((P, rows, tiles), dtype=turned_PRT.dtype)
    gamma_PRT = gamma_PT.reshape((P, 1, tiles)).broadcast(1, rows)
    nisa.tensor_tensor(dst=scaled_PRT, data1=turned_PRT, data2=gamma_PRT, op=nl.multiply)
    return scaled_PRT.permute((0, 2, 1))


class Normed(nl.NKIObject):
    """Turned rows (128, R, E / 128) under RMSNorm: times gamma, (128, E / 128, R), and on demand their 1 / rms."""

    def __init__(self, turned_PRT, gamma_PT, eps):
        self.eps = eps
        self.hidden = P * turned_PRT.shape[2]
        self.turned_PTR = scaled(turned_PRT, gamma_PT)
        # each row's sum of squares over the elements of a partition: fp32 (128, R)
        self.squares_PR = sums_of_squares(turned_PRT)
        # inverse: fp32 (R, 1); inverse_everywhere and floor: fp32 (128, R); total: PSUM fp32 (128, R)
        self.inverse_R1 = None
        self.inverse_PR = None
        self.floor_PR = None
        self.total_psum_PR = None

    def inverse(self):
        """1 / sqrt(mean x^2 + eps) for each row: fp32 (R, 1).

        Ask after the first product: the sum over the partitions would hold the Tensor Engine back before it.
        """
        if absent(self.inverse_R1):
            ones_P1 = nl.ndarray((P, 1), dtype=nl.float32)
            total_psum_R1 = nl.ndarray((self.squares_PR.shape[1], 1), dtype=nl.float32, buffer=nl.psum)
            nisa.memset(dst=ones_P1, value=1.0)
            nisa.nc_matmul(dst=total_psum_R1, stationary=self.squares_PR, moving=ones_P1, accumulate=False)
            self.inverse_R1 = inverse_root(total_psum_R1, 1.0 / self.hidden, self.eps)
        return self.inverse_R1

    def total(self):
        """Each row's sum of squares on all partitions: PSUM fp32 (128, R). Ask after the first product, too."""
        if absent(self.total_psum_PR):
            ones_PP = nl.ndarray((P, P), dtype=nl.float32)
            self.total_psum_PR = nl.ndarray(self.squares_PR.shape, dtype=nl.float32, buffer=nl.psum)
            nisa.memset(dst=ones_PP, value=1.0)
            nisa.nc_matmul(dst=self.total_psum_PR, stationary=ones_PP, moving=self.squares_PR, accumulate=False)
        return self.total_psum_PR

    def inverse_everywhere(self):
        """`inverse` on all partitions: fp32 (128, R)."""
        if absent(self.inverse_PR):
            self.inverse_PR = inverse_root(self.total(), 1.0 / self.hidden, self.eps)
        return self.inverse_PR

    def floor(self):
        """eps * (mean x^2 + eps) for each row on all partitions, fp32 (128, R): eps in the norm of a head that
        lacks the factor 1 / rms.
        """
        if absent(self.floor_PR):
            self.floor_PR = nl.ndarray(self.squares_PR.shape, dtype=nl.float32)
            nisa.tensor_scalar(
                dst=self.floor_PR,
                data=self.total(),
                op0=nl.multiply,
                operand0=self.eps / self.hidden,
                op1=nl.add,
                operand1=self.eps * self.eps,
            )
        return self.floor_PR


def sums_of_squares(turned_PRT):
    """Each row's sum over the elements of a partition: fp32 (128, R)."""
    _, rows, tiles = turned_PRT.shape
    squares_PRT = nl.ndarray((P, rows, tiles), dtype=nl.float32)
    sums_PR = nl.ndarray((P, rows), dtype=nl.float32)
    nisa.activation(dst=squares_PRT, op=nl.square, data=turned_PRT)
    nisa.tensor_reduce(dst=sums_PR, op=nl.add, data=squares_PRT, axis=2)
    return sums_PR


def inverse_root(total, scale, eps):
    """1 / sqrt(total * scale + eps), fp32: on GpSimd, which needs no table and is the more precise one."""
    mean, inverse = nl.ndarray(total.shape, dtype=nl.float32), nl.ndarray(total.shape, dtype=nl.float32)
    nisa.tensor_scalar(dst=mean, data=total, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=eps)
    nisa.tensor_scalar(dst=inverse, data=mean, op0=nl.rsqrt, operand0=None, engine=nisa.engine.gpsimd)
    return inverse
