"""The attention half of a decoder layer for few rows: RMSNorm, QKV, qk-norm, RoPE, cache, attention, output projection.

out[r] = concat_h softmax(q_h[r] K^T) V  Wo,  [v k q][r] = n[r] W,  n[r] = gamma x[r] / rms(x[r])
q and k are normalized per head over D, then rotated by their position; q's norm has the factor 1 / sqrt(D); k and v are
written to the cache first

B sequences of N rows, R = B * N <= 128, E hidden, H query and G kv heads of D = 128, S positions. Row n of sequence b
is at positions[b, 0] + n and attends positions up to its own. out is the rank's partial sum, which the graph
all-reduces and adds to x. A row's bits depend on its position and cache only; those of attention are
verify_attention's.

Layouts: x and out (R, E), gamma (E,), k_norm and q_norm (D,), weights of pack_qkv (heads in the order v, k, q) and
pack_out, cos and sin (B, N, D / 2) fp32, pools (pages, G, 128, D), positions (B, N) and block_table (B, S / 128) int32,
S a multiple of 1024. Two cores attend half of the sequences each (core_split.py).
FP8 weights have scales (blocks, 1, C).
Cost: weights and cache once (roofline.decode_attention); a weight below MIN_BYTES_TO_SPLIT, once per core. Design:
docs/kernels.md. Launched by steps for layers that are not part of a decode_layers launch.
"""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.attention.kv_chunks import KVChunks
from nki_kernels.attention.kv_stationary_attention import attend, begin, begin_pack
from nki_kernels.checks import (
    INT32,
    check,
    check_floats,
    check_packed,
    check_paged,
    check_rank,
    check_rows,
    check_weights,
    launcher,
    refuse,
)
from nki_kernels.layer.channel_scale import channel_groups, scale_of
from nki_kernels.layer.core_split import CoreExchange, CoreSplit
from nki_kernels.layer.layer_kv import AttentionPlan, NewRows
from nki_kernels.layer.projections import project
from nki_kernels.layer.qk_norm_rope import HeadNorm, Rotary, load_norm
from nki_kernels.layer.qkv_heads import QKVHeads, check_heads
from nki_kernels.layer.rmsnorm_rows import ResidualRows, load_gamma, rmsnorm, row_splits
from nki_kernels.layer.weight_stream import PackedWeight, WeightStream
from nki_kernels.limits import CANDIDATES
from nki_kernels.tiles import P, preload_act_table


