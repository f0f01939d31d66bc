"""The attention half of a decoder layer for few rows: RMSNorm, QKV, qk-norm, RoPE, cache, attention, output.

out[r] = concat_h softmax(q_h[r] K^T / sqrt(D)) V  Wo,  [v k q][r] = n[r] W,  n[r] = gamma x[r] / rms(x[r])
q and k are normed per head over D, then rotated by their position; k and v are written to the cache first

x (R, E) are the R = B * N <= 128 rows of B sequences of N; out (R, E) is the rank's partial sum, which the graph sums
over the ranks and adds to x. Row n of sequence b is in slot positions[b, 0] + n. Attention itself is
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

from nki_kernels.attention.cache import Cache
from nki_kernels.attention.pipeline import attend, chunks_of
from nki_kernels.attention.rows import first_slots, groups_of_core, tiling
from nki_kernels.attention.state import Launch
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
from nki_kernels.layer.stream_columns import store_turned_block, turned_product
from nki_kernels.layer.stream_rows import Normed, sections
from nki_kernels.layer.stream_weights import Stream, pieces, product
from nki_kernels.tiles import BANK, P, move, share_of_core, warm_up


class Heads(nl.NKIObject):
    """The rows' heads in the order v, k, q, `width` in a block, and the stream of weights that makes them."""

    def __init__(self, weight, values_BGSD, rows, slots_R1, norms):
        self.mine = share_of_core(weight.shape[0])
        self.stream = Stream(pieces(weight, self.mine, sections(weight.shape[1]), tail=True))
        self.kv = values_BGSD.shape[1]
        self.dim = values_BGSD.shape[3]
        self.width = weight.shape[2] // self.dim
        self.values_BGSD = values_BGSD
        # Normed rows, their slots, the Norms of keys and queries
        self.rows = rows
        self.slots_R1 = slots_R1
        self.norms = norms

    def make(self, rotary, handed):
        """This core's blocks. Heads are finished together: when 128 columns wait, behind the next product, or last."""
        first, waiting, rows = 0, [], self.rows.turned_PTR.shape[2]
        for block in range(self.mine[0], self.mine[1]):
            part_psum_RC = product(self.stream, self.rows.turned_PTR)
            if len(waiting) * rows >= P or (len(waiting) + self.width) * rows > BANK:
                self.finish(waiting, first, rotary, handed)
                waiting = []
            if len(waiting) == 0:
                first = max(block * self.width, self.kv)
            self.scale(part_psum_RC, block * self.width, waiting)
        if len(waiting) > 0:
            self.finish(waiting, first, rotary, handed)

    def scale(self, part_psum_RC, head, waiting):
        """Values of a block of heads from `head` on go to the cache, keys and queries to those that are waiting."""
        values, inverse_R1 = min(max(self.kv - head, 0), self.width), self.rows.inverse()
        if values > 0:
            rows_RHD = nl.ndarray((part_psum_RC.shape[0], values, self.dim), dtype=self.values_BGSD.dtype)
            product_RC = part_psum_RC[:, 0 : values * self.dim]
            nisa.activation(dst=rows_RHD, op=nl.copy, data=product_RC, scale=inverse_R1)
            append_value_rows(self.values_BGSD, rows_RHD, head, self.slots_R1)
        if values < self.width:
            scaled_RHD = scaled_heads(part_psum_RC[:, values * self.dim : self.width * self.dim], inverse_R1)
            for i in range(self.width - values):
                waiting.append(scaled_RHD[:, i, :])

    def finish(self, waiting, first, rotary, handed):
        """Turn, norm and rotate heads `first` and on."""
        last, middle, spans = first + len(waiting), 2 * self.kv, []
        if first < middle:
            stop = min(last, middle) - first
            keys = handed.k_DBGN[:, :, first - self.kv : first - self.kv + stop, :]
            spans.append(Span(0, stop, self.norms[0], keys))
        if last > middle:
            start = max(middle - first, 0)
            queries = handed.q_DBHN[:, :, first + start - middle : last - middle, :]
            spans.append(Span(start, len(waiting), self.norms[1], queries))
        norm_and_rotate(turn_heads(waiting), spans, rotary, self.rows.eps)


def attend_groups(handed, cache, positions, t, attended_BHND):
    """Attention of this core's groups; returns its chunks, whose packs hold the result."""
    first, last = groups_of_core(t)
    chunks = []
    if first < last:
        chunks = chunks_of(handed.queries()[:, first * t.queries : last * t.queries], t, first, last)
        slots_1B = first_slots(positions)
        store = Cache(cache[0], cache[1], slots_1B, t)
        store.hold_new_keys(handed.keys(), 0)
        attend(Launch(t, store, (positions, None, slots_1B), (attended_BHND, None)), chunks)
    return chunks


@nki.jit
def decode_attention_kernel(x, norms, weights, angles, cache, positions, eps=1e-6):
    """out (R, E) from x (R, E), norms (gamma (E,), of k (D,), of q (D,)), weights (qkv, out), angles (cos, sin).

    positions (B, N) int32; positions[b, 0] + N <= S. The cache (keys, values) changes in place.
    """
    batch, kv, length, dim = cache[1].shape
    total = weights[0].shape[0] * weights[0].shape[2] // dim
    out_RE = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    shape = (batch, total - 2 * kv, positions.shape[1], dim)
    # attention stores what its packs also keep; the copy in HBM is read by nobody
    attended_BHND = nl.ndarray(shape, dtype=x.dtype, buffer=nl.private_hbm)
    warm_up(nl.exp)
    rows, slots_R1 = Normed(x, norms[0], eps), nl.ndarray((x.shape[0], 1), dtype=nl.int32)
    move(slots_R1, positions.ap([[1, x.shape[0]], [1, 1]], offset=0))
    rotary = Rotary(angles, x.shape[0])
    heads = Heads(weights[0], cache[1], rows, slots_R1, (Norm(norms[1], rotary), Norm(norms[2], rotary)))
    heads.stream.fill()
    handed = Turned(shape, kv, x.dtype)
    heads.make(rotary, handed)
    handed.exchange(cache[1])
    chunks = attend_groups(handed, cache, positions, tiling(attended_BHND, kv, length), attended_BHND)
    mine = share_of_core(weights[1].shape[0])
    stream = Stream(pieces(weights[1], mine, tail=True))
    stream.fill()
    attended_DHR = handed.collect(chunks)
    for block in range(mine[0], mine[1]):
        store_turned_block(out_RE, turned_product(stream, attended_DHR), block)
    return out_RE
