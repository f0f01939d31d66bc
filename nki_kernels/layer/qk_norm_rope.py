"""qk-norm and rotary embedding of a decode step's heads, transposed: D on the partitions.

y = w x / sqrt(mean_D x^2 + eps), then (y1 cos - y2 sin, y2 cos + y1 sin) for the halves y1, y2 of a head. Transposed
heads of few rows are few columns. The mean over D is a matmul with 1 / D, which puts it on every partition; the other
half of a head is read from its partitions; the norm's weight is folded into the tables of cosines and sines.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import P, dma_static


class Rotary(nl.NKIObject):
    """Transposed cos and sin (B, N, D / 2), fp32 (D, R), and a matrix of 1 / D, which takes a head's mean, (D, D)."""

    def __init__(self, angles, first, rows):
        self.cos_DR = transposed_angles(angles[0], first, rows)
        self.sin_DR = transposed_angles(angles[1], first, rows)
        self.mean_DD = nl.ndarray((P, P), dtype=nl.float32)
        nisa.memset(dst=self.mean_DD, value=1.0 / P)


class HeadNorm(nl.NKIObject):
    """One norm's weight times `scale` folded into the tables, fp32 (D, 1, R): w cos, and for a dimension's partner
    w sin, negative from the second half on.
    """

    def __init__(self, weight_1D, rotary, scale=1.0):
        half, rows = P // 2, rotary.cos_DR.shape[1]
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


def transposed_angles(table, first, rows):
    """Cosines or sines (B, N, D / 2) from row `first` on, the same for both halves: fp32 (D, R)."""
    half = P // 2
    rows_R1D, angles_DR = nl.ndarray((rows, 1, half), dtype=nl.float32), nl.ndarray((P, rows), dtype=nl.float32)
    dma_static(rows_R1D, table.ap([[half, rows], [1, half]], offset=first * half))
    psum_DR = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=psum_DR, data=rows_R1D.broadcast(1, 2))
    nisa.tensor_copy(dst=angles_DR, src=psum_DR)
    return angles_DR


def norm_and_rotate(psum, scales, spans, rotary, eps_PR):
    """Normalize and rotate transposed heads, each in PSUM (D, R), which a copy frees early, times its scale if any.

    A span (first, last, norm, destination (D, heads, R)) of them shares a norm. The heads lack the factor 1 / rms of
    their row, which cancels but for the norm's eps: `eps_PR` replaces it.
    """
    shape, half = (P, len(psum), eps_PR.shape[1]), P // 2
    x_DHR, square_DHR = nl.ndarray(shape, dtype=nl.float32), nl.ndarray(shape, dtype=nl.float32)
    mean_psum_DHR = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    for head in range(len(psum)):
        if len(scales) > 0:
            nisa.tensor_scalar(dst=x_DHR[:, head, :], data=psum[head], op0=nl.multiply, operand0=scales[head])
        else:
            nisa.tensor_copy(dst=x_DHR[:, head, :], src=psum[head], engine=nisa.engine.vector)
    nisa.tensor_tensor(dst=square_DHR, data1=x_DHR, data2=x_DHR, op=nl.multiply)
    nisa.nc_matmul(dst=mean_psum_DHR, stationary=rotary.mean_DD, moving=square_DHR, accumulate=False)
    rotated_DHR, sine_DHR = nl.ndarray(shape, dtype=nl.float32), nl.ndarray(shape, dtype=nl.float32)
    for span in spans:
        heads, count, norm = slice(span[0], span[1]), span[1] - span[0], span[2]
        cos = norm.cos_D1R.broadcast(1, count)
        nisa.tensor_tensor(dst=rotated_DHR[:, heads, :], data1=x_DHR[:, heads, :], data2=cos, op=nl.multiply)
        for first in (0, half):
            partner = slice(half - first, P - first)
            nisa.tensor_tensor(
                dst=sine_DHR[first : first + half, heads, :],
                data1=x_DHR[partner, heads, :],
                data2=norm.sin_D1R[partner].broadcast(1, count),
                op=nl.multiply,
            )
    # the squares are not needed again
    root_DHR = square_DHR
    eps_DHR = eps_PR.expand_dim(1).broadcast(1, shape[1])
    nisa.tensor_tensor(dst=root_DHR, data1=mean_psum_DHR, data2=eps_DHR, op=nl.add)
    nisa.tensor_scalar(dst=root_DHR, data=root_DHR, op0=nl.rsqrt, operand0=None, engine=nisa.engine.gpsimd)
    nisa.tensor_tensor(dst=rotated_DHR, data1=rotated_DHR, data2=sine_DHR, op=nl.add)
    for span in spans:
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
