"""RMSNorm, QKV, qk-norm and RoPE of prefill, for any number of rows: decode's arithmetic.

[v k q][r] = n[r] W,  n[r] = gamma x[r] / rms(x[r]);  q and k are normalized per head over D, then rotated by their
position; q is times 1 / sqrt(D)

B sequences of N rows, C = B * N, E hidden, H query and G kv heads of D = 128. Weights are stationary, and up to 512
rows move. Norms and rotation are decode's code (qkv_heads.py), so a row's bits are those of decode_attention: they do
not depend on C, the row's index, other rows or cores.

Layouts: x (C, E), gamma (E,), k_norm and q_norm (D,), qkv (blocks, E, W) of pack_qkv (heads in the order v, k, q),
cos and sin (B, N, D / 2) fp32; q (B, H, N, D), k and v (B, G, N, D). Each of two cores computes half of the row tiles,
or half of the blocks for a single row tile. FP8 weights have a scale (blocks, 1, W).
Cost: roofline.prompt_qkv. Design: docs/kernels.md. Launched by every prefill graph and by block drafts.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.checks import check, check_floats, check_rank, check_weights, launcher, refuse
from nki_kernels.layer.prompt_matmul import check_depth
from nki_kernels.layer.prompt_rows import groups_of
from nki_kernels.layer.qk_norm_rope import HeadNorm, Rotary, load_norm
from nki_kernels.layer.qkv_heads import HeadsInHBM, QKVHeads, check_heads, rows_of
from nki_kernels.layer.rmsnorm_rows import RMSNormRows, load_gamma, row_splits
from nki_kernels.layer.weight_stream import PackedWeight, WeightStationary, WeightStream, next_block
from nki_kernels.tiles import P, absent, core_slice, itemsize

# heads whose sums are open together: their PSUM banks are half of those that two units and their epilogues use
PAIR = 2
# up to this many bytes per partition the weights stay in SBUF, for groups of two row tiles; others are streamed once
# for each group of three, this many bytes ahead; and the bytes of a group's transposed rows
RESIDENT_BYTES, RESIDENT_GROUP, STREAMED_GROUP, AHEAD_BYTES, ROW_GROUP_BYTES = 49152, 2, 3, 32768, 30720


class RowGroup(nl.NKIObject):
    """Row tiles that share a pass over the weights: transposed rows times gamma, their norm and their heads."""

    def __init__(self, tiles):
        x, last = tiles[0].x, tiles[len(tiles) - 1]
        self.tiles = tiles
        self.first = tiles[0].first
        self.rows = last.first + last.rows - self.first
        self.x_PTR = nl.ndarray((P, x.shape[1] // P, self.rows), dtype=x.dtype)
        # load_angles; norm
        self.rotary = None
        self.normed = None
        self.heads = None
        for tile in tiles:
            tile.x_PTR = self.x_PTR[:, :, self.inside(tile)]

    def inside(self, tile):
        """The columns of a row tile."""
        return slice(tile.first - self.first, tile.first - self.first + tile.rows)

    def load_angles(self, angles):
        """Load the rows' cos and sin."""
        if absent(self.rotary):
            self.rotary = Rotary(angles, self.first, self.rows)

    def norm(self, weight, kv_heads, norms_1D, eps):
        """What the heads need of their rows: 1 / rms, and the tables of angles."""
        squares_PR, rotary = nl.ndarray((P, self.rows), dtype=nl.float32), self.rotary
        for tile in self.tiles:
            tile.transpose_sums(squares_PR[:, self.inside(tile)])
        self.normed = RMSNormRows(self.x_PTR, squares_PR, eps)
        norms = (HeadNorm(norms_1D[0], rotary), HeadNorm(norms_1D[1], rotary, P**-0.5))
        self.heads = QKVHeads(weight, P, kv_heads, norms, rotary)
        self.normed.inv_rms_all_partitions()
        self.normed.eps_scaled()


