"""The attention half of a decoder layer for few rows: RMSNorm, QKV, qk-norm, RoPE, cache, attention, output.

out[r] = concat_h softmax(q_h[r] K^T / sqrt(D)) V  Wo,  [v k q][r] = n[r] W,  n[r] = gamma x[r] / rms(x[r])
q and k are normed per head over D, then rotated by their position; k and v are written to the cache first

x (R, E) are the R = B * N <= 128 rows of B sequences of N; out (R, E) is the rank's partial sum, which the graph sums
over the ranks and adds to x. Row n of sequence b is in slot positions[b, 0] + n. Attention itself is in
turned_attention.py, with the cache of verify_attention and its law of bits: a row's bits depend on its own slot and
cache alone. Its sums have a different order than that kernel's, so that the two agree within rounding.
Layouts: weights packed by pack_weights, heads in the order v, k, q; cos and sin (B, N, D / 2); the cache is
keys (B, G, D, S) and values (B, G, S, D).
Two cores: each attends half of the sequences; handover.py says who makes their heads and their output.
Cost: weights and cache are read once (roofline.decode_attention); a weight that is cheap enough, once by each core.
Design and timeline: docs/decode_layer.md.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.blocks import BLOCK
from nki_kernels.attention.pipeline import chunks_of
from nki_kernels.attention.rows import first_slots, tiling
from nki_kernels.attention.state import Launch
from nki_kernels.layer.handover import Division, Handed
from nki_kernels.layer.heads import Norm, Rotary, Span, norm_and_rotate
from nki_kernels.layer.stream_columns import heads_product
from nki_kernels.layer.stream_output import store_product
from nki_kernels.layer.stream_rows import Normed, sections
from nki_kernels.layer.stream_weights import Stream, pieces
from nki_kernels.layer.turned_attention import attend, begin, set_limits
from nki_kernels.layer.turned_blocks import Blocks
from nki_kernels.tiles import warm_up


class Heads(nl.NKIObject):
    """The rows' heads in the order v, k, q, `width` in a block, and the stream of weights that makes them."""

    def __init__(self, weight, handed, rows, norms):
        self.mine = handed.division.blocks(weight, handed.division.shares_heads)
        self.stream = Stream(pieces(weight, self.mine, sections(weight.shape[1]), tail=True))
        self.handed = handed
        self.width = weight.shape[2] // handed.heads_DHBN.shape[0]
        # Normed rows, the Norms of keys and queries
        self.rows = rows
        self.norms = norms

    def make(self, rotary):
        """This core's blocks, each of whose heads go to their places."""
        dim, heads, batch, candidates = self.handed.heads_DHBN.shape
        heads_DHR, kv = self.handed.heads_DHBN.reshape((dim, heads, batch * candidates)), self.handed.kv
        for block in range(self.mine[0], self.mine[1]):
            head = block * self.width
            values, psum_DHR = min(max(kv - head, 0), self.width), heads_product(self.stream, self.rows.turned_PTR, dim)
            if values > 0:
                inverse_PHR = self.rows.inverse_everywhere().expand_dim(1).broadcast(1, values)
                target = heads_DHR[:, head : head + values, :]
                nisa.tensor_tensor(dst=target, data1=psum_DHR[:, 0:values, :], data2=inverse_PHR, op=nl.multiply)
            if values < self.width:
                spans = self.spans(head + values, head + self.width, heads_DHR)
                norm_and_rotate(psum_DHR[:, values : self.width, :], spans, rotary, self.rows.floor())

    def spans(self, first, last, heads_DHR):
        """The keys and the queries among the heads `first` to `last`."""
        middle, spans = 2 * self.handed.kv, []
        if first < middle:
            stop = min(last, middle)
            spans.append(Span(0, stop - first, self.norms[0], heads_DHR[:, first:stop, :]))
        if last > middle:
            start = max(middle, first)
            spans.append(Span(start - first, last - first, self.norms[1], heads_DHR[:, start:last, :]))
        return spans


@nki.jit
def decode_attention_kernel(
    x, gamma, k_norm, q_norm, qkv, out_weight, cos, sin, k_pages, v_pages, positions, block_table, eps=1e-6
):
    """out (R, E) from x (R, E), gamma (E,), k_norm and q_norm (D,), packed weights, cos and sin (B, N, D / 2).

    positions (B, N) int32, block_table (B, S / 128) int32, S a multiple of 1024. The pools k_pages and v_pages
    (blocks, G, 128, D) change in place.
    """
    weights, pools = (qkv, out_weight), (k_pages, v_pages)
    _, kv, _, dim = k_pages.shape
    heads, batch, candidates = weights[1].shape[1] // dim, positions.shape[0], positions.shape[1]
    out_RE = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    division = Division(weights, batch)
    own, made = division.own, division.made
    if made[0] < made[1]:
        shape = (batch, heads, candidates, dim)
        if own[0] < own[1]:
            t, slots_1B = tiling(shape, kv, block_table.shape[1] * BLOCK), first_slots(positions)
            cache = Blocks(pools, block_table, (positions, slots_1B), t, own)
            launch = Launch(t, cache, (positions, None, slots_1B), (None, None))
            chunks = chunks_of(t, own[0] * kv, own[1] * kv)
            set_limits(chunks, launch)
        warm_up(nl.exp)
        first, count = made[0] * candidates, (made[1] - made[0]) * candidates
        rows, rotary = Normed(x, gamma, eps, first, count), Rotary((cos, sin), first, count)
        handed = Handed(division, shape, kv, x.dtype)
        stream = Heads(weights[0], handed, rows, (Norm(k_norm, rotary), Norm(q_norm, rotary)))
        stream.stream.fill()
        blocks = division.blocks(weights[1], division.shares_output)
        output = Stream(pieces(weights[1], blocks, tail=True))
        if own[0] < own[1]:
            cache.fetch_keys(chunks[0])
        stream.make(rotary)
        if own[0] < own[1]:
            turn = begin(chunks[0], None)
            cache.turn_keys(chunks[0])
        handed.exchange_heads()
        if own[0] < own[1]:
            output.fill()
            cache.append_values(handed.of_own(0, kv))
            cache.hold(handed.keys(), handed.of_own(kv, kv))
            attend(launch, chunks, turn, handed)
        attended_DHR, start = handed.collect(), own[0] * candidates
        if division.shares_output:
            start = 0
        if handed.rows > 0:
            store_product(out_RE[start : start + handed.rows, :], output, attended_DHR, blocks)
    return out_RE
