"""qk-norm and rotary embedding of a decode step's heads, transposed: D on the partitions.

y = w x / sqrt(mean_D x^2 + eps), then (y1 cos - y2 sin, y2 cos + y1 sin) for the halves y1, y2 of a head. Transposed
heads of few rows are few columns. The sum over D is a matmul with ones, which puts it on every partition; the other
half of a head is read from its partitions; the norm's weight is folded into the tables of cosines and sines.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import P, absent, dma_static


class Rotary(nl.NKIObject):
    """Loaded cos and sin (B, N, D / 2), fp32, of some rows, and a matrix of ones, which sums a head, (D, D)."""

    def __init__(self, angles, first, rows):
        self.rows = rows
        self.loaded = (load_angles(angles[0], first, rows), load_angles(angles[1], first, rows))
        # transpose: fp32 (D, R)
        self.cos_DR = None
        self.sin_DR = None
        self.ones_DD = nl.ndarray((P, P), dtype=nl.float32)
        nisa.memset(dst=self.ones_DD, value=1.0)

    def transpose(self):
        """Transpose the angles."""
        if absent(self.cos_DR):
            self.cos_DR = transposed_angles(self.loaded[0], self.rows)
            self.sin_DR = transposed_angles(self.loaded[1], self.rows)


class HeadNorm(nl.NKIObject):
    """One norm's weight times `scale` folded into the tables, fp32 (D, 1, R): w cos, and for a dimension's partner
    w sin, negative from the second half on.
    """

    def __init__(self, weight_1D, rotary, scale=1.0):
        rotary.transpose()
        half, rows = P // 2, rotary.rows
        weight_D1 = nl.ndarray((P, 1), dtype=nl.float32)
        psum_D1 = nl.ndarray((P, 1), dtype=weight_1D.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=psum_D1, data=weight_1D)
        nisa.tensor_copy(dst=weight_D1, src=psum_D1)
        self.cos_D1R = nl.ndarray((P, 1, rows), dtype=nl.float32)
        self.sin_D1R = nl.ndarray((P, 1, rows), dtype=nl.float32)
        if scale != 1.0:
            nisa.tensor_scalar(dst=weight_D1, data=weight_D1, op0=nl.multiply, operand0=scale)
        nisa.tensor_scalar(dst=self.cos_D1R, data=rotary.cos_DR, op0=nl.multiply, operand0=weight_D1)
        nisa.tensor_scalar(dst=self.sin_D1R, data=rotary.sin_DR, op0=nl.multiply, operand0=weight_D1)
        second = self.sin_D1R[half:P]
        nisa.tensor_scalar(dst=second, data=second, op0=nl.multiply, operand0=-1.0)


def load_norm(weight):
    """The weight (D,) of a head norm: (1, D)."""
    weight_1D = nl.ndarray((1, P), dtype=weight.dtype)
    dma_static(weight_1D, weight.ap([[P, 1], [1, P]], offset=0))
    return weight_1D


def load_angles(table, first, rows):
    """Cosines or sines (B, N, D / 2) from row `first` on: a list of fp32 (R, 1, D / 2), up to 128 rows each."""
    half, loaded = P // 2, []
    for start in range(0, rows, P):
        count = min(P, rows - start)
        rows_R1D = nl.ndarray((count, 1, half), dtype=nl.float32)
        dma_static(rows_R1D, table.ap([[half, count], [1, half]], offset=(first + start) * half))
        loaded.append(rows_R1D)
    return loaded


def transposed_angles(loaded, rows):
    """Loaded cosines or sines, the same for both halves: fp32 (D, R)."""
    angles_DR = nl.ndarray((P, rows), dtype=nl.float32)
    for i in range(len(loaded)):
        count = loaded[i].shape[0]
        psum_DR = nl.ndarray((P, count), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=psum_DR, data=loaded[i].broadcast(1, 2))
        nisa.tensor_copy(dst=angles_DR[:, i * P : i * P + count], src=psum_DR)
    return angles_DR


class NormAndRotate(nl.NKIObject):
    """Transposed heads, each in PSUM (D, R), times its scale if any, which are normalized and rotated.

    A span (first, last, norm, destination (D, heads, R)) of them shares a norm. The heads lack the factor 1 / rms of
    their row, which cancels but for the norm's eps: the `eps_PR` of `root` replaces it. Copies free PSUM early;
    together the heads have up to 512 columns.
    """

    def __init__(self, psum, scales, spans, rotary, engine=nisa.engine.vector):
        self.spans = spans
        self.rotary = rotary
        self.shape = (P, len(psum), psum[0].shape[1])
        self.x_DHR = nl.ndarray(self.shape, dtype=nl.float32)
        self.square_DHR = nl.ndarray(self.shape, dtype=nl.float32)
        # sum; rotate: fp32 (D, heads, R)
        self.sum_psum_DHR = None
        self.rotated_DHR = None
        self.sine_DHR = None
        for head in range(len(psum)):
            if len(scales) > 0:
                nisa.tensor_scalar(dst=self.x_DHR[:, head, :], data=psum[head], op0=nl.multiply, operand0=scales[head])
            else:
                nisa.tensor_copy(dst=self.x_DHR[:, head, :], src=psum[head], engine=engine)
        if engine == nisa.engine.vector:
            nisa.tensor_tensor(dst=self.square_DHR, data1=self.x_DHR, data2=self.x_DHR, op=nl.multiply)
        else:
            nisa.activation(dst=self.square_DHR, op=nl.square, data=self.x_DHR)

    def sum(self):
        """The sum of the squares on all partitions: PSUM fp32 (D, heads, R)."""
        self.sum_psum_DHR = nl.ndarray(self.shape, dtype=nl.float32, buffer=nl.psum)
        # fp32 in one pass, since the other operand is ones
        nisa.nc_matmul(
            dst=self.sum_psum_DHR,
            stationary=self.rotary.ones_DD,
            moving=self.square_DHR,
            is_stationary_onezero=True,
            accumulate=False,
        )

    def rotate(self):
        """The two terms of the rotation."""
        half = P // 2
        self.rotated_DHR = nl.ndarray(self.shape, dtype=nl.float32)
        self.sine_DHR = nl.ndarray(self.shape, dtype=nl.float32)
        for span in self.spans:
            heads, count, norm = slice(span[0], span[1]), span[1] - span[0], span[2]
            x_DHR, cos = self.x_DHR[:, heads, :], norm.cos_D1R.broadcast(1, count)
            nisa.tensor_tensor(dst=self.rotated_DHR[:, heads, :], data1=x_DHR, data2=cos, op=nl.multiply)
            for first in (0, half):
                partner = slice(half - first, P - first)
                nisa.tensor_tensor(
                    dst=self.sine_DHR[first : first + half, heads, :],
                    data1=self.x_DHR[partner, heads, :],
                    data2=norm.sin_D1R[partner].broadcast(1, count),
                    op=nl.multiply,
                )

    def root(self, eps_PR):
        """1 / sqrt of the means."""
        # the squares are not needed again
        root_DHR, eps_DHR = self.square_DHR, eps_PR.expand_dim(1).broadcast(1, self.shape[1])
        nisa.scalar_tensor_tensor(
            dst=root_DHR, data=self.sum_psum_DHR, op0=nl.multiply, operand0=1.0 / P, op1=nl.add, operand1=eps_DHR
        )
        nisa.tensor_scalar(dst=root_DHR, data=root_DHR, op0=nl.rsqrt, operand0=None, engine=nisa.engine.gpsimd)

    def store(self):
        """Store the heads to their destinations."""
        rotated_DHR, root_DHR = self.rotated_DHR, self.square_DHR
        nisa.tensor_tensor(dst=rotated_DHR, data1=rotated_DHR, data2=self.sine_DHR, op=nl.add)
        for span in self.spans:
            heads = slice(span[0], span[1])
            nisa.tensor_tensor(dst=span[3], data1=rotated_DHR[:, heads, :], data2=root_DHR[:, heads, :], op=nl.multiply)


def rows_of_heads(x_DGBN):
    """Transposed heads of some sequences (D, G, B, N) as rows again: (B N, G, D)."""
    dim, heads, batch, candidates = x_DGBN.shape
    rows_RGD = nl.ndarray((batch * candidates, heads, dim), dtype=x_DGBN.dtype)
    for head in range(heads):
        psum_RD = nl.ndarray((batch * candidates, dim), dtype=x_DGBN.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=psum_RD, data=x_DGBN[:, head, :, :])
        nisa.tensor_copy(dst=rows_RGD[:, head, :], src=psum_RD)
    return rows_RGD