class Unit(nl.NKIObject):
    """`count` heads from `start` on of a block for a group of rows, and row tiles to transpose after the product."""

    def __init__(self, group, block, start, count):
        self.group = group
        self.block = block
        self.start = start
        self.count = count
        self.following = []
        # multiply; copy: the heads, (D, heads, R), and NormAndRotate of keys and queries
        self.product = None
        self.heads_DHR = None
        self.steps = []

    def multiply(self, tiles):
        """The product with a block."""
        self.product = WeightStationary(self.group.x_PTR, P, self.count, False, False, self.start)
        for tile in tiles:
            self.product.add([tile])

    def copy(self):
        """Store the values; copy the other heads out of PSUM."""
        group, engine = self.group, nisa.engine.scalar
        self.heads_DHR = nl.ndarray((P, self.count, group.rows), dtype=group.x_PTR.dtype)
        self.steps = group.heads.begin(self.block, self.start, self.product, group.normed, self.heads_DHR, engine)

    def rotate(self):
        """Normalize and rotate keys and queries; GpSimd takes roots while the Vector Engine rotates."""
        for step in self.steps:
            step.sum()
            step.root(self.group.normed.eps_scaled())
        for step in self.steps:
            step.rotate()
            step.store()

    def store(self, out):
        """Transpose and store the heads."""
        for tile in self.group.tiles:
            rows_RHD = rows_of(self.heads_DHR[:, :, self.group.inside(tile)])
            out.store(rows_RHD, tile.first, self.block * self.group.heads.per_block + self.start)


