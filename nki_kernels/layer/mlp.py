"""The MLP half of a decoder layer for few rows: RMSNorm, gate and up, SwiGLU, down, one launch.

out[r] = (silu(n[r] Wg) * (n[r] Wu)) Wd,  n[r] = gamma * x[r] / sqrt(mean_e x[r, e]^2 + eps)

x (R, E) are R <= 128 rows, Wg and Wu (E, I), Wd (I, E) of this rank; out (R, E) is the rank's partial sum, which
the graph sums over the ranks and adds to x. Sums are fp32; the rows gamma * x, the products silu(g) u and out are
rounded to x's dtype. A row's bits do not depend on R, its index or the number of cores.
Layouts: pack_weights turns the checkpoint's (out, in) weights into the blocks that stream_weights reads.
Two cores: each takes half of the blocks of gate and up, sends each block of silu(g) u that it made to the other, and
then takes half of the output columns: no partial sums are added. Of small weights one core makes all, the other none.
Cost: all weights are read once (roofline.decode_mlp). Design and timeline: docs/decode_layer.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.layer.checks import check_dtypes, check_lnc, check_rows
from nki_kernels.layer.stream_output import room, store_product
from nki_kernels.layer.stream_rows import Loaded, Normed, load_gamma, sections
from nki_kernels.layer.stream_weights import PIECE_BYTES, Stream, pieces, product, turn_rows
from nki_kernels.tiles import BANK, P, itemsize, share_of_core, this_core, warm_up

# bytes of the weights that two cores read as much sooner than one core as an exchange takes: 4.3 us by nkisim's laws
WORTH_SHARING = 4700000


def swiglu(gated_RC, both_psum, inverse_R1):
    """silu(gate / rms) * up / rms of one block, whose first half is the gate's columns."""
    width = gated_RC.shape[1]
    gate_RC, up_RC = both_psum[:, 0:width], both_psum[:, width : 2 * width]
    silu_RC = nl.ndarray(gated_RC.shape, dtype=nl.float32)
    nisa.activation(dst=silu_RC, op=nl.silu, data=gate_RC, scale=inverse_R1)
    nisa.scalar_tensor_tensor(
        dst=gated_RC, data=up_RC, op0=nl.multiply, operand0=inverse_R1, op1=nl.multiply, operand1=silu_RC
    )


def exchange(gated_RI, block, blocks, width):
    """Send the columns that this core made of its block number `block` to the other core, and receive its own."""
    own = nl.program_id(0)
    mine, theirs = (own * blocks + block) * width, ((1 - own) * blocks + block) * width
    nisa.sendrecv(
        src=gated_RI[:, mine : mine + width],
        dst=gated_RI[:, theirs : theirs + width],
        send_to_rank=1 - own,
        recv_from_rank=1 - own,
        pipe_id=0,
        dma_engine=nisa.dma_engine.gpsimd_dma,
    )


def weight_bytes(weight):
    """Bytes of a packed weight (blocks, K, C)."""
    return weight.shape[0] * weight.shape[1] * weight.shape[2] * itemsize(weight.dtype)


def shares(gate_up, down):
    """The blocks of gate and up and of down that this core multiplies, first and last: all, a half, or none."""
    counts = (gate_up.shape[0], down.shape[0])
    if weight_bytes(gate_up) + weight_bytes(down) > WORTH_SHARING:
        return share_of_core(counts[0]), share_of_core(counts[1])
    if this_core()[0] == 0:
        return (0, counts[0]), (0, counts[1])
    return (0, 0), (0, 0)


