"""Prefill's products with the packed weights of decode, for any number of rows.

prompt_mlp: out[r] = (silu(n[r] Wg) * (n[r] Wu)) Wd,  n[r] = gamma * x[r] / sqrt(mean_e x[r, e]^2 + eps)
prompt_product: out[r] = x[r] W

C rows, E hidden, I intermediate, K inputs of W. Row tiles of 128 are stationary, and up to 512 columns of weights
move; up to GROUP row tiles share each pass over the weights. K tiles accumulate as in weight_stream.py, and norm and
SwiGLU are decode_mlp's, so a row's bits are decode's: they do not depend on C, the row's index, other rows or cores.

Layouts: x (C, E) or (C, K), gamma (E,), gate_up (blocks, E, 2 W) of pack_gate_up, down (blocks, I, W) of pack; weight
(blocks, K, W) of pack, pack_qkv, pack_out or pack_head, K a multiple of 128; prompt_product multiplies its `first`
blocks, or all for 0. Each of two cores computes half of the row tiles, or half of the blocks for a single row tile.
FP8 weights have scales (blocks, 1, W).
Cost: roofline.prompt_mlp and roofline.prompt_product. Design: docs/kernels.md. Launched by every prefill graph,
and prompt_product for the projections of block drafts and the head of every pass.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.checks import check_mlp, check_packed, check_rank, check_weights, dtype_of, launcher, refuse
from nki_kernels.layer.channel_scale import load_scale_rows, scale_of, scaled
from nki_kernels.layer.mlp import swiglu
from nki_kernels.layer.prompt_rows import groups_of
from nki_kernels.layer.rmsnorm_rows import load_gamma, row_splits
from nki_kernels.layer.weight_stream import (
    PackedWeight,
    WeightStream,
    accumulate,
    alternate_engine,
    next_block,
    row_products,
    transpose_in_order,
    transpose_rows,
)
from nki_kernels.limits import PROMPT_DEPTH, PROMPT_INNER
from nki_kernels.tiles import P, absent, core_slice, dma_static, preload_act_table

# up to this many K tiles SBUF holds a full block; a deeper block is used tile by tile
DEEP = 40


def stream_for(groups, weights):
    """The stream of all tiles of each weight, one weight after the other, once for each group of row tiles."""
    queue = []
    for _ in range(len(groups) - 1):
        for weight in weights:
            queue = queue + weight.tiles()
    return WeightStream(queue)


def begin(groups, g, stream):
    """Issue the first weights of a group and the first rows of the next group; load and transpose group 0."""
    if g == 0:
        for tile in groups[0]:
            tile.prefetch()
        for tile in groups[0]:
            tile.transpose()
    stream.prefetch()
    if len(groups[g + 1]) > 0:
        groups[g + 1][0].prefetch()


def multiply(block, weight, x_PTR):
    """The product of one tile of rows (128, tiles, R) with a loaded block: PSUM (R, C)."""
    product = row_products(weight, [x_PTR])[0]
    product.add(block)
    return product.psum


def project_tiles(out_CE, stream, weight, x, tiles, following):
    """Store the product of a weight with each row tile of a group; transpose the next group's rows in between."""
    start, columns = weight.blocks[0], weight.columns
    blocks = weight.blocks[1] - start
    for b in range(start, weight.blocks[1]):
        block, products, scale_PC = [], [], load_scale_rows(weight.scale, b)
        if weight.k_tiles > DEEP:
            products = row_products(weight, x)
            accumulate(stream, weight, products)
        else:
            block = next_block(stream, weight)
        for i in range(len(tiles)):
            if weight.k_tiles > DEEP:
                psum_RC = products[i].psum
            else:
                psum_RC = multiply(block, weight, x[i])
            rounded_RC, row = nl.ndarray(psum_RC.shape, dtype=out_CE.dtype), tiles[i].first
            if weight.is_fp8():
                scale_RC = scale_PC[0 : tiles[i].rows]
                nisa.tensor_tensor(dst=rounded_RC, data1=psum_RC, data2=scale_RC, op=nl.multiply)
            else:
                nisa.tensor_copy(dst=rounded_RC, src=psum_RC, engine=alternate_engine(i))
            dma_static(out_CE[row : row + tiles[i].rows, b * columns : (b + 1) * columns], rounded_RC)
        for j in range(len(following)):
            if start + j * blocks // len(following) == b:
                following[j].transpose()
                # one tile ahead: SBUF has no room for a group's rows in addition to its transposed ones
                if j + 1 < len(following):
                    following[j + 1].prefetch()


