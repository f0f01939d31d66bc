"""L decoder layers for few rows in one launch: the halves of attention.py and mlp.py, and the sums over the ranks.

x' = x + sum over ranks of attention(x),  x'' = x' + sum over ranks of mlp(x'),  L times

The residual stays in SBUF, rounded to x's dtype after each half as the graph rounds it. One stream of weights runs
through all halves: while a sum over the ranks is under way, the weights of the next half travel, up to
stream_weights.AHEAD_BYTES of them, as do its norms and first keys. A half's partial sum is stored by the core that made
it, and the sum loaded by both: the collective takes HBM, where rows lie as both sides want them.
Bits are those of the half-layer kernels with an all-reduce that adds as the collective does, for any L.
Cost: weights and caches once (roofline.decode_layers), 2 L collectives. Design and timeline: docs/decode_layer.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl
from nki.collectives import ReplicaGroup, all_reduce

from nki_kernels.layer import host
from nki_kernels.layer.attention import AttentionHalf, Sequences
from nki_kernels.layer.checks import check_lnc
from nki_kernels.layer.heads import Rotary, load_norm
from nki_kernels.layer.host import AttentionWeights, Place
from nki_kernels.layer.mlp import MLPHalf
from nki_kernels.layer.mlp import check as check_mlp
from nki_kernels.layer.stream_output import store_product
from nki_kernels.layer.stream_rows import Loaded, Normed, load_gamma
from nki_kernels.layer.stream_weights import Stream
from nki_kernels.tiles import absent, this_core, warm_up

# bytes per partition of a transfer of weights: rows, sums and keys, which are waited for, travel between them
SHORT_BYTES = 2048
# bytes per partition of a layer's keys that travel during the MLP before it and are turned while the ranks sum that: at
# most so many, and as a part of the MLP's weights, which take as long to use
KEYS_AHEAD_BYTES, KEYS_SHARE = 32768, 3


class Operands(nl.NKIObject):
    """One layer's tensors, from the tuple that the kernel gets."""

    def __init__(self, tensors):
        self.gamma = tensors[0]
        # norms of keys and queries, QKV and output
        self.norms = (tensors[1], tensors[2])
        self.weights = (tensors[3], tensors[4])
        self.mlp_gamma = tensors[5]
        self.mlp = MLPHalf(tensors[6], tensors[7])
        self.pools = (tensors[8], tensors[9])


class Norms(nl.NKIObject):
    """A layer's norms, asked for a layer ahead: of rows (128, E / 128), of keys and queries (1, D)."""

    def __init__(self, layer):
        dtype = layer.gamma.dtype
        self.gamma_PT = load_gamma(layer.gamma, dtype)
        self.heads_1D = (load_norm(layer.norms[0]), load_norm(layer.norms[1]))
        self.mlp_gamma_PT = load_gamma(layer.mlp_gamma, dtype)


def partial_sum(x):
    """An HBM tensor like x, which all cores of the launch write."""
    if this_core()[1] == 2:
        return nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    return nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)


def over_ranks(part_RE, groups):
    """The ranks' partial sums added up; all of this rank's cores have stored theirs before, and may load it then."""
    if this_core()[1] == 2:
        nisa.core_barrier(data=part_RE, cores=(0, 1))
    if absent(groups):
        return part_RE
    sum_RE = partial_sum(part_RE)
    all_reduce(srcs=[part_RE], dsts=[sum_RE], replica_group=ReplicaGroup(groups), op=nl.add)
    return sum_RE


