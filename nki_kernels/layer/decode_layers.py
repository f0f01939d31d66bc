"""L decoder layers for few rows in one launch: the halves of attention.py and mlp.py, and the all-reduces of the ranks.

x' = x + sum over ranks of attention(x),  x'' = x' + sum over ranks of mlp(x'),  L times

R <= 128 rows, E hidden; dims and shapes of a layer are those of the half-layer kernels. The residual stays in SBUF,
rounded to x's dtype after each half as the graph rounds it. One stream of weights runs through all halves: during an
all-reduce the weights of the next half are prefetched, and its norms and first keys. all_reduce reads and writes HBM;
the row-major layout there suits both the producer (rows on partitions) and the consumer. Bits are those of the
half-layer kernels with an all-reduce that adds as the collective does, for any L.

Layouts: x and out (R, E); layers is a tuple of L tuples: gamma (E,), k_norm and q_norm (D,), qkv, out, the MLP's gamma
(E,), gate_up, down, k_pages and v_pages, and with FP8 weights the scales of qkv, out, gate_up and down; cos, sin,
positions and block_table as decode_attention; groups are the lists of ranks that sum, or None for one rank.
Cost: weights and caches once (roofline.decode_layers), 2 L collectives; against single launches of its halves this
saves 4 to 5 % for 32B and 1.7B (simulated). Design: docs/kernels.md. Launched by every step with D 128.
"""

import nki
import nki.isa as nisa
import nki.language as nl
from nki.collectives import ReplicaGroup, all_reduce

from nki_kernels.checks import check_mlp, launcher
from nki_kernels.layer.attention import AttentionHalf, Sequences, load_attention_scales
from nki_kernels.layer.attention import check_operands as check_attention
from nki_kernels.layer.mlp import MLPHalf
from nki_kernels.layer.projections import project
from nki_kernels.layer.qk_norm_rope import Rotary, load_norm
from nki_kernels.layer.rmsnorm_rows import ResidualRows, load_gamma, rmsnorm
from nki_kernels.layer.weight_stream import WeightStream
from nki_kernels.tiles import P, absent, preload_act_table, this_core

# bytes per partition of a weight tile: short, so that rows, sums and keys, which engines wait for, are loaded soon
SHORT_BYTES = 2048
# K prefetch for the next layer during this layer's MLP: at most KEYS_AHEAD_BYTES per partition and 1/KEYS_SHARE of the
# MLP's weight bytes, so prefetch ends before the down projection does
KEYS_AHEAD_BYTES, KEYS_SHARE = 32768, 3


class LayerOperands(nl.NKIObject):
    """One layer's tensors, from the kernel's operand, and this core's part of its weights."""

    def __init__(self, tensors, sequences, layer):
        self.gamma = tensors[0]
        self.norms = (tensors[1], tensors[2])
        # of FP8 weights: of qkv and out, and of the MLP's
        scales = (None, None)
        if len(tensors) > 10:
            scales = ((tensors[10], tensors[11]), (tensors[12], tensors[13]))
        self.weights = sequences.packed(tensors[3], tensors[4], layer, scales[0])
        self.mlp_gamma = tensors[5]
        self.mlp = MLPHalf(tensors[6], tensors[7], layer, scales[1])
        self.pools = (tensors[8], tensors[9])
        # prefetch_norms: of rows (128, E / 128), of keys and queries (1, D)
        self.gamma_PT = None
        self.norms_1D = None
        self.mlp_gamma_PT = None

    def tiles(self):
        """This core's weight tiles in the order of use."""
        attention = self.weights[0].tiles(True, SHORT_BYTES) + self.weights[1].tiles(True, SHORT_BYTES)
        return attention + self.mlp.tiles(SHORT_BYTES)

    def prefetch_norms(self):
        dtype = self.gamma.dtype
        self.gamma_PT = load_gamma(self.gamma, dtype)
        self.norms_1D = (load_norm(self.norms[0]), load_norm(self.norms[1]))
        self.mlp_gamma_PT = load_gamma(self.mlp_gamma, dtype)
        load_attention_scales(self.weights, P)
        if not self.mlp.is_idle:
            self.mlp.load_scales()

    def prefetch_attention(self, sequences, rotary, ahead):
        """The attention half; issues its first keys, `ahead` bytes per partition. None on a core without heads."""
        if sequences.rows == 0:
            return None
        half = AttentionHalf(sequences, self.weights, self.norms_1D, self.pools, rotary)
        half.prefetch_keys(ahead)
        return half


