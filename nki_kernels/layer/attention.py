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
from nki_kernels.attention.state import Chunk, Launch
from nki_kernels.layer.handover import Division, Handed
from nki_kernels.layer.heads import Norm, Rotary, Span, load_norm, norm_and_rotate
from nki_kernels.layer.stream_columns import heads_product
from nki_kernels.layer.stream_output import store_product
from nki_kernels.layer.stream_rows import Loaded, Normed, load_gamma, sections
from nki_kernels.layer.stream_weights import PIECE_BYTES, Stream, pieces
from nki_kernels.layer.turned_attention import attend, begin, set_limits
from nki_kernels.layer.turned_blocks import Blocks, Tables
from nki_kernels.tiles import warm_up


class Sequences(nl.NKIObject):
    """The sequences of a launch, the same in every layer: this core's part, and where its rows are in the pools.

    `weights` are QKV and output of a layer, places (positions (B, N), block_table (B, S / 128)).
    """

    def __init__(self, weights, pool, places):
        batch, candidates = places[0].shape
        dim = pool.shape[3]
        self.kv = pool.shape[1]
        self.positions_BN = places[0]
        self.shape = (batch, weights[1].shape[1] // dim, candidates, dim)
        self.division = Division(weights, batch)
        # rows whose heads this core makes: the first, and how many
        made = self.division.made
        self.rows = (made[0] * candidates, (made[1] - made[0]) * candidates)
        # of a core with sequences to attend
        self.tables = None
        self.chunks = []
        own = self.division.own
        if own[0] < own[1]:
            t, slots_1B = tiling(self.shape, self.kv, places[1].shape[1] * BLOCK), first_slots(places[0])
            self.tables = Tables(pool, places[1], (places[0], slots_1B), t, own)
            self.chunks = chunks_of(t, own[0] * self.kv, own[1] * self.kv)
            set_limits(self.chunks, places[0], t)

    def pieces(self, weights, most=PIECE_BYTES):
        """This core's pieces of a layer's QKV, and those of its output."""
        heads, output, division = [], [], self.division
        if self.rows[1] > 0:
            cut = sections(weights[0].shape[1])
            heads = pieces(weights[0], division.of_heads(weights[0]), cut, tail=True, most=most)
        # a core that makes heads for the other one alone has no rows of the output
        if division.shares_output or division.count() > 0:
            output = pieces(weights[1], division.of_output(weights[1]), tail=True, most=most)
        return heads, output


class AttentionHalf(nl.NKIObject):
    """A layer's attention on this core; its norms and keys travel before the layer's rows are there.

    `norms` are those of keys and queries, loaded (1, D), `weights` QKV and output. Heads are made in the order v, k, q.
    """

    def __init__(self, weights, norms, pools, sequences, rotary):
        division, shape = sequences.division, sequences.shape
        self.rotary = rotary
        self.handed = Handed(division, shape, sequences.kv, weights[0].dtype)
        self.norms = (Norm(norms[0], rotary), Norm(norms[1], rotary))
        # blocks of the weights on this core, and heads of a block of QKV
        self.mine = division.of_heads(weights[0])
        self.last = division.of_output(weights[1])
        self.width = weights[0].shape[2] // shape[3]
        # of a core with sequences to attend; packs keep their limits from layer to layer
        self.launch = None
        self.chunks = []
        if division.count() > 0:
            for chunk in sequences.chunks:
                self.chunks.append(Chunk(chunk.pack, chunk.index, sequences.tables.t.slots))
            cache = Blocks(pools, sequences.tables, self.chunks)
            self.launch = Launch(cache.t, cache, (sequences.positions_BN, None, None), (None, None))

    def fetch(self, ahead=0):
        """Let the first keys travel, more than a chunk's where `ahead` bytes a partition hold them."""
        if len(self.chunks) > 0:
            self.launch.cache.fetch_keys(1, ahead)

    def turn(self):
        """Turn the keys that were asked for."""
        if len(self.chunks) > 0:
            self.launch.cache.turn_keys(self.launch.cache.asked)

    def store(self, out_RE, rows, streams):
        """Attention of Normed rows, whose part of the layer's output is stored.

        streams are those of QKV and of the output, or one of both.
        """
        handed, turn = self.handed, None
        self.make_heads(rows, streams[0])
        if len(self.chunks) > 0:
            turn = begin(self.chunks[0], None)
            self.launch.cache.turn_keys(1)
        handed.exchange_heads()
        if len(self.chunks) > 0:
            streams[1].fill()
            self.launch.cache.append_values(handed.of_own(0, handed.kv))
            self.launch.cache.hold(handed.keys(), handed.of_own(handed.kv, handed.kv))
            attend(self.launch, self.chunks, turn, handed)
        attended_DHR, start = handed.collect(), handed.division.own[0] * handed.candidates
        if handed.division.shares_output:
            start = 0
        if handed.rows > 0:
            store_product(out_RE[start : start + handed.rows, :], streams[1], attended_DHR, self.last)

    def attended_11(self):
        """A number of attention's result, (1, 1), or None on a core that attends nothing and collects nothing."""
        if self.handed.rows == 0:
            return None
        return self.handed.attended_DHR[0:1, 0, 0:1]

    def make_heads(self, rows, stream):
        """This core's blocks of heads, each to its place."""
        dim, heads, batch, candidates = self.handed.heads_DHBN.shape
        heads_DHR, kv = self.handed.heads_DHBN.reshape((dim, heads, batch * candidates)), self.handed.kv
        for block in range(self.mine[0], self.mine[1]):
            head = block * self.width
            values, psum_DHR = min(max(kv - head, 0), self.width), heads_product(stream, rows.turned_PTR, dim)
            if values > 0:
                inverse_PHR = rows.inverse_everywhere().expand_dim(1).broadcast(1, values)
                target = heads_DHR[:, head : head + values, :]
                nisa.tensor_tensor(dst=target, data1=psum_DHR[:, 0:values, :], data2=inverse_PHR, op=nl.multiply)
            if values < self.width:
                spans = self.spans(head + values, head + self.width, heads_DHR)
                norm_and_rotate(psum_DHR[:, values : self.width, :], spans, self.rotary, rows.floor())

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
    weights, places = (qkv, out_weight), (positions, block_table)
    out_RE = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    sequences = Sequences(weights, k_pages, places)
    first, count = sequences.rows
    if count > 0:
        warm_up(nl.exp)
        gamma_PT, loaded = load_gamma(gamma, x.dtype), Loaded(x, first, count)
        rows, rotary = Normed(loaded.turned(), gamma_PT, eps), Rotary((cos, sin), first, count)
        norms = (load_norm(k_norm), load_norm(q_norm))
        half = AttentionHalf(weights, norms, (k_pages, v_pages), sequences, rotary)
        heads, output = sequences.pieces(weights)
        streams = (Stream(heads), Stream(output))
        streams[0].fill()
        half.fetch()
        half.store(out_RE, rows, streams)
    return out_RE