class Sequences(nl.NKIObject):
    """What the layers of a launch share: the core split, and the plan of the sequences that this core attends."""

    def __init__(self, qkv, out, pool, positions_BN, block_table_BL):
        batch, candidates = positions_BN.shape
        dim = pool.shape[3]
        self.kv_heads = pool.shape[1]
        self.shape = (batch, out.shape[1] // dim, candidates, dim)
        self.split = CoreSplit(qkv, out, batch)
        # rows whose heads this core computes
        self.first_row = self.split.projected[0] * candidates
        self.rows = self.split.projected[1] * candidates - self.first_row
        # None on a core that attends no sequence
        self.plan = None
        if self.split.count > 0:
            self.plan = AttentionPlan(self.shape, pool, positions_BN, block_table_BL, self.split.attended)

    def packed(self, qkv, out, layer, scales):
        """A layer's packed QKV and output weights with this core's blocks; `scales` are those of FP8 weights."""
        blocks, splits = self.split.qkv_blocks(qkv), row_splits(qkv.shape[1])
        qkv_weight = PackedWeight(f"qkv {layer}", qkv, blocks, splits, scale_of(scales, 0))
        return qkv_weight, PackedWeight(f"out {layer}", out, self.split.out_blocks(out), 1, scale_of(scales, 1))


def load_attention_scales(weights, dim):
    """Load the scales of packed FP8 QKV, a group a head, and of the output projection."""
    weights[0].load_scale(weights[0].columns // dim)
    weights[1].load_scale(channel_groups(weights[1].columns))


class AttentionHalf(nl.NKIObject):
    """A layer's attention on this core; weights are packed QKV and output, norms_1D the k and q norms (1, D)."""

    def __init__(self, sequences, weights, norms_1D, pools, rotary):
        self.qkv = weights[0]
        self.out = weights[1]
        self.exchange = CoreExchange(sequences.split, sequences.shape, sequences.kv_heads, pools[0].dtype)
        # scores need no other scale
        norms = (HeadNorm(norms_1D[0], rotary), HeadNorm(norms_1D[1], rotary, P**-0.5))
        self.heads = QKVHeads(self.qkv, P, sequences.kv_heads, norms, rotary)
        self.plan = sequences.plan
        # None on a core that attends no sequence
        self.kv = None
        self.attends = sequences.split.count > 0
        if self.attends:
            # margins for new keys that are outside of a chunk
            self.kv = KVChunks(pools, sequences.plan.paged, sequences.shape[2])

    def prefetch_keys(self, ahead=0):
        """Gather the keys of the first chunk, and of more up to `ahead` bytes per partition."""
        if self.attends:
            self.kv.prefetch_keys(1, ahead)

    def transpose_keys(self):
        """Transpose the prefetched keys."""
        if self.attends:
            self.kv.transpose_keys(self.kv.issued)

    def attend_and_project(self, out_RE, rows, qkv_stream, out_stream):
        """Store this core's part of the output for RMSNormRows; both streams may be the same one."""
        exchange, kv = self.exchange, self.kv
        if self.attends:
            # before the projection, whose PSUM banks it would wait for
            begin_pack(kv.chunks[0])
        self.project_heads(rows, qkv_stream)
        if self.attends:
            begin(kv.chunks[0])
            kv.transpose_keys(1)
        exchange.exchange_heads()
        if self.attends:
            heads = exchange.kv_heads
            out_stream.prefetch()
            keys_DGBN, values_DGBN = exchange.attended_heads(heads, heads), exchange.attended_heads(0, heads)
            new = NewRows(self.plan, exchange.by_group(heads, 1), keys_DGBN, values_DGBN)
            new.append_values(kv.kv.values)
            queries, out = [], HeadsOut(exchange.attended(), kv.plan)
            for q_DHN in exchange.by_group(2 * heads, exchange.q_heads_per_kv):
                queries.append([q_DHN])
            attend(kv, queries, new, out)
        attended_DHR, first = exchange.gather_attended(), exchange.split.attended[0] * exchange.candidates
        if exchange.split.splits_output:
            first = 0
        if exchange.rows > 0:
            project(out_RE[first : first + exchange.rows, :], out_stream, self.out, attended_DHR)

    def last_11(self):
        """An element of the attention output (1, 1), for a data dependence; None on a core without output rows."""
        if self.exchange.rows == 0:
            return None
        return self.exchange.attended_DHR[0:1, 0, 0:1]

    def project_heads(self, rows, stream):
        """Compute this core's blocks of heads: v times 1 / rms; k and q, normalized and rotated."""
        dim, heads, batch, candidates = self.exchange.heads_DHBN.shape
        heads_DHR, per_block = self.exchange.heads_DHBN.reshape((dim, heads, batch * candidates)), self.heads.per_block
        for block in range(self.qkv.blocks[0], self.qkv.blocks[1]):
            self.heads.project(block, rows, stream, heads_DHR[:, block * per_block : (block + 1) * per_block, :])


class HeadsOut(nl.NKIObject):
    """Where attention stores the output of each pack: (D, H, B, N) of the sequences of this core."""

    def __init__(self, attended_DHBN, plan):
        self.attended_DHBN = attended_DHBN
        self.plan = plan

    def store(self, pack, values_DR, inverse_PR):
        """Normalize the output of a pack's groups, and store it at their heads."""
        t = self.plan.t
        heads = t.queries // t.candidates
        shape = (t.dim, heads, t.candidates)
        for i in range(pack.count):
            group, rows = pack.group + i - self.plan.group, slice(i * t.queries, (i + 1) * t.queries)
            sequence, head = group // t.kv_heads, group % t.kv_heads * heads
            nisa.tensor_tensor(
                dst=self.attended_DHBN[:, head : head + heads, sequence, :],
                data1=values_DR[0][:, rows].reshape(shape),
                data2=inverse_PR[:, rows].reshape(shape),
                op=nl.multiply,
            )


@nki.jit
def decode_attention_kernel(
    x, gamma, k_norm, q_norm, qkv, out_weight, cos, sin, k_pages, v_pages, positions, block_table, eps=1e-6, scales=None
):
    """Return out in x's dtype; the pools change in place. `scales` (qkv's, out's) are those of FP8 weights."""
    out_RE = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    sequences = Sequences(qkv, out_weight, k_pages, positions, block_table)
    if sequences.rows > 0:
        preload_act_table(nl.exp)
        first, count = sequences.first_row, sequences.rows
        gamma_PT, residual = load_gamma(gamma, x.dtype), ResidualRows(x, first, count)
        rows, rotary = rmsnorm(residual.transposed(), gamma_PT, eps), Rotary((cos, sin), first, count)
        norms_1D, weights = (load_norm(k_norm), load_norm(q_norm)), sequences.packed(qkv, out_weight, 0, scales)
        half = AttentionHalf(sequences, weights, norms_1D, (k_pages, v_pages), rotary)
        qkv_stream, out_stream = WeightStream(weights[0].tiles(True)), WeightStream(weights[1].tiles(True))
        load_attention_scales(weights, P)
        qkv_stream.prefetch()
        half.prefetch_keys()
        half.attend_and_project(out_RE, rows, qkv_stream, out_stream)
    return out_RE


def check_operands(
    x, gamma, k_norm, q_norm, qkv, out_weight, cos, sin, k_pages, v_pages, positions, block_table, eps=1e-6, scales=None
):
    """Refuse operands that the kernel cannot serve."""
    check_rows(x, gamma)
    _, kv_heads, _, dim = check_rank("k_pages", k_pages, "pages, G, 128, D")
    batch, count = check_rank("positions", positions, "B, N")
    refuse(dim != P, f"head dim D is {dim}, the fused kernel serves {P}: use verify_attention for this model")
    refuse(not 1 <= count <= CANDIDATES, f"N is {count} rows per sequence, 1 to {CANDIDATES} are served: lower k")
    rows, hidden = x.shape
    heads = check_heads(hidden, kv_heads, (k_norm, q_norm), qkv, (cos, sin), (batch, count))
    check_packed("out_weight", out_weight, heads * dim, hidden, "pack_out")
    check_paged(k_pages, v_pages, block_table, dim, (batch, heads, count))
    check("positions", positions, (batch, rows // batch), INT32, "pass the position of each row of x")
    consecutive = np.array_equal(positions, np.asarray(positions)[:, :1] + np.arange(count))
    refuse(not consecutive, "positions of a sequence are not consecutive: pass the rows of one pass")
    check_floats(x, gamma, k_norm, q_norm, k_pages, v_pages)
    check_weights(x, ("qkv", "out_weight"), (qkv, out_weight), scales)


decode_attention = launcher(decode_attention_kernel, check_operands)