class MLPHalf(nl.NKIObject):
    """A layer's MLP on this core: gate_up (blocks, E, 2 C) and down (blocks, I, C)."""

    def __init__(self, gate_up, down):
        self.gate_up = gate_up
        self.down = down
        # the blocks of both on this core
        mine, last = shares(gate_up, down)
        self.mine = mine
        self.last = last
        # the other core waits for this one's last block
        self.shared = self.mine[1] - self.mine[0] < gate_up.shape[0]

    def pieces(self, most=PIECE_BYTES):
        """This core's pieces in the order of use."""
        first = pieces(self.gate_up, self.mine, sections(self.gate_up.shape[1]), tail=self.shared, most=most)
        return first + pieces(self.down, self.last, tail=True, most=most)

    def bytes_of_core(self):
        """Bytes of a partition that the weights of a core which works on this MLP have."""
        size = weight_bytes(self.gate_up) + weight_bytes(self.down)
        if size > WORTH_SHARING:
            size = size // this_core()[1]
        return size // P

    def gated(self, normed, stream):
        """silu(gate) * up of Normed rows, turned: (128, tiles, room)."""
        rows, width, mine = normed.turned_PTR.shape[2], self.gate_up.shape[2] // 2, self.mine
        gated_RI = nl.ndarray((room(rows), self.down.shape[1]), dtype=self.down.dtype)
        if room(rows) > rows:
            nisa.memset(dst=gated_RI, value=0.0)
        for block in range(mine[0], mine[1]):
            both_psum = product(stream, normed.turned_PTR)
            swiglu(gated_RI[0:rows, block * width : (block + 1) * width], both_psum, normed.inverse())
            if self.shared:
                exchange(gated_RI, block - mine[0], mine[1] - mine[0], width)
        return turn_rows(gated_RI)


@nki.jit
def decode_mlp_kernel(x, gamma, gate_up, down, eps=1e-6):
    """out (R, E) in x's dtype from x (R, E), gamma (E,), gate_up (blocks, E, 2 C) and down (blocks, I, C)."""
    out_RE = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    half = MLPHalf(gate_up, down)
    if half.mine[0] < half.mine[1]:
        warm_up(nl.silu)
        gamma_PT, loaded = load_gamma(gamma, x.dtype), Loaded(x, 0, x.shape[0])
        normed, stream = Normed(loaded.turned(), gamma_PT, eps), Stream(half.pieces())
        stream.fill()
        store_product(out_RE, stream, half.gated(normed, stream), half.last)
    return out_RE


def decode_mlp(
    x: Any,
    gamma: Any,
    weights: tuple[Any, Any],
    *,
    eps: float = 1e-6,
    lnc: int = 1,
    run: Callable[[Any], Any] = nki.simulate,
) -> Any:
    """A rank's part of the MLP for x (..., E) of up to 128 rows: the partial sum, same shape and dtype.

    weights are (pack_gate_up(gate, up), pack(down)). `run` makes a launched kernel callable: nki.simulate here,
    the identity on a Trainium machine.

    Raises:
        ValueError: an operand does not fit; nothing was run.
    """
    check(x, gamma, weights)
    check_lnc(lnc)
    hidden = x.shape[-1]
    return run(decode_mlp_kernel[lnc])(x.reshape(-1, hidden), gamma, *weights, eps).reshape(x.shape)


def check(x: Any, gamma: Any, weights: tuple[Any, Any]) -> None:
    """Refuse operands that the kernel cannot serve, in one sentence each."""
    check_rows(x, gamma)
    check_weights(x, weights)
    check_dtypes(x, gamma, *weights)


def check_weights(x: Any, weights: tuple[Any, Any]) -> None:
    """gate_up is (blocks, E, 2 C) with an even number of blocks, down (blocks, I, C)."""
    gate_up, down = (tuple(w.shape) for w in weights)
    hidden = x.shape[-1]
    if len(gate_up) != 3 or gate_up[0] % 2 or gate_up[1] != hidden or gate_up[2] % 2 or gate_up[2] > BANK:
        raise ValueError(
            f"gate and up are {gate_up}, an even number of blocks (E, 2 C) = ({hidden}, at most {BANK}) is needed: "
            "make them with pack_gate_up"
        )
    inner = gate_up[0] * gate_up[2] // 2
    if len(down) != 3 or down[1] != inner or down[0] * down[2] != hidden or down[2] > BANK:
        raise ValueError(
            f"down is {down}, blocks (I, C) = ({inner}, at most {BANK}) of {hidden} columns are needed: "
            "make it with pack from the checkpoint's (out, in)"
        )