@nki.jit
def prompt_mlp_kernel(x, gamma, gate_up, down, eps=1e-6, scales=None):
    """Return out (C, E) in x's dtype; `scales` (gate_up's, down's) are those of FP8 weights."""
    count, hidden = x.shape
    width, inner = gate_up.shape[2] // 2, down.shape[1]
    out_CE = nl.ndarray((count, hidden), dtype=x.dtype, buffer=nl.shared_hbm)
    # a first group of one tile: matmuls begin before more rows are loaded and transposed
    groups = groups_of(x, load_gamma(gamma, x.dtype), inner, core_slice(-(-count // P)), 1)
    preload_act_table(nl.silu)
    both = PackedWeight("gate_up", gate_up, (0, gate_up.shape[0]), row_splits(hidden), scale_of(scales, 0))
    last = PackedWeight("down", down, (0, down.shape[0]), 1, scale_of(scales, 1))
    stream = stream_for(groups, (both, last))
    for g in range(len(groups) - 1):
        begin(groups, g, stream)
        gated = []
        for tile in groups[g]:
            tile.gated_RI = nl.ndarray((tile.rows, inner), dtype=x.dtype)
        for b in range(gate_up.shape[0]):
            block, scale_PC = next_block(stream, both), load_scale_rows(both.scale, b)
            for tile in groups[g]:
                psum_RC = scaled(multiply(block, both, tile.x_PTR), scale_PC)
                if absent(tile.normed):
                    tile.normed = tile.norm(eps)
                swiglu(tile.gated_RI[:, b * width : (b + 1) * width], psum_RC, tile.normed.inv_rms())
        for tile in groups[g]:
            if both.fills_tiles():
                gated.append(transpose_in_order(tile.gated_RI))
            else:
                gated.append(transpose_rows(tile.gated_RI))
        project_tiles(out_CE, stream, last, gated, groups[g], groups[g + 1])
    return out_CE


@nki.jit
def prompt_product_kernel(x, weight, first=0, scale=None):
    """Return out (C, blocks * W) in x's dtype; `scale` is that of an FP8 weight."""
    blocks, _, columns = weight.shape
    if first > 0:
        blocks = first
    out_CE = nl.ndarray((x.shape[0], blocks * columns), dtype=x.dtype, buffer=nl.shared_hbm)
    tiles = -(-x.shape[0] // P)
    row_span, block_span = core_slice(tiles), (0, blocks)
    if tiles == 1:
        row_span, block_span = (0, 1), core_slice(blocks)
    groups = groups_of(x, None, 0, row_span)
    packed = PackedWeight("weight", weight, block_span, 1, scale)
    stream = stream_for(groups, (packed,))
    for g in range(len(groups) - 1):
        begin(groups, g, stream)
        rows = []
        for tile in groups[g]:
            rows.append(tile.x_PTR)
        project_tiles(out_CE, stream, packed, rows, groups[g], groups[g + 1])
    return out_CE


def check_depth(x):
    """Refuse x unless it is (C, K), K a multiple of 128 for which SBUF holds transposed rows."""
    rows, depth = check_rank("x", x, "C, K")
    limit = PROMPT_DEPTH[dtype_of(x) == "float32"]
    refuse(
        not rows or depth % P > 0 or not P <= depth <= limit,
        f"x is {x.dtype} {tuple(x.shape)}, (C, K) with K a multiple of {P} up to {limit} is needed: use the reference "
        "for this model",
    )


def check_prompt_mlp(x, gamma, gate_up, down, eps=1e-6, scales=None):
    """Refuse operands that prompt_mlp_kernel cannot serve."""
    check_depth(x)
    check_mlp(x, gamma, gate_up, down, scales)
    inner, limit = down.shape[1], PROMPT_INNER[dtype_of(x) == "float32"]
    refuse(inner > limit, f"an intermediate row has {inner} elements of {x.dtype}, up to {limit} are served: raise tp")


def check_prompt_product(x, weight, first=0, scale=None):
    """Refuse operands that prompt_product_kernel cannot serve."""
    check_depth(x)
    check_packed("weight", weight, x.shape[1], None, "pack_weights")
    check_weights(x, ("weight",), (weight,), None if scale is None else (scale,))
    blocks = weight.shape[0]
    refuse(not 0 <= first <= blocks, f"first is {first}, the weight has {blocks} blocks: pass 0 for all of them")


prompt_mlp = launcher(prompt_mlp_kernel, check_prompt_mlp)
prompt_product = launcher(prompt_product_kernel, check_prompt_product)
