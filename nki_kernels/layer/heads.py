"""The heads of a fused decode step, turned: qk-norm and rotary embedding with D on the partitions.

y = w x / sqrt(mean_D x^2 + eps), then (y1 cos - y2 sin, y2 cos + y1 sin) for the halves y1, y2 of a head. Turned, the
heads of few rows are a few columns. The sum over D is a product with ones, which puts it on every partition, and the
other half comes by a product with a permutation; the norm's weight is in the tables of cosines and sines.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.layer.stream_rows import inverse_root
from nki_kernels.tiles import P, move, ramp


class Rotary(nl.NKIObject):
    """cos and sin (B, N, D / 2) turned, fp32 (D, R), and the matrices of ones and of exchanged halves, (D, D)."""

    def __init__(self, angles, rows):
        self.cos_DR = turned_angles(angles[0], rows)
        self.sin_DR = turned_angles(angles[1], rows)
        self.ones_DD = nl.ndarray((P, P), dtype=nl.float32)
        nisa.memset(dst=self.ones_DD, value=1.0)
        self.swap_DD = nl.ndarray((P, P), dtype=nl.float32)
        distance_DD = nl.ndarray((P, P), dtype=nl.float32)
        # zero where the row is the column's partner
        nisa.iota(dst=distance_DD, pattern=[[P // 2, 2], [-1, P // 2]], offset=-P // 2, channel_multiplier=1)
        nisa.tensor_scalar(dst=self.swap_DD, data=distance_DD, op0=nl.equal, operand0=0.0)


class Norm(nl.NKIObject):
    """One norm's weight in the tables: w cos and the signed w sin of the other half, fp32 (D, 1, R)."""

    def __init__(self, weight, rotary):
        half, rows = P // 2, rotary.cos_DR.shape[1]
        # row 0: each dimension's weight; row 1: its partner's
        loaded_2D, weights_D2 = nl.ndarray((2, P), dtype=weight.dtype), nl.ndarray((P, 2), dtype=nl.float32)
        move(loaded_2D[0:1, :], weight.ap([[P, 1], [1, P]], offset=0))
        for i in range(2):
            partner = weight.ap([[half, 1], [1, half]], offset=(1 - i) * half)
            move(loaded_2D[1:2, i * half : (i + 1) * half], partner)
        psum_D2 = nl.ndarray((P, 2), dtype=weight.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=psum_D2, data=loaded_2D)
        nisa.tensor_copy(dst=weights_D2, src=psum_D2)
        first_half = weights_D2[0:half, 1:2]
        nisa.tensor_scalar(dst=first_half, data=first_half, op0=nl.multiply, operand0=-1.0)
        self.cos_D1R = nl.ndarray((P, 1, rows), dtype=nl.float32)
        self.sin_D1R = nl.ndarray((P, 1, rows), dtype=nl.float32)
        nisa.tensor_scalar(dst=self.cos_D1R, data=rotary.cos_DR, op0=nl.multiply, operand0=weights_D2[:, 0:1])
        nisa.tensor_scalar(dst=self.sin_D1R, data=rotary.sin_DR, op0=nl.multiply, operand0=weights_D2[:, 1:2])


def turned_angles(table, rows):
    """Cosines or sines (B, N, D / 2), the same for both halves: fp32 (D, R)."""
    half = P // 2
    rows_R1D, turned_DR = nl.ndarray((rows, 1, half), dtype=nl.float32), nl.ndarray((P, rows), dtype=nl.float32)
    move(rows_R1D, table.ap([[half, rows], [1, half]], offset=0))
    psum_DR = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=psum_DR, data=rows_R1D.broadcast(1, 2))
    nisa.tensor_copy(dst=turned_DR, src=psum_DR)
    return turned_DR


class Span(nl.NKIObject):
    """Neighbouring heads of one kind among those that are worked on together, their norm, and where they go."""

    def __init__(self, start, stop, norm, target_DBHN):
        self.start = start
        self.stop = stop
        self.norm = norm
        self.target_DBHN = target_DBHN


