"""The attention half of a decoder layer for few rows: RMSNorm, QKV, qk-norm, RoPE, cache, attention, output.

out[r] = concat_h softmax(q_h[r] K^T / sqrt(D)) V  Wo,  [v k q][r] = n[r] W,  n[r] = gamma x[r] / rms(x[r])
q and k are normed per head over D, then rotated by their position; k and v are written to the cache first

x (R, E) are the R = B * N <= 128 rows of B sequences of N; out (R, E) is the rank's partial sum, which the graph sums
over the ranks and adds to x. Row n of sequence b stands in slot positions[b, 0] + n. Attention itself is
verify_attention's, whose law of bits holds here too: a row's bits depend on its own slot and cache alone.
Layouts: weights packed by pack_weights, heads in the order v, k, q; cos and sin (B, N, D / 2); the cache is
keys (B, G, D, S) and values (B, G, S, D).
Two cores: each makes half of the heads, attends half of the groups and makes half of the output columns; in between
they exchange turned tiles. No partial sums are added.
Cost: weights and cache are read once (roofline.decode_attention). Design and timeline: docs/decode_layer.md.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.pipeline import Pack, Rows, Step, attend
from nki_kernels.attention.rows import CHUNK, P, first_and_last, move, tiling
from nki_kernels.attention.verify import Cache
from nki_kernels.layer.handover import Turned
from nki_kernels.layer.heads import (
    Norm,
    Rotary,
    Span,
    append_value_rows,
    norm_and_rotate,
    scaled_heads,
    turn_heads,
)
from nki_kernels.layer.stream_rows import Normed, sections
from nki_kernels.layer.stream_weights import BANK, Stream, half, pieces, product, store_block, warm_up


class Heads(nl.NKIObject):
    """The rows' heads in the order v, k, q, `width` in a block, and the stream of weights that makes them."""

    def __init__(self, weight, values, rows, slots, norms):
        self.mine = half(weight.shape[0])
        self.stream = Stream(pieces(weight, self.mine, sections(weight.shape[1]), tail=True))
        self.kv = values.shape[1]
        self.dim = values.shape[3]
        self.width = weight.shape[2] // self.dim
        self.values = values
        self.rows = rows
        self.slots = slots
        self.norms = norms

    def make(self, rotary, handed):
        """This core's blocks. Heads are finished together: when 128 columns wait, behind the next product, or last."""
        first, waiting, rows = 0, [], self.rows.turned.shape[2]
        for block in range(self.mine[0], self.mine[1]):
            part = product(self.stream, self.rows.turned)
            if len(waiting) * rows >= P or (len(waiting) + self.width) * rows > BANK:
                self.finish(waiting, first, rotary, handed)
                waiting = []
            if len(waiting) == 0:
                first = max(block * self.width, self.kv)
            self.scale(part, block * self.width, waiting)
        if len(waiting) > 0:
            self.finish(waiting, first, rotary, handed)

    def scale(self, part, head, waiting):
        """Values of a block of heads from `head` on go to the cache, keys and queries to those that are waiting."""
        values, inverse = min(max(self.kv - head, 0), self.width), self.rows.inverse()
        if values > 0:
            made = nl.ndarray((part.shape[0], values, self.dim), dtype=self.values.dtype)
            nisa.tensor_scalar(dst=made, data=part[:, 0 : values * self.dim], op0=nl.multiply, operand0=inverse)
            append_value_rows(self.values, made, head, self.slots)
        if values < self.width:
            scaled = scaled_heads(part[:, values * self.dim : self.width * self.dim], inverse)
            for i in range(self.width - values):
                waiting.append(scaled[:, i, :])

    def finish(self, waiting, first, rotary, handed):
        """Turn, norm and rotate heads `first` and on."""
        last, middle, spans = first + len(waiting), 2 * self.kv, []
        if first < middle:
            stop = min(last, middle) - first
            spans.append(Span(0, stop, self.norms[0], handed.k[:, :, first - self.kv : first - self.kv + stop, :]))
        if last > middle:
            start = max(middle - first, 0)
            place = handed.q[:, :, first + start - middle : last - middle, :]
            spans.append(Span(start, len(waiting), self.norms[1], place))
        norm_and_rotate(turn_heads(waiting), spans, rotary, self.rows.eps)


def steps_of(queries, t, first, last):
    """Every chunk of every pack of the groups `first` to `last`, whose turned queries are there."""
    steps = []
    for group in range(first, last, t.pack):
        pack = Pack(group, min(t.pack, last - group))
        pack.q = queries[:, group * t.queries : (group + pack.count) * t.queries]
        for chunk in range((t.slots + CHUNK - 1) // CHUNK):
            steps.append(Step(pack, chunk, t.slots))
    return steps


def attend_groups(handed, cache, positions, t, attended):
    """Attention of this core's groups; returns its steps, whose packs hold the result."""
    first, last = first_and_last(t)
    steps = steps_of(handed.queries(), t, first, last)
    if first < last:
        starts = nl.ndarray((1, positions.shape[0]), dtype=nl.int32)
        move(starts, positions.ap([[0, 1], [t.candidates, positions.shape[0]]], offset=0))
        store = Cache(cache[0], cache[1], starts, t)
        store.first = 0
        store.new = handed.keys()
        attend(Rows(positions, None, attended, None), store, starts, t, steps)
    return steps


@nki.jit
def decode_attention_kernel(x, norms, weights, angles, cache, positions, eps=1e-6):
    """out (R, E) from x (R, E), norms (gamma (E,), of k (D,), of q (D,)), weights (qkv, out), angles (cos, sin).

    positions (B, N) int32; positions[b, 0] + N <= S. The cache (keys, values) changes in place.
    """
    batch, kv, length, dim = cache[1].shape
    total = weights[0].shape[0] * weights[0].shape[2] // dim
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    shape = (batch, total - 2 * kv, positions.shape[1], dim)
    # attention stores what its packs also keep; the copy in HBM is read by nobody
    attended = nl.ndarray(shape, dtype=x.dtype, buffer=nl.private_hbm)
    warm_up(nl.exp)
    rows, slots = Normed(x, norms[0], eps), nl.ndarray((x.shape[0], 1), dtype=nl.int32)
    move(slots, positions.ap([[1, x.shape[0]], [1, 1]], offset=0))
    rotary = Rotary(angles, x.shape[0])
    heads = Heads(weights[0], cache[1], rows, slots, (Norm(norms[1], rotary), Norm(norms[2], rotary)))
    heads.stream.fill()
    handed = Turned(shape, kv, x.dtype)
    heads.make(rotary, handed)
    handed.exchange(cache[1])
    steps = attend_groups(handed, cache, positions, tiling(attended, kv, length), attended)
    mine = half(weights[1].shape[0])
    stream = Stream(pieces(weights[1], mine, tail=True))
    stream.fill()
    turned = handed.collect(steps)
    for block in range(mine[0], mine[1]):
        store_block(out, product(stream, turned), block)
    return out
