"""The attention half of a decoder layer for few rows: RMSNorm, QKV, qk-norm, RoPE, cache, attention, output.

out[r] = concat_h softmax(q_h[r] K^T / sqrt(D)) V  Wo,  [v k q][r] = n[r] W,  n[r] = gamma x[r] / rms(x[r])
q and k are normed per head over D, then rotated by their position; k and v are written to the cache first

x (R, E) are the R = B * N <= 128 rows of B sequences of N; out (R, E) is the rank's partial sum, which the graph sums
over the ranks and adds to x. Row n of sequence b is in slot positions[b, 0] + n. Attention itself is in
turned_attention.py, with the cache of verify_attention and its law of bits: a row's bits depend on its own slot and
cache alone. Its sums have a different order than that kernel's, so that the two agree within rounding.
Layouts: weights packed by pack_weights, heads in the order v, k, q; cos and sin (B, N, D / 2); the cache is
keys (B, G, D, S) and values (B, G, S, D).
Two cores: each makes half of the heads, attends half of the groups and makes half of the output columns; in between
they exchange their parts. No partial sums are added.
Cost: weights and cache are read once (roofline.decode_attention). Design and timeline: docs/decode_layer.md.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.cache import Cache
from nki_kernels.attention.pipeline import chunks_of
from nki_kernels.attention.rows import first_slots, groups_of_core, tiling
from nki_kernels.attention.state import Launch
from nki_kernels.layer.handover import Handed
from nki_kernels.layer.heads import Norm, Rotary, Span, append_values, norm_and_rotate, value_rows
from nki_kernels.layer.stream_columns import heads_product, store_turned_block, turned_product
from nki_kernels.layer.stream_rows import Normed, sections
from nki_kernels.layer.stream_weights import Stream, pieces
from nki_kernels.layer.turned_attention import attend, begin
from nki_kernels.tiles import move, share_of_core, warm_up


class Heads(nl.NKIObject):
    """The rows' heads in the order v, k, q, `width` in a block, and the stream of weights that makes them."""

    def __init__(self, weight, kv, dim, rows, norms):
        self.mine = share_of_core(weight.shape[0])
        self.stream = Stream(pieces(weight, self.mine, sections(weight.shape[1]), tail=True))
        self.kv = kv
        self.dim = dim
        self.width = weight.shape[2] // dim
        # Normed rows, the Norms of keys and queries
        self.rows = rows
        self.norms = norms

    def make(self, rotary, handed):
        """This core's blocks, each of whose heads go where they are handed over."""
        for block in range(self.mine[0], self.mine[1]):
            head = block * self.width
            values = min(max(self.kv - head, 0), self.width)
            values_psum_RC, turned_psum_DHR = heads_product(self.stream, self.rows.turned_PTR, values, self.dim)
            if values > 0:
                target = handed.values_RGD[:, head : head + values, :]
                nisa.activation(dst=target, op=nl.copy, data=values_psum_RC, scale=self.rows.inverse())
            if block == max(self.mine[0], (self.kv - 1) // self.width):
                handed.send_values()
            if values < self.width:
                spans = self.spans(head + values, head + self.width, handed)
                norm_and_rotate(turned_psum_DHR, spans, rotary, self.rows.floor())

    def spans(self, first, last, handed):
        """The keys and the queries among the heads `first` to `last`."""
        middle, spans = 2 * self.kv, []
        if first < middle:
            stop = min(last, middle)
            spans.append(Span(0, stop - first, self.norms[0], handed.k_DBGN[:, :, first - self.kv : stop - self.kv, :]))
        if last > middle:
            start = max(middle, first)
            queries = handed.q_DBHN[:, :, start - middle : last - middle, :]
            spans.append(Span(start - first, last - first, self.norms[1], queries))
        return spans


@nki.jit
def decode_attention_kernel(x, norms, weights, angles, cache, positions, eps=1e-6):
    """out (R, E) from x (R, E), norms (gamma (E,), of k (D,), of q (D,)), weights (qkv, out), angles (cos, sin).

    positions (B, N) int32; positions[b, 0] + N <= S. The cache (keys, values) changes in place.
    """
    batch, kv, length, dim = cache[1].shape
    total = weights[0].shape[0] * weights[0].shape[2] // dim
    out_RE = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    shape = (batch, total - 2 * kv, positions.shape[1], dim)
    handed = Handed(shape, kv, x.dtype)
    warm_up(nl.exp)
    rows, slots_R1 = Normed(x, norms[0], eps), nl.ndarray((x.shape[0], 1), dtype=nl.int32)
    move(slots_R1, positions.ap([[1, x.shape[0]], [1, 1]], offset=0))
    rotary = Rotary(angles, x.shape[0])
    heads = Heads(weights[0], kv, dim, rows, (Norm(norms[1], rotary), Norm(norms[2], rotary)))
    heads.stream.fill()
    t, slots_1B = tiling(shape, kv, length), first_slots(positions)
    groups = groups_of_core(t)
    launch = Launch(t, Cache(cache[0], cache[1], slots_1B, t), (positions, None, slots_1B), (None, None))
    launch.cache.hold_new_keys(handed.keys(), 0)
    mine = share_of_core(weights[1].shape[0])
    stream, chunks = Stream(pieces(weights[1], mine, tail=True)), []
    if groups[0] < groups[1]:
        chunks = chunks_of(handed.queries()[:, groups[0] * t.queries : groups[1] * t.queries], t, groups[0], groups[1])
        first = begin(chunks[0], None, launch)
        places = value_rows(cache[1], slots_R1, groups)
    heads.make(rotary, handed)
    handed.exchange()
    if len(chunks) > 0:
        append_values(cache[1], handed.values_RGD, places, groups)
        attend(launch, chunks, first, handed.attended_DHBN)
    stream.fill()
    attended_DHR = handed.collect()
    for block in range(mine[0], mine[1]):
        store_turned_block(out_RE, turned_product(stream, attended_DHR), block)
    return out_RE