def scaled_heads(part_psum, inverse_R1):
    """Heads side by side (R, count * D) in PSUM, times `inverse_R1`: fp32 (R, count, D), by two engines."""
    rows, count = part_psum.shape[0], part_psum.shape[1] // P
    heads_RHD, middle = nl.ndarray((rows, count, P), dtype=nl.float32), (count + 1) // 2
    first = part_psum[:, 0 : middle * P]
    nisa.tensor_scalar(dst=heads_RHD[:, 0:middle, :], data=first, op0=nl.multiply, operand0=inverse_R1)
    if middle < count:
        rest = part_psum[:, middle * P : count * P]
        nisa.activation(dst=heads_RHD[:, middle:count, :], op=nl.copy, data=rest, scale=inverse_R1)
    return heads_RHD


def turn_heads(heads):
    """A list of heads (R, D), turned: PSUM fp32 (D, count, R)."""
    turned_psum_DHR = nl.ndarray((P, len(heads), heads[0].shape[0]), dtype=nl.float32, buffer=nl.psum)
    for i in range(len(heads)):
        nisa.nc_transpose(dst=turned_psum_DHR[:, i, :], data=heads[i])
    return turned_psum_DHR


def norm_and_rotate(turned_psum_DHR, spans, rotary, eps):
    """Norm and rotate turned heads in PSUM (D, count, R), each span of them into its place (D, B, heads, N)."""
    shape = turned_psum_DHR.shape
    plain_DHR, square_DHR = nl.ndarray(shape, dtype=nl.float32), nl.ndarray(shape, dtype=nl.float32)
    total_psum_DHR = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    partner_psum_DHR = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    nisa.activation(dst=square_DHR, op=nl.square, data=turned_psum_DHR)
    nisa.tensor_copy(dst=plain_DHR, src=turned_psum_DHR)
    nisa.nc_matmul(dst=total_psum_DHR, stationary=rotary.ones_DD, moving=square_DHR, accumulate=False)
    nisa.nc_matmul(dst=partner_psum_DHR, stationary=rotary.swap_DD, moving=plain_DHR, accumulate=False)
    root_DHR = inverse_root(total_psum_DHR, 1.0 / P, eps)
    cosine_DHR, sine_DHR = nl.ndarray(shape, dtype=nl.float32), nl.ndarray(shape, dtype=nl.float32)
    for span in spans:
        inside, count = slice(span.start, span.stop), span.stop - span.start
        plain, cos = plain_DHR[:, inside, :], span.norm.cos_D1R.broadcast(1, count)
        partner, sin = partner_psum_DHR[:, inside, :], span.norm.sin_D1R.broadcast(1, count)
        nisa.tensor_tensor(dst=cosine_DHR[:, inside, :], data1=plain, data2=cos, op=nl.multiply)
        nisa.tensor_tensor(dst=sine_DHR[:, inside, :], data1=partner, data2=sin, op=nl.multiply)
    nisa.tensor_tensor(dst=cosine_DHR, data1=cosine_DHR, data2=sine_DHR, op=nl.add)
    for span in spans:
        inside, target = slice(span.start, span.stop), span.target_DBHN
        split = (P, span.stop - span.start, target.shape[1], target.shape[3])
        nisa.tensor_tensor(
            dst=target,
            data1=cosine_DHR[:, inside, :].reshape(split).permute((0, 2, 1, 3)),
            data2=root_DHR[:, inside, :].reshape(split).permute((0, 2, 1, 3)),
            op=nl.multiply,
        )


def append_value_rows(values_BGSD, rows_RHD, head, slots_R1):
    """Scatter value rows (R, count, D) of kv heads `head` and on to their slots, int32 (R, 1)."""
    batch, kv_heads, length, dim = values_BGSD.shape
    rows, heads, _ = rows_RHD.shape
    flat = values_BGSD.reshape((batch * kv_heads * length, dim))
    for i in range(heads):
        row_R1 = nl.ndarray((rows, 1), dtype=nl.int32)
        first_R1 = ramp(rows, rows // batch, kv_heads * length, 0, (head + i) * length)
        nisa.tensor_tensor(dst=row_R1, data1=first_R1, data2=slots_R1, op=nl.add)
        nisa.dma_copy(dst=flat.ap([[dim, rows], [1, dim]], vector_offset=row_R1), src=rows_RHD[:, i, :])