def alloc_partial(x):
    """An HBM tensor like x, which all cores of the launch write."""
    buffers = (nl.private_hbm, nl.shared_hbm)
    return nl.ndarray(x.shape, dtype=x.dtype, buffer=buffers[this_core()[1] - 1])


def all_reduce_partials(part_RE, groups):
    """The sum of the ranks' partials; a barrier orders it after the stores of this rank's cores."""
    if this_core()[1] == 2:
        nisa.core_barrier(data=part_RE, cores=(0, 1))
    if absent(groups):
        return part_RE
    sum_RE = alloc_partial(part_RE)
    all_reduce(srcs=[part_RE], dsts=[sum_RE], replica_group=ReplicaGroup(groups), op=nl.add)
    return sum_RE


@nki.jit
def decode_layers_kernel(x, layers, cos, sin, positions, block_table, groups, eps=1e-6):
    """Return the residual (R, E) after L layers, in x's dtype; the pools change in place."""
    out_RE = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    sequences = Sequences(layers[0][3], layers[0][4], layers[0][8], positions, block_table)
    operands, queue, count = [], [], len(layers)
    for i in range(count):
        operands.append(LayerOperands(layers[i], sequences, i))
        queue = queue + operands[i].tiles()
    preload_act_table(nl.exp)
    residual, stream, rotary = ResidualRows(x, 0, x.shape[0]), WeightStream(queue), None
    projected = slice(sequences.first_row, sequences.first_row + sequences.rows)
    if sequences.rows > 0:
        rotary = Rotary((cos, sin), sequences.first_row, sequences.rows)
    operands[0].prefetch_norms()
    # do not prefetch V here: its queue would delay the first K chunk
    attention = operands[0].prefetch_attention(sequences, rotary, 0)
    stream.prefetch()
    for i in range(count):
        layer, mlp, part_RE = operands[i], operands[i].mlp, alloc_partial(x)
        if i + 1 < count:
            operands[i + 1].prefetch_norms()
        # attention half
        if sequences.rows > 0:
            rows = rmsnorm(residual.transposed()[:, projected, :], layer.gamma_PT, eps)
            attention.attend_and_project(part_RE, rows, stream, stream)
            if not mlp.is_idle:
                preload_act_table(nl.silu, attention.last_11())
        residual.add(all_reduce_partials(part_RE, groups))
        # MLP half
        part_RE, gated_PTR = alloc_partial(x), None
        if not mlp.is_idle:
            gated_PTR = mlp.gate_and_up(rmsnorm(residual.transposed(), layer.mlp_gamma_PT, eps), stream)
            preload_act_table(nl.exp, gated_PTR[0:1, 0, 0:1])
        if i + 1 < count:
            ahead = min(KEYS_AHEAD_BYTES, mlp.bytes_per_partition() // KEYS_SHARE)
            attention = operands[i + 1].prefetch_attention(sequences, rotary, ahead)
        if not mlp.is_idle:
            project(part_RE, stream, mlp.down, gated_PTR)
        sum_RE = all_reduce_partials(part_RE, groups)
        if i + 1 < count and sequences.rows > 0:
            attention.transpose_keys()
        residual.add(sum_RE)
    if this_core()[0] == 0:
        residual.store(out_RE)
    return out_RE


def check_operands(x, layers, cos, sin, positions, block_table, groups, eps=1e-6):
    """Refuse operands that the kernel cannot serve."""
    for gamma, k_norm, q_norm, qkv, out, mlp_gamma, gate_up, down, *others in layers:
        pools, scales = others[:2], (others[2:4] or None, others[4:] or None)
        places = (cos, sin, *pools, positions, block_table, eps, scales[0])
        check_attention(x, gamma, k_norm, q_norm, qkv, out, *places)
        check_mlp(x, mlp_gamma, gate_up, down, scales[1])


decode_layers = launcher(decode_layers_kernel, check_operands)
