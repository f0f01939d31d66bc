"""A prompt's products from the weights that decode streams: up to 2048 rows and more, nothing unpacked.

mlp(x)[r] = (silu(n[r] Wg) * (n[r] Wu)) Wd,  n[r] = gamma * x[r] / sqrt(mean_e x[r, e]^2 + eps);  product(x)[r] = x[r] W

Rows come in tiles of 128, which are the stationary operand; up to GROUP tiles share each block of weights, at most 512
columns that move. The contraction's order is stream_weights.product's, and norm and SwiGLU are decode_mlp's, so that a
row's bits are decode's: they do not depend on C, the row's index, its neighbours or the number of cores.
Layouts: x (C, K), weights as pack_weights makes them. Two cores take half of the tiles each.
Cost: roofline.prompt_mlp and roofline.prompt_product. Design and timeline: docs/decode_layer.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.layer.checks import check_dtypes, check_lnc
from nki_kernels.layer.mlp import check_weights, swiglu
from nki_kernels.layer.stream_rows import inverse_root, load_gamma, sections
from nki_kernels.layer.stream_weights import Stream, add_piece, pieces, products, turn_rows, turns
from nki_kernels.limits import PROMPT_DEPTH, PROMPT_INNER
from nki_kernels.tiles import BANK, PSUM_BANK_BYTES, P, absent, itemsize, move, share_of_core, warm_up

# row tiles that share a block of weights: up to GROUP, as many as these bytes of a partition hold turned, and these
# with their inner rows of an MLP, or one
GROUP, TURNED_BYTES, GROUP_BYTES = 4, 40960, 98304
# contraction tiles of a block that SBUF holds as a whole; a deeper one is used piece by piece
DEEP = 40


class RowTile(nl.NKIObject):
    """Rows `first` to `last` of x, up to 128; with gamma (128, T) under RMSNorm, as stream_rows.Normed has it."""

    def __init__(self, x, first, last, gamma_PT):
        self.x = x
        self.first = first
        self.rows = last - first
        self.gamma_PT = gamma_PT
        # fetch: (R, E)
        self.rows_RE = None
        # turn: (128, T, R), times gamma if there is one, and then sums of squares by partition, fp32 (128, R)
        self.turned_PTR = None
        self.sums_PR = None
        # inverse: fp32 (R, 1)
        self.inverse_R1 = None
        # prompt_mlp_kernel: silu(g) u, (R, I)
        self.gated_RI = None

    def fetch(self):
        """Let the rows travel."""
        self.rows_RE = nl.ndarray((self.rows, self.x.shape[1]), dtype=self.x.dtype)
        move(self.rows_RE, self.x[self.first : self.first + self.rows, :])

    def turn(self):
        """The rows as the products take them: place (p, s * per + t) has the input s * K / sections + p * per + t."""
        depth, dtype = self.x.shape[1], self.x.dtype
        cut, tiles = sections(depth), depth // P
        # neighbours of the Tensor Engine's view are neighbours in memory then, which halves its time
        by_tile = nl.ndarray((self.rows, cut, tiles // cut, P), dtype=dtype)
        source = self.rows_RE.reshape((self.rows, cut, P, tiles // cut)).permute((0, 1, 3, 2))
        nisa.tensor_copy(dst=by_tile, src=source, engine=nisa.engine.gpsimd)
        flat_RTP = by_tile.reshape((self.rows, tiles, P))
        self.turned_PTR = nl.ndarray((P, tiles, self.rows), dtype=dtype)
        each, plain_PTR = max(1, PSUM_BANK_BYTES // (P * itemsize(dtype))), self.turned_PTR
        if not absent(self.gamma_PT):
            plain_PTR = nl.ndarray((P, tiles, self.rows), dtype=dtype)
        for first in range(0, tiles, each):
            last = min(first + each, tiles)
            psum_PTR = nl.ndarray((P, last - first, self.rows), dtype=dtype, buffer=nl.psum)
            for t in range(first, last):
                nisa.nc_transpose(dst=psum_PTR[:, t - first, :], data=flat_RTP[:, t, :])
            nisa.tensor_copy(dst=plain_PTR[:, first:last, :], src=psum_PTR, engine=turns(first // each + 1))
        if not absent(self.gamma_PT):
            self.norm(plain_PTR)

    def norm(self, plain_PTR):
        """gamma * x, rounded once, and each row's sum of squares over a partition's inputs."""
        _, tiles, rows = plain_PTR.shape
        gamma_PTR = self.gamma_PT.reshape((P, tiles, 1)).broadcast(2, rows)
        nisa.tensor_tensor(dst=self.turned_PTR, data1=plain_PTR, data2=gamma_PTR, op=nl.multiply)
        squares_PTR, sums_PR = nl.ndarray(plain_PTR.shape, dtype=nl.float32), nl.ndarray((P, rows), dtype=nl.float32)
        nisa.tensor_tensor(dst=squares_PTR, data1=plain_PTR, data2=plain_PTR, op=nl.multiply, engine=nisa.engine.gpsimd)
        nisa.tensor_reduce(dst=sums_PR, op=nl.add, data=squares_PTR.permute((0, 2, 1)), axis=2)
        self.sums_PR = sums_PR

    def inverse(self, eps):
        """1 / sqrt(mean x^2 + eps) of each row, fp32 (R, 1): ask after a product, which need not wait for the sums."""
        if absent(self.inverse_R1):
            ones_P1 = nl.ndarray((P, 1), dtype=nl.float32)
            total_psum_R1 = nl.ndarray((self.rows, 1), dtype=nl.float32, buffer=nl.psum)
            nisa.memset(dst=ones_P1, value=1.0)
            nisa.nc_matmul(dst=total_psum_R1, stationary=self.sums_PR, moving=ones_P1, accumulate=False)
            self.inverse_R1 = inverse_root(total_psum_R1, 1.0 / self.x.shape[1], eps)
        return self.inverse_R1


def take_block(stream):
    """All pieces of the next block, in the order of its contraction."""
    weight, block = stream.queue[stream.used].weight, []
    tiles = -(-weight.shape[1] // P)
    block.append(stream.take())
    while block[len(block) - 1].last < tiles:
        block.append(stream.take())
    return block


def product(block, turned_PTR):
    """One tile of rows (128, tiles, R) times one block: PSUM (R, C)."""
    columns = block[0].weight.shape[2]
    part_psum_RC = nl.ndarray((turned_PTR.shape[2], columns), dtype=nl.float32, buffer=nl.psum)
    for piece in block:
        add_piece(part_psum_RC, piece, turned_PTR)
    return part_psum_RC


def store_block(out_CE, row, part_psum_RC, number, engine):
    """Round one tile's block of columns and store it."""
    rows, columns = part_psum_RC.shape
    rounded_RC = nl.ndarray((rows, columns), dtype=out_CE.dtype)
    nisa.tensor_copy(dst=rounded_RC, src=part_psum_RC, engine=engine)
    move(out_CE[row : row + rows, number * columns : (number + 1) * columns], rounded_RC)


