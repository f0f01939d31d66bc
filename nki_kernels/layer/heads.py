"""The heads of a fused decode step, turned: qk-norm and rotary embedding with D on the partitions.

y = w x / sqrt(mean_D x^2 + eps), then (y1 cos - y2 sin, y2 cos + y1 sin) for the halves y1, y2 of a head. Turned, the
heads of few rows are a few columns. The mean over D is a product with 1 / D, which puts it on every partition; the
other half of a head is read from its partitions; the norm's weight is in the tables of cosines and sines.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import P, move


class Rotary(nl.NKIObject):
    """cos and sin (B, N, D / 2) turned, fp32 (D, R), and a matrix of 1 / D, which sums a head's mean, (D, D)."""

    def __init__(self, angles, first, rows):
        self.cos_DR = turned_angles(angles[0], first, rows)
        self.sin_DR = turned_angles(angles[1], first, rows)
        self.mean_DD = nl.ndarray((P, P), dtype=nl.float32)
        nisa.memset(dst=self.mean_DD, value=1.0 / P)


class Norm(nl.NKIObject):
    """One norm's weight in the tables: w cos, and the factor for a dimension's partner, -w sin from the second half
    on and w sin from the first: fp32 (D, 1, R).
    """

    def __init__(self, loaded_1D, rotary):
        half, rows = P // 2, rotary.cos_DR.shape[1]
        weight_D1 = nl.ndarray((P, 1), dtype=nl.float32)
        psum_D1 = nl.ndarray((P, 1), dtype=loaded_1D.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=psum_D1, data=loaded_1D)
        nisa.tensor_copy(dst=weight_D1, src=psum_D1)
        self.cos_D1R = nl.ndarray((P, 1, rows), dtype=nl.float32)
        self.sin_D1R = nl.ndarray((P, 1, rows), dtype=nl.float32)
        nisa.tensor_scalar(dst=self.cos_D1R, data=rotary.cos_DR, op0=nl.multiply, operand0=weight_D1)
        nisa.tensor_scalar(dst=self.sin_D1R, data=rotary.sin_DR, op0=nl.multiply, operand0=weight_D1)
        second = self.sin_D1R[half:P]
        nisa.tensor_scalar(dst=second, data=second, op0=nl.multiply, operand0=-1.0)


def load_norm(weight):
    """The weight (D,) of a norm of heads: (1, D)."""
    loaded_1D = nl.ndarray((1, P), dtype=weight.dtype)
    move(loaded_1D, weight.ap([[P, 1], [1, P]], offset=0))
    return loaded_1D


def turned_angles(table, first, rows):
    """Cosines or sines (B, N, D / 2) from row `first` on, the same for both halves: fp32 (D, R)."""
    half = P // 2
    rows_R1D, turned_DR = nl.ndarray((rows, 1, half), dtype=nl.float32), nl.ndarray((P, rows), dtype=nl.float32)
    move(rows_R1D, table.ap([[half, rows], [1, half]], offset=first * half))
    psum_DR = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=psum_DR, data=rows_R1D.broadcast(1, 2))
    nisa.tensor_copy(dst=turned_DR, src=psum_DR)
    return turned_DR


class Span(nl.NKIObject):
    """Neighbouring heads of one kind among those that are worked on together, their norm, and where they go."""

    def __init__(self, start, stop, norm, target_DHR):
        self.start = start
        self.stop = stop
        self.norm = norm
        self.target_DHR = target_DHR


def norm_and_rotate(turned_psum_DHR, spans, rotary, floor_PR):
    """Norm and rotate turned heads in PSUM (D, count, R), each span of them into its place (D, heads, R).

    The heads lack the factor 1 / rms of their row, which only the norm's eps would see: `floor_PR` is in its place.
    """
    shape, half = turned_psum_DHR.shape, P // 2
    square_DHR, mean_psum_DHR = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32, buffer=nl.psum)
    nisa.activation(dst=square_DHR, op=nl.square, data=turned_psum_DHR)
    nisa.nc_matmul(dst=mean_psum_DHR, stationary=rotary.mean_DD, moving=square_DHR, accumulate=False)
    cosine_DHR, sine_DHR = nl.ndarray(shape, dtype=nl.float32), nl.ndarray(shape, dtype=nl.float32)
    for span in spans:
        inside, count = slice(span.start, span.stop), span.stop - span.start
        plain, cos = turned_psum_DHR[:, inside, :], span.norm.cos_D1R.broadcast(1, count)
        nisa.tensor_tensor(dst=cosine_DHR[:, inside, :], data1=plain, data2=cos, op=nl.multiply)
        for first in (0, half):
            partner = slice(half - first, P - first)
            nisa.tensor_tensor(
                dst=sine_DHR[first : first + half, inside, :],
                data1=turned_psum_DHR[partner, inside, :],
                data2=span.norm.sin_D1R[partner].broadcast(1, count),
                op=nl.multiply,
            )
    root_DHR = nl.ndarray(shape, dtype=nl.float32)
    floor_DHR = floor_PR.expand_dim(1).broadcast(1, shape[1])
    nisa.tensor_tensor(dst=root_DHR, data1=mean_psum_DHR, data2=floor_DHR, op=nl.add)
    nisa.tensor_scalar(dst=root_DHR, data=root_DHR, op0=nl.rsqrt, operand0=None, engine=nisa.engine.gpsimd)
    nisa.tensor_tensor(dst=cosine_DHR, data1=cosine_DHR, data2=sine_DHR, op=nl.add)
    for span in spans:
        inside = slice(span.start, span.stop)
        nisa.tensor_tensor(
            dst=span.target_DHR, data1=cosine_DHR[:, inside, :], data2=root_DHR[:, inside, :], op=nl.multiply
        )


def rows_of_heads(turned_DGBN):
    """Turned heads of some sequences (D, G, B, N) as rows again: (B N, G, D)."""
    dim, heads, batch, candidates = turned_DGBN.shape
    rows_RGD = nl.ndarray((batch * candidates, heads, dim), dtype=turned_DGBN.dtype)
    for head in range(heads):
        psum_RD = nl.ndarray((batch * candidates, dim), dtype=turned_DGBN.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=psum_RD, data=turned_DGBN[:, head, :, :])
        nisa.tensor_copy(dst=rows_RGD[:, head, :], src=psum_RD)
    return rows_RGD
