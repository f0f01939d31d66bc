"""The heads of a fused decode step, turned: qk-norm and rotary embedding with D on the partitions.

y = w x / sqrt(mean_D x^2 + eps), then (y1 cos - y2 sin, y2 cos + y1 sin) for the halves y1, y2 of a head. Turned, the
heads of few rows are a few columns. The sum over D is a product with ones, which puts it on every partition, and the
other half comes by a product with a permutation; the norm's weight is in the tables of cosines and sines.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.rows import P, move, ramp
from nki_kernels.layer.stream_rows import inverse_root


class Rotary(nl.NKIObject):
    """cos and sin (B, N, D / 2) turned, fp32 (D, R), and the matrices of ones and of exchanged halves, (D, D)."""

    def __init__(self, angles, rows):
        self.cos = turned_angles(angles[0], rows)
        self.sin = turned_angles(angles[1], rows)
        self.ones = nl.ndarray((P, P), dtype=nl.float32)
        nisa.memset(dst=self.ones, value=1.0)
        self.swap = nl.ndarray((P, P), dtype=nl.float32)
        distance = nl.ndarray((P, P), dtype=nl.float32)
        # zero where the row is the column's partner
        nisa.iota(dst=distance, pattern=[[P // 2, 2], [-1, P // 2]], offset=-P // 2, channel_multiplier=1)
        nisa.tensor_scalar(dst=self.swap, data=distance, op0=nl.equal, operand0=0.0)


class Norm(nl.NKIObject):
    """One norm's weight in the tables: w cos and the signed w sin of the other half, fp32 (D, 1, R)."""

    def __init__(self, weight, rotary):
        half, rows = P // 2, rotary.cos.shape[1]
        loaded, own = nl.ndarray((P, 2), dtype=weight.dtype), nl.ndarray((P, 2), dtype=nl.float32)
        move(loaded[:, 0:1], weight.ap([[1, P], [1, 1]], offset=0))
        for i in range(2):
            move(loaded[i * half : (i + 1) * half, 1:2], weight.ap([[1, half], [1, 1]], offset=(1 - i) * half))
        nisa.tensor_copy(dst=own, src=loaded)
        nisa.tensor_scalar(dst=own[0:half, 1:2], data=own[0:half, 1:2], op0=nl.multiply, operand0=-1.0)
        self.cos = nl.ndarray((P, 1, rows), dtype=nl.float32)
        self.sin = nl.ndarray((P, 1, rows), dtype=nl.float32)
        nisa.tensor_scalar(dst=self.cos, data=rotary.cos, op0=nl.multiply, operand0=own[:, 0:1])
        nisa.tensor_scalar(dst=self.sin, data=rotary.sin, op0=nl.multiply, operand0=own[:, 1:2])


def turned_angles(table, rows):
    """Cosines or sines (B, N, D / 2), the same for both halves: fp32 (D, R)."""
    half = P // 2
    loaded, made = nl.ndarray((rows, 2, half), dtype=nl.float32), nl.ndarray((P, rows), dtype=nl.float32)
    for i in range(2):
        move(loaded[:, i, :], table.ap([[half, rows], [1, half]], offset=0))
    turned = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=loaded)
    nisa.tensor_copy(dst=made, src=turned)
    return made


class Span(nl.NKIObject):
    """Neighbouring heads of one kind among those that are worked on together, their norm, and their place."""

    def __init__(self, start, stop, norm, made):
        self.start = start
        self.stop = stop
        self.norm = norm
        self.made = made


def scaled_heads(part, inverse):
    """Heads side by side (R, count * D) in PSUM, scaled by `inverse` (R, 1): fp32 (R, count, D), by two engines."""
    rows, count = part.shape[0], part.shape[1] // P
    made, middle = nl.ndarray((rows, count, P), dtype=nl.float32), (count + 1) // 2
    nisa.tensor_scalar(dst=made[:, 0:middle, :], data=part[:, 0 : middle * P], op0=nl.multiply, operand0=inverse)
    if middle < count:
        nisa.activation(dst=made[:, middle:count, :], op=nl.copy, data=part[:, middle * P : count * P], scale=inverse)
    return made


def turn_heads(heads):
    """A list of heads (R, D), turned: PSUM fp32 (D, count, R)."""
    turned = nl.ndarray((P, len(heads), heads[0].shape[0]), dtype=nl.float32, buffer=nl.psum)
    for i in range(len(heads)):
        nisa.nc_transpose(dst=turned[:, i, :], data=heads[i])
    return turned


def norm_and_rotate(turned, spans, rotary, eps):
    """Norm and rotate turned heads in PSUM (D, count, R), each span of them into its place (D, B, heads, N)."""
    shape = turned.shape
    plain, square = nl.ndarray(shape, dtype=nl.float32), nl.ndarray(shape, dtype=nl.float32)
    total = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    other = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    nisa.activation(dst=square, op=nl.square, data=turned)
    nisa.tensor_copy(dst=plain, src=turned)
    nisa.nc_matmul(dst=total, stationary=rotary.ones, moving=square, accumulate=False)
    nisa.nc_matmul(dst=other, stationary=rotary.swap, moving=plain, accumulate=False)
    root = inverse_root(total, 1.0 / P, eps)
    straight, crossed = nl.ndarray(shape, dtype=nl.float32), nl.ndarray(shape, dtype=nl.float32)
    for span in spans:
        inside, count = slice(span.start, span.stop), span.stop - span.start
        nisa.tensor_tensor(
            dst=straight[:, inside, :],
            data1=plain[:, inside, :],
            data2=span.norm.cos.broadcast(1, count),
            op=nl.multiply,
        )
        nisa.tensor_tensor(
            dst=crossed[:, inside, :],
            data1=other[:, inside, :],
            data2=span.norm.sin.broadcast(1, count),
            op=nl.multiply,
        )
    nisa.tensor_tensor(dst=straight, data1=straight, data2=crossed, op=nl.add)
    for span in spans:
        inside = slice(span.start, span.stop)
        split = (P, span.stop - span.start, span.made.shape[1], span.made.shape[3])
        nisa.tensor_tensor(
            dst=span.made,
            data1=straight[:, inside, :].reshape(split).permute((0, 2, 1, 3)),
            data2=root[:, inside, :].reshape(split).permute((0, 2, 1, 3)),
            op=nl.multiply,
        )


def append_value_rows(values, made, head, slots):
    """Scatter value rows (R, count, D) of kv heads `head` and on to their slots, int32 (R, 1)."""
    kv_heads, length, dim = values.shape[1], values.shape[2], values.shape[3]
    rows, per_sequence = made.shape[0], made.shape[0] // values.shape[0]
    flat = values.reshape((values.shape[0] * kv_heads * length, dim))
    for i in range(made.shape[1]):
        row = nl.ndarray((rows, 1), dtype=nl.int32)
        first = ramp(rows, per_sequence, kv_heads * length, 0, (head + i) * length)
        nisa.tensor_tensor(dst=row, data1=first, data2=slots, op=nl.add)
        nisa.dma_copy(dst=flat.ap([[dim, rows], [1, dim]], vector_offset=row), src=made[:, i, :])