def groups_of_core(x, gamma_PT, ahead, inner):
    """This core's tiles of rows, `ahead` in the first group, as many as fit in the others, and an empty last group.

    A core without tiles has that one alone. `inner` are the numbers of an inner row, which SBUF holds twice: as made
    and turned.
    """
    count, groups, size = x.shape[0], [], itemsize(x.dtype)
    turned, whole = x.shape[1] * size, (x.shape[1] + 2 * inner) * size
    most = max(1, min(GROUP, TURNED_BYTES // turned, GROUP_BYTES // whole))
    mine = share_of_core(-(-count // P))
    for i in range(mine[0], mine[1]):
        if i == mine[0] or i == mine[0] + ahead or len(groups[len(groups) - 1]) == most:
            groups.append([])
        groups[len(groups) - 1].append(RowTile(x, i * P, min(i * P + P, count), gamma_PT))
    groups.append([])
    return groups


def stream_for(groups, weights, blocks, cuts):
    """The first blocks of each weight, one weight after the other, once for each group of tiles."""
    queue = []
    for _ in range(len(groups) - 1):
        for i in range(len(weights)):
            queue = queue + pieces(weights[i], (0, blocks[i]), cuts[i])
    return Stream(queue)


def begin(tiles):
    """The first group's rows."""
    for tile in tiles:
        tile.fetch()
    for tile in tiles:
        tile.turn()


def last_blocks(stream, blocks, stage, out_CE):
    """All blocks of a weight for one group, rounded and stored; the next group's rows are turned in between.

    stage is (the group's turned rows, its tiles, the next group).
    """
    turned, tiles, following = stage[0], stage[1], stage[2]
    for b in range(blocks):
        if turned[0].shape[1] > DEEP:
            parts = products(stream, turned)
            for i in range(len(tiles)):
                store_block(out_CE, tiles[i].first, parts[i], b, turns(i))
        else:
            block = take_block(stream)
            for i in range(len(tiles)):
                store_block(out_CE, tiles[i].first, product(block, turned[i]), b, turns(i))
        for j in range(len(following)):
            if j * blocks // len(following) == b:
                following[j].turn()
                # one tile ahead: SBUF has no room for a group's rows beside its turned ones
                if j + 1 < len(following):
                    following[j + 1].fetch()


@nki.jit
def prompt_mlp_kernel(x, gamma, gate_up, down, eps=1e-6):
    """out (C, E) in x's dtype from x (C, E), gamma (E,), gate_up (blocks, E, 2 W) and down (blocks, I, W)."""
    count, hidden = x.shape
    width, inner = gate_up.shape[2] // 2, down.shape[1]
    out_CE = nl.ndarray((count, hidden), dtype=x.dtype, buffer=nl.shared_hbm)
    # the first rows are long to prepare: one tile alone lets the products begin
    groups = groups_of_core(x, load_gamma(gamma, x.dtype), 1, inner)
    warm_up(nl.silu)
    stream = stream_for(groups, (gate_up, down), (gate_up.shape[0], down.shape[0]), (sections(hidden), 1))
    begin(groups[0])
    for g in range(len(groups) - 1):
        tiles, turned = groups[g], []
        stream.fill()
        if len(groups[g + 1]) > 0:
            groups[g + 1][0].fetch()
        for tile in tiles:
            tile.gated_RI = nl.ndarray((tile.rows, inner), dtype=x.dtype)
        for b in range(gate_up.shape[0]):
            block = take_block(stream)
            for tile in tiles:
                both_psum = product(block, tile.turned_PTR)
                swiglu(tile.gated_RI[:, b * width : (b + 1) * width], both_psum, tile.inverse(eps))
        for tile in tiles:
            turned.append(turn_rows(tile.gated_RI))
        last_blocks(stream, down.shape[0], (turned, tiles, groups[g + 1]), out_CE)
    return out_CE


@nki.jit
def prompt_product_kernel(x, weight, first=0):
    """y (C, blocks * W) in x's dtype from x (C, K) and weight (blocks, K, W), K a multiple of 128.

    With `first` of the first blocks alone.
    """
    count, depth = x.shape
    blocks, _, columns = weight.shape
    if first > 0:
        blocks = first
    out_CE = nl.ndarray((count, blocks * columns), dtype=x.dtype, buffer=nl.shared_hbm)
    groups = groups_of_core(x, None, GROUP, 0)
    stream = stream_for(groups, (weight,), (blocks,), (sections(depth),))
    begin(groups[0])
    for g in range(len(groups) - 1):
        turned = []
        stream.fill()
        if len(groups[g + 1]) > 0:
            groups[g + 1][0].fetch()
        for tile in groups[g]:
            turned.append(tile.turned_PTR)
        last_blocks(stream, blocks, (turned, groups[g], groups[g + 1]), out_CE)
    return out_CE


def prompt_mlp(
    x: Any,
    gamma: Any,
    weights: tuple[Any, Any],
    *,
    eps: float = 1e-6,
    lnc: int = 1,
    run: Callable[[Any], Any] = nki.simulate,
) -> Any:
    """decode_mlp for x (C, E) of any number of rows: a rank's partial sum, same shape and dtype, decode's bits.

    weights are (pack_gate_up(gate, up), pack(down)). `run` makes a launched kernel callable: nki.simulate here,
    the identity on a Trainium machine.

    Raises:
        ValueError: an operand does not fit; nothing was run.
    """
    _check_rows(x)
    if tuple(gamma.shape) != x.shape[1:]:
        raise ValueError(f"gamma is {tuple(gamma.shape)}, {x.shape[1:]} is needed: pass the norm of this layer")
    check_weights(x, weights)
    check_dtypes(x, gamma, *weights)
    inner, most = weights[1].shape[1], PROMPT_INNER["float32" in str(x.dtype)]
    if inner > most:
        raise ValueError(f"an inner row has {inner} numbers of {x.dtype}, up to {most} are taken: raise tp")
    check_lnc(lnc)
    return run(prompt_mlp_kernel[lnc])(x, gamma, *weights, eps)


def prompt_product(x: Any, weight: Any, *, lnc: int = 1, run: Callable[[Any], Any] = nki.simulate) -> Any:
    """x (C, K) times a weight of pack, pack_qkv or pack_out (blocks, K, W): (C, blocks * W) in x's dtype.

    Raises:
        ValueError: an operand does not fit; nothing was run.
    """
    _check_rows(x)
    shape = tuple(weight.shape)
    if len(shape) != 3 or shape[1] != x.shape[1] or shape[2] > BANK:
        raise ValueError(
            f"the weight is {shape}, blocks (K, W) = ({x.shape[1]}, at most {BANK}) are needed: "
            "make it with pack_weights"
        )
    check_dtypes(x, weight)
    check_lnc(lnc)
    return run(prompt_product_kernel[lnc])(x, weight)


def _check_rows(x: Any) -> None:
    shape, most = tuple(x.shape), PROMPT_DEPTH["float32" in str(x.dtype)]
    if len(shape) != 2 or not shape[0] or shape[1] % P or not P <= shape[1] <= most:
        raise ValueError(
            f"x is {x.dtype} {shape}, (C, K) with K a multiple of {P} up to {most} is needed: "
            "use the reference for this model"
        )