@nki.jit
def decode_layers_kernel(x, layers, cos, sin, positions, block_table, groups, eps=1e-6):
    """The residual (R, E) behind L layers from x (R, E) before them, in x's dtype.

    layers is a tuple of L tuples: gamma (E,), k_norm and q_norm (D,), qkv, out, the MLP's gamma (E,), gate_up, down,
    k_pages and v_pages, the pools, which change in place; all as the half-layer kernels take them. groups are the
    lists of ranks that sum, or None for one rank.
    """
    out_RE = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    operands, queue = [], []
    for tensors in layers:
        operands.append(Operands(tensors))
    sequences = Sequences(operands[0].weights, operands[0].pools[0], (positions, block_table))
    first, count = sequences.rows
    for layer in operands:
        heads, output = sequences.pieces(layer.weights, SHORT_BYTES)
        queue = queue + heads + output + layer.mlp.pieces(SHORT_BYTES)
    warm_up(nl.exp)
    residual, stream, rotary = Loaded(x, 0, x.shape[0]), Stream(queue), None
    if count > 0:
        rotary = Rotary((cos, sin), first, count)
    norms = Norms(operands[0])
    # values wait for the first layer's new ones, which would wait for keys behind the first chunk
    half, following = next_attention(operands[0], norms, sequences, rotary, 0), None
    stream.fill()
    for i in range(len(operands)):
        part_RE, mlp = partial_sum(x), operands[i].mlp
        if i + 1 < len(operands):
            following = Norms(operands[i + 1])
        if count > 0:
            turned_PRT = residual.turned()[:, first : first + count, :]
            half.store(part_RE, Normed(turned_PRT, norms.gamma_PT, eps), (stream, stream))
            if mlp.mine[0] < mlp.mine[1]:
                warm_up(nl.silu, half.attended_11())
        residual.add(over_ranks(part_RE, groups))
        part_RE, gated_PTR = partial_sum(x), None
        if mlp.mine[0] < mlp.mine[1]:
            gated_PTR = mlp.gated(Normed(residual.turned(), norms.mlp_gamma_PT, eps), stream)
            warm_up(nl.exp, gated_PTR[0:1, 0, 0:1])
        if i + 1 < len(operands):
            ahead = min(KEYS_AHEAD_BYTES, mlp.bytes_of_core() // KEYS_SHARE)
            half = next_attention(operands[i + 1], following, sequences, rotary, ahead)
            norms = following
        if mlp.mine[0] < mlp.mine[1]:
            store_product(part_RE, stream, gated_PTR, mlp.last)
        sum_RE = over_ranks(part_RE, groups)
        if i + 1 < len(operands) and count > 0:
            half.turn()
        residual.add(sum_RE)
    if this_core()[0] == 0:
        residual.store(out_RE)
    return out_RE


def next_attention(layer, norms, sequences, rotary, ahead):
    """A layer's attention, whose first keys are asked for, `ahead` bytes a partition; None on a core without heads."""
    if sequences.rows[1] == 0:
        return None
    half = AttentionHalf(layer.weights, norms.heads_1D, layer.pools, sequences, rotary)
    half.fetch(ahead)
    return half


def tensors_of(attention: AttentionWeights, mlp: tuple[Any, Any, Any], pools: tuple[Any, Any]) -> tuple[Any, ...]:
    """A layer's tensors as the kernel takes them; mlp is gamma (E,), pack_gate_up(gate, up) and pack(down)."""
    return (attention.gamma, attention.k_norm, attention.q_norm, attention.qkv, attention.out, *mlp, *pools)


def decode_layers(
    x: Any,
    layers: Sequence[tuple[AttentionWeights, tuple[Any, Any, Any], tuple[Any, Any]]],
    rows: Place,
    *,
    groups: Sequence[Sequence[int]] | None = None,
    eps: float = 1e-6,
    lnc: int = 1,
    run: Callable[[Any], Any] = nki.simulate,
) -> Any:
    """The residual (B, N, E) behind some layers, each of `tensors_of`; the pools of keys and values change in place.

    `groups` are the ranks that sum, None for one. `run` makes a launched kernel callable: nki.simulate here, the
    identity on a Trainium machine.

    Raises:
        ValueError: an operand does not fit; nothing was run or written.
    """
    check_lnc(lnc)
    for attention, mlp, pools in layers:
        host.check(x, attention, pools, rows)
        check_mlp(x, mlp[0], mlp[1:])
    tensors, flat = tuple(tensors_of(*layer) for layer in layers), x.reshape(-1, x.shape[-1])
    launched = run(decode_layers_kernel[lnc])
    return launched(flat, tensors, rows.cos, rows.sin, rows.positions, rows.block_table, groups, eps).reshape(x.shape)
