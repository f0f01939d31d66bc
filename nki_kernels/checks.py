"""Host launches of kernels and their refusals, one sentence: what was given, what is supported, what to do."""

import math

import nki
import numpy as np

from nki_kernels.limits import CHUNK, ROWS, SPARE_PAGES, attention_limit_error
from nki_kernels.tiles import BANK, P, absent

FP32, FP8, INT32, FLOATS = ("float32",), ("float8_e4m3",), ("int32",), ("float32", "bfloat16")
HEAD_DIMS = (64, 128, 256)
# the transposed rows of 128 x 8192 elements and their squares leave room in SBUF for the weight stream
MAX_HIDDEN = 8192
# ids and sums of ids stay exact in fp32
MAX_VOCABULARY = 1 << 22


def launcher(kernel, check_operands):
    """The host function of a kernel: it checks the kernel's operands, launches, and returns the kernel's results.

    `lnc` is the number of cores; `run` makes a launched kernel callable: nki.simulate on a CPU, the identity on a
    Trainium machine. Raises ValueError if an operand does not fit; nothing was run or written.
    """

    def launch(*operands, lnc=1, run=nki.simulate):
        check_operands(*operands)
        refuse(lnc not in (1, 2), f"lnc is {lnc}, 1 or 2 cores share a launch on trn2: pass one of them")
        return run(kernel[lnc])(*operands)

    return launch


def refuse(condition, sentence):
    """Raise ValueError with the sentence if the condition holds."""
    if condition:
        raise ValueError(sentence)


def dtype_of(array):
    """The name of an array's dtype, NumPy or torch."""
    return str(array.dtype).removeprefix("torch.")


def check(name, array, shape, kinds=FLOATS, remedy="reshape or convert it"):
    """Refuse an operand of another shape or dtype."""
    actual, kind = tuple(array.shape), dtype_of(array)
    good = actual == tuple(shape) and kind in kinds
    refuse(not good, f"{name} is {kind} {actual}, {' or '.join(kinds)} {tuple(shape)} is needed: {remedy}")


def check_rank(name, array, axes):
    """The shape of an operand; refuse it if it has other axes than `axes`."""
    shape = tuple(array.shape)
    refuse(len(shape) != len(axes.split(", ")), f"{name} is {shape}, ({axes}) is needed: add or flatten axes")
    return shape


def check_floats(*arrays):
    """Refuse arrays that are not all float32 or all bfloat16."""
    names = sorted({dtype_of(a) for a in arrays})
    good = len(names) == 1 and names[0] in FLOATS
    refuse(not good, f"dtypes are {', '.join(names)}, all float32 or all bfloat16 is needed: convert the operands")


