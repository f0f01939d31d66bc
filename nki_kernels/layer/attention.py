"""The attention half of a decoder layer for few rows: RMSNorm, QKV, qk-norm, RoPE, cache, attention, output projection.

out[r] = concat_h softmax(q_h[r] K^T / sqrt(D)) V  Wo,  [v k q][r] = n[r] W,  n[r] = gamma x[r] / rms(x[r])
q and k are normalized per head over D, then rotated by their position; k and v are written to the cache first

B sequences of N rows, R = B * N <= 128, E hidden, H query and G kv heads of D = 128, S positions. Row n of sequence b
is at positions[b, 0] + n and attends positions up to its own. out is the rank's partial sum, which the graph
all-reduces and adds to x. A row's bits depend on its position and cache only; they agree with verify_attention's within
rounding.

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

from nki_kernels.checks import (
    FP32,
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
from nki_kernels.layer.kv_stationary_attention import attend, begin, begin_pack
from nki_kernels.layer.layer_kv import AttentionPlan, LayerKV
from nki_kernels.layer.projections import project
from nki_kernels.layer.qk_norm_rope import HeadNorm, Rotary, load_norm, norm_and_rotate, rows_of_heads
from nki_kernels.layer.rmsnorm_rows import ResidualRows, load_gamma, rmsnorm, row_splits
from nki_kernels.layer.weight_stream import PackedWeight, WeightStationary, WeightStream, accumulate
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
        self.rotary = rotary
        self.exchange = CoreExchange(sequences.split, sequences.shape, sequences.kv_heads, pools[0].dtype)
        self.k_norm = HeadNorm(norms_1D[0], rotary)
        self.q_norm = HeadNorm(norms_1D[1], rotary)
        # None on a core that attends no sequence
        self.kv = None
        self.attends = sequences.split.count > 0
        if self.attends:
            self.kv = LayerKV(pools, sequences.plan)

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
            begin(kv.chunks[0], None)
            kv.transpose_keys(1)
        exchange.exchange_heads()
        if self.attends:
            heads = exchange.kv_heads
            out_stream.prefetch()
            kv.append(kv.kv.values, rows_of_heads(exchange.attended_heads(0, heads)))
            kv.set_new_keys(exchange.by_group(heads, 1), exchange.attended_heads(heads, heads))
            attend(kv, exchange.by_group(2 * heads, exchange.q_heads_per_kv), exchange.attended())
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
        heads_DHR = self.exchange.heads_DHBN.reshape((dim, heads, batch * candidates))
        kv_heads, width = self.exchange.kv_heads, self.qkv.columns // dim
        for block in range(self.qkv.blocks[0], self.qkv.blocks[1]):
            product, head = WeightStationary(rows.scaled_PTR, dim, width, False), block * width
            accumulate(stream, self.qkv, [product])
            values, normed, scales = min(max(kv_heads - head, 0), width), [], []
            for i in range(width):
                psum_DR, target = product.psum[i][:, 0, :], heads_DHR[:, head + i, :]
                if i < values:
                    inv_rms_PR = rows.inv_rms_all_partitions()
                    self.store_values(target, psum_DR, inv_rms_PR, block, i)
                else:
                    normed.append(psum_DR)
                    if self.qkv.is_fp8():
                        scales.append(self.qkv.channels.of_group(block, i))
            if values < width:
                spans = self.spans(head + values, head + width, heads_DHR)
                norm_and_rotate(normed, scales, spans, self.rotary, rows.eps_scaled())

    def store_values(self, target, psum_DR, inv_rms_PR, block, i):
        """Values of head `i` of a block: the product, times its scale if any, times 1 / rms."""
        if self.qkv.is_fp8():
            scale_D1 = self.qkv.channels.of_group(block, i)
            nisa.scalar_tensor_tensor(
                dst=target, data=psum_DR, op0=nl.multiply, operand0=scale_D1, op1=nl.multiply, operand1=inv_rms_PR
            )
        else:
            nisa.tensor_tensor(dst=target, data1=psum_DR, data2=inv_rms_PR, op=nl.multiply)

    def spans(self, first, last, heads_DHR):
        """The spans of norm_and_rotate for the heads `first` to `last`: k heads, q heads."""
        middle, spans = 2 * self.exchange.kv_heads, []
        if first < middle:
            stop = min(last, middle)
            spans.append((0, stop - first, self.k_norm, heads_DHR[:, first:stop, :]))
        if last > middle:
            start = max(middle, first)
            spans.append((start - first, last - first, self.q_norm, heads_DHR[:, start:last, :]))
        return spans


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
    for name, norm in (("k_norm", k_norm), ("q_norm", q_norm)):
        check(name, norm, (dim,), remedy="pass one weight per head dimension")
    rows, hidden = x.shape
    check_packed("qkv", qkv, hidden, None, "pack_qkv")
    heads = qkv.shape[0] * qkv.shape[2] // dim - 2 * kv_heads
    refuse(
        heads < 1 or heads % kv_heads > 0 or qkv.shape[2] % dim > 0,
        f"qkv is {tuple(qkv.shape)} for {kv_heads} kv heads of {dim}: make it with pack_qkv",
    )
    check_packed("out_weight", out_weight, heads * dim, hidden, "pack_out")
    check_paged(k_pages, v_pages, block_table, dim, (batch, heads, count))
    check("positions", positions, (batch, rows // batch), INT32, "pass the position of each row of x")
    consecutive = np.array_equal(positions, np.asarray(positions)[:, :1] + np.arange(count))
    refuse(not consecutive, "positions of a sequence are not consecutive: pass the rows of one pass")
    check_floats(x, gamma, k_norm, q_norm, k_pages, v_pages)
    check_weights(x, ("qkv", "out_weight"), (qkv, out_weight), scales)
    for name, table in (("cos", cos), ("sin", sin)):
        check(name, table, (batch, count, dim // 2), FP32, "make it with law.rope_tables")


decode_attention = launcher(decode_attention_kernel, check_operands)