def units_of(groups, weight):
    """The units of all groups; each transposes a part of the next group's row tiles."""
    units, per_block = [], weight.columns // P
    for g in range(len(groups)):
        first = len(units)
        for block in range(weight.blocks[0], weight.blocks[1]):
            for start in range(0, per_block, PAIR):
                units.append(Unit(groups[g], block, start, min(PAIR, per_block - start)))
        if g + 1 < len(groups):
            following = groups[g + 1].tiles
            for j in range(len(following)):
                units[first + j * (len(units) - first) // len(following)].following.append(following[j])
    return units


class Blocks(nl.NKIObject):
    """The blocks of the weights: resident in SBUF, or streamed once for each group of row tiles."""

    def __init__(self, weight, passes, resident):
        self.weight = weight
        self.resident = resident
        self.loaded = []
        queue = weight.tiles()
        if not resident:
            for _ in range(passes - 1):
                queue = queue + weight.tiles()
        self.stream = WeightStream(queue, AHEAD_BYTES)

    def of_unit(self, unit):
        """The tiles of a unit's block; units are in the order of use."""
        if self.resident and unit.block - self.weight.blocks[0] < len(self.loaded):
            return self.loaded[unit.block - self.weight.blocks[0]]
        if unit.start == 0:
            self.loaded.append(next_block(self.stream, self.weight))
        return self.loaded[len(self.loaded) - 1]


class Pipeline(nl.NKIObject):
    """The units of a core. The Tensor Engine multiplies before it takes up what others prepared of earlier units.

    Row tiles are loaded two units before they are transposed.
    """

    def __init__(self, groups, blocks, kv_heads, head_norms, angles, eps):
        self.groups = groups
        self.units = units_of(groups, blocks.weight)
        self.blocks = blocks
        self.kv_heads = kv_heads
        self.norms_1D = (load_norm(head_norms[0]), load_norm(head_norms[1]))
        self.angles = angles
        self.eps = eps

    def begin(self):
        """Load and transpose the first group."""
        blocks, first = self.blocks, self.groups[0]
        prefetch(first.tiles)
        blocks.weight.load_scale(blocks.weight.columns // P)
        first.load_angles(self.angles)
        blocks.stream.prefetch()
        for tile in first.tiles:
            tile.transpose()
        for unit in self.units[0:2]:
            prefetch(unit.following)
        prepare(self.units[0].following)

    def multiply(self, unit):
        """A unit's product, and what its epilogue needs first."""
        unit.multiply(self.blocks.of_unit(unit))
        if absent(unit.group.normed):
            unit.group.norm(self.blocks.weight, self.kv_heads, self.norms_1D, self.eps)
        unit.copy()

    def prepare_rows(self, i):
        """Transpose the row tiles of unit i, and prepare those of the next two."""
        units = self.units
        if i + 2 < len(units):
            prefetch(units[i + 2].following)
        if i + 1 < len(units):
            units[i + 1].group.load_angles(self.angles)
            prepare(units[i + 1].following)
        for tile in units[i].following:
            tile.transpose()

    def run(self, out):
        """All units, and two iterations to finish the last ones."""
        units = self.units
        self.begin()
        for i in range(len(units) + 2):
            if i < len(units):
                self.multiply(units[i])
            if 0 <= i - 1 < len(units):
                units[i - 1].rotate()
            if i >= 2:
                units[i - 2].store(out)
            if i < len(units):
                self.prepare_rows(i)


def prefetch(tiles):
    """Load row tiles."""
    for tile in tiles:
        tile.prefetch()


def prepare(tiles):
    """Reorder row tiles that were loaded."""
    for tile in tiles:
        tile.prepare()


@nki.jit
def prompt_qkv_kernel(x, gamma, k_norm, q_norm, qkv, cos, sin, kv_heads, eps=1e-6, scale=None):
    """Return q (B, H, N, D), k and v (B, G, N, D) in x's dtype; `scale` is that of an FP8 weight."""
    (blocks, hidden, columns), (batch, count, _) = qkv.shape, cos.shape
    out = HeadsInHBM((batch, count, P), kv_heads, blocks * columns // P - 2 * kv_heads, x.dtype)
    tiles, resident = -(-x.shape[0] // P), blocks * hidden // P * columns * itemsize(qkv.dtype) <= RESIDENT_BYTES
    row_span, block_span, largest = core_slice(tiles), (0, blocks), STREAMED_GROUP
    if tiles == 1:
        row_span, block_span = (0, 1), core_slice(blocks)
    if resident:
        largest = RESIDENT_GROUP
    largest = max(1, min(largest, ROW_GROUP_BYTES // (hidden * itemsize(x.dtype))))
    gamma_PT, groups = load_gamma(gamma, x.dtype), []
    for of_group in groups_of(x, gamma_PT, 0, row_span, largest, largest):
        if len(of_group) > 0:
            groups.append(RowGroup(of_group))
    weight = PackedWeight("qkv", qkv, block_span, row_splits(hidden), scale)
    if len(groups) > 0 and block_span[0] < block_span[1]:
        in_sbuf = Blocks(weight, len(groups), resident)
        Pipeline(groups, in_sbuf, kv_heads, (k_norm, q_norm), (cos, sin), eps).run(out)
    return out.tensors[2], out.tensors[1], out.tensors[0]


def check_operands(x, gamma, k_norm, q_norm, qkv, cos, sin, kv_heads, eps=1e-6, scale=None):
    """Refuse operands that the kernel cannot serve."""
    check_depth(x)
    rows, hidden = x.shape
    batch, count, half = check_rank("cos", cos, "B, N, D / 2")
    refuse(half * 2 != P, f"head dim D is {half * 2}, the fused kernel serves {P}: use verify_attention for this model")
    refuse(batch * count != rows, f"cos is {tuple(cos.shape)} for {rows} rows: pass the angles of each row of x")
    check("gamma", gamma, (hidden,), remedy="pass the norm of this layer")
    check_heads(hidden, kv_heads, (k_norm, q_norm), qkv, (cos, sin), (batch, count))
    check_floats(x, gamma, k_norm, q_norm)
    check_weights(x, ("qkv",), (qkv,), None if scale is None else (scale,))


prompt_qkv = launcher(prompt_qkv_kernel, check_operands)