def check_paged(k_pages, v_pages, block_table, dim, rows, unit=CHUNK):
    """G of the pools; refuse pools and a block table that do not serve `rows`, (B, H, N)."""
    batch, heads, count = rows
    refuse(dim not in HEAD_DIMS, f"head dim D is {dim}, 64, 128 and 256 are served: use the reference for this model")
    shape, other = check_rank("k_pages", k_pages, "pages, G, 128, D"), tuple(v_pages.shape)
    pages, kv_heads = shape[:2]
    refuse(
        other != shape or shape[2:] != (P, dim) or heads % kv_heads > 0,
        f"pools are {shape} and {other}, both (pages, G, {P}, {dim}) with H = {heads} a multiple of G are needed: keys "
        "are not transposed in pages",
    )
    table = np.asarray(block_table)
    good = table.ndim == 2 and table.shape[0] == batch and table.dtype == np.int32 and table.size > 0
    refuse(
        not good or table.shape[1] * P % unit > 0,
        f"block_table is {table.dtype} {table.shape}, int32 ({batch}, S / {P}) with S a multiple of {unit} is needed: "
        "fill it with page 0",
    )
    low, high, last = table.min(), table.max(), pages - 1 - SPARE_PAGES
    refuse(
        low < 0 or high > last,
        f"block_table names pages {low} to {high}, 0 to {last} hold sequences and the last {SPARE_PAGES} of a pool are "
        "spare ones: fill unused entries with page 0",
    )
    error = attention_limit_error(batch, heads // kv_heads * count, table.shape[1] * P, pages * kv_heads * P)
    refuse(error != "", error)
    return kv_heads


def check_rows(x, gamma):
    """Refuse operands that are not x (R, E) and gamma (E,), R from 1 to 128 and E a multiple of 128."""
    rows, hidden = check_rank("x", x, "R, E")
    check_row_count(rows)
    refuse(
        hidden % P > 0 or not P <= hidden <= MAX_HIDDEN,
        f"E is {hidden}, a multiple of {P} up to {MAX_HIDDEN} is needed: use the reference for this model",
    )
    check("gamma", gamma, (hidden,), remedy="pass the norm of this layer")


def check_row_count(rows, limit=ROWS):
    """Refuse no rows and more than `limit`."""
    refuse(not 1 <= rows <= limit, f"there are {rows} rows, 1 to {limit} fit a launch: split the batch or lower k")


def check_packed(name, tensor, depth, features, packed_by):
    """Refuse a packed weight that is not (blocks, K, C) with K = depth and blocks * C = features, unless None."""
    shape = tuple(tensor.shape)
    good = len(shape) == 3 and shape[1] == depth and shape[2] <= BANK and features in (None, math.prod(shape[::2]))
    columns = f", {features} columns in all," * (features is not None)
    refuse(
        not good,
        f"{name} is {shape}, blocks (K, C) = ({depth}, at most {BANK}){columns} are needed: make it with {packed_by}",
    )


def check_weights(x, names, weights, scales):
    """Refuse packed weights of another dtype than x's, or FP8 ones without scales (blocks, 1, C) or with fp32 rows."""
    if absent(scales):
        check_floats(x, *weights)
        return
    rows = dtype_of(x)
    refuse(rows != "bfloat16", f"x is {rows}, FP8 weights multiply bfloat16 rows: convert x, or pass {rows} weights")
    for name, weight, scale in zip(names, weights, scales, strict=True):
        check(name, weight, weight.shape, FP8, "quantize it, or pass no scales")
        check(f"{name}'s scale", scale, (weight.shape[0], 1, weight.shape[2]), FP32, "pack it as its weight")


def check_mlp(x, gamma, gate_up, down, scales=None):
    """Refuse weights that are not gate_up (blocks, E, 2 C), blocks even, and down (blocks, I, C)."""
    hidden = x.shape[1]
    check("gamma", gamma, (hidden,), remedy="pass the norm of this layer")
    check_packed("gate_up", gate_up, hidden, None, "pack_gate_up")
    blocks, _, columns = gate_up.shape
    refuse(blocks % 2 + columns % 2 > 0, f"gate_up has {blocks} blocks of {columns} columns: make it with pack_gate_up")
    check_packed("down", down, blocks * columns // 2, hidden, "pack")
    check_floats(x, gamma)
    check_weights(x, ("gate_up", "down"), (gate_up, down), scales)


def check_vocabulary(columns):
    """Refuse a shard without ids, or with too many."""
    good = 1 <= columns < MAX_VOCABULARY
    refuse(not good, f"the shard has {columns} ids, 1 to {MAX_VOCABULARY - 1} are served: shard the vocabulary")


def check_logits(logits, limit=ROWS):
    """R and V of logits (R, V); refuse NaN, and more than `limit` rows."""
    rows, columns = check_rank("logits", logits, "R, V")
    check_row_count(rows, limit)
    check_vocabulary(columns)
    check("logits", logits, (rows, columns))
    has_nan = np.isnan(np.asarray(logits).astype(np.float32)).any()
    refuse(has_nan, "logits hold NaN, numbers are needed: look for an overflow in the layers before")
    return rows, columns
