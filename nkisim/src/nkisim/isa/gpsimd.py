"""GpSimd Engine: patterns, masks, gathers, reductions over partitions, top-k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nkisim.core import access
from nkisim.dtypes import MOVED, Array
from nkisim.errors import (
    AmbiguousManual,
    DynamicOutOfRange,
    NotSimulated,
    ShapeMismatch,
    TileTooLarge,
    WrongArgument,
    WrongDtype,
)
from nkisim.isa.card import card
from nkisim.isa.operators import COMPARISONS, Op, reduce_axis
from nkisim.isa.rules import newer, operator, per_partition, same_dtype, same_elements, same_partitions
from nkisim.isa.statement import SBUF, Call, Masked, Operand, Target
from nkisim.isa.sums import total
from nkisim.isa.tokens import TOKENS

equal = TOKENS["equal"]
# [step, count] of each dimension
Pattern = Sequence[Sequence[int]]
_INT32 = (-(2**31), 2**31 - 1)


def _pattern(call: Call) -> None:
    pattern = call.args["pattern"]
    if not 1 <= len(pattern) <= 4 or any(len(p) != 2 for p in pattern):
        call.refuse(WrongArgument, "pattern", f"is {pattern}", "one to four pairs [step, num] are needed")
    count = int(np.prod([num for _, num in pattern], dtype=np.int64))
    tensor = call.tensors["dst"]
    if count != per_partition(tensor):
        call.refuse(ShapeMismatch, "pattern", f"makes {count} elements", f"dst has {per_partition(tensor)}")
    for name in ("offset", "channel_multiplier"):
        if not _INT32[0] <= int(call.args[name]) <= _INT32[1]:
            call.refuse(WrongArgument, name, f"is {call.args[name]}", "it is an int32")


def _affine(rows: int, pattern: Pattern, offset: int, multiplier: int) -> Array:
    """Return offset + row * multiplier + sum(index * step) in 32-bit integers."""
    grid = np.zeros((1,), np.int64)
    for step, num in pattern:
        grid = (grid[:, None] + np.arange(num, dtype=np.int64)[None, :] * int(step)).reshape(-1)
    column = np.arange(rows, dtype=np.int64)[:, None] * int(multiplier)
    return (grid[None, :] + column + int(offset)).astype(np.int32)


@card("gpsimd", Operand("dst", "out", spaces=SBUF), rules=(_pattern,))
def iota(dst: Target, pattern: Pattern, offset: int = 0, channel_multiplier: int = 0, name: str | None = None) -> Array:
    """Generate an affine pattern of indices."""
    return _affine(dst.shape[0], pattern, offset, channel_multiplier)


@card(
    "gpsimd",
    Operand("dst", "out", spaces=SBUF),
    Operand("on_true_tile", "in", spaces=SBUF),
    rules=(same_elements("dst", "on_true_tile"), operator("cmp_op", COMPARISONS), _pattern),
)
def affine_select(
    dst: Target, pattern: Pattern, channel_multiplier: int, on_true_tile: Array, on_false_value: float,
    cmp_op: Any = equal, offset: int = 0, name: str | None = None,
) -> Array:  # fmt: skip
    """Keep elements where an affine function of the indices compares true to 0."""
    value = _affine(dst.shape[0], pattern, offset, channel_multiplier)
    return np.where(cmp_op.fn(value, 0) != 0, on_true_tile, np.float32(on_false_value))


def _index_words(call: Call) -> None:
    dtype = call.tensors["indices"].dtype
    if dtype != "uint32":
        call.refuse(WrongDtype, "indices", f"is {dtype}", "it is uint32")


def _gather_inside(call: Call) -> None:
    indices, data = call.tensors["indices"], call.tensors["data"]
    values = access.read(call.core, indices, call.who("indices"))
    if values.size and int(values.max()) >= per_partition(data):
        actual = f"holds {int(values.max())}"
        call.refuse(DynamicOutOfRange, "indices", actual, f"data has {per_partition(data)} elements")


@card(
    "gpsimd",
    Operand("dst", "out", spaces=SBUF, dtypes=MOVED),
    Operand("data", "in", spaces=SBUF, dtypes=MOVED, math="raw"),
    Operand("indices", "in", spaces=SBUF, math="raw"),
    rules=(same_elements("dst", "indices"), same_partitions("dst", "data"), same_dtype("dst", "data"), _index_words),
    values=(_gather_inside,),
)
def nc_n_gather(dst: Target, data: Array, indices: Array, name: str | None = None) -> Array:
    """Pick elements of the same partition by flattened index."""
    return np.take_along_axis(data, indices.astype(np.int64), axis=1)


def _local_rules(call: Call) -> None:
    source, index, dst = (call.tensors[n] for n in ("src_buffer", "index", "dst"))
    group, width = call.core.geometry.gpsimd_group, call.args["num_elem_per_idx"]
    if index.dtype != "uint16":
        call.refuse(WrongDtype, "index", f"is {index.dtype}", "it is uint16")
    if source.shape[0] % group or index.shape[0] != source.shape[0]:
        actual = f"has {index.shape[0]} partitions, src_buffer {source.shape[0]}"
        call.refuse(ShapeMismatch, "index", actual, f"equal multiples of {group} are needed")
    if width not in (1, 2, 4, 8, 16, 32):
        call.refuse(WrongArgument, "num_elem_per_idx", f"is {width}", "1, 2, 4, 8, 16 or 32")
    limit = per_partition(index) * group
    count = call.args["num_valid_indices"]
    count = limit if count is None else int(count)
    if not 0 < count <= min(limit, 4096):
        call.refuse(TileTooLarge, "num_valid_indices", f"is {count}", f"1 to {min(limit, 4096)} are allowed")
    if per_partition(dst) != count * width:
        actual = f"has {per_partition(dst)} elements per partition"
        call.refuse(ShapeMismatch, "dst", actual, f"{count} indices of {width} make {count * width}")
    call.args["num_valid_indices"] = count


def _local_inside(call: Call) -> None:
    source, index = call.tensors["src_buffer"], call.tensors["index"]
    group, width = call.core.geometry.gpsimd_group, call.args["num_elem_per_idx"]
    count = call.args["num_valid_indices"]
    taken = access.read(call.core, index, call.who("index")).reshape(index.shape[0], -1)
    for first in range(0, index.shape[0], group):
        flat = taken[first : first + group].T.reshape(-1)[:count]
        if int(flat.max()) + width > per_partition(source):
            allowed = f"src_buffer has {per_partition(source)} elements per partition"
            call.refuse(DynamicOutOfRange, "index", f"holds {int(flat.max())}", allowed)


@card(
    "gpsimd",
    Operand("dst", "out", spaces=SBUF, dtypes=MOVED),
    Operand("src_buffer", "in", spaces=SBUF, dtypes=MOVED, math="raw"),
    Operand("index", "in", spaces=SBUF, math="raw"),
    rules=(same_partitions("dst", "src_buffer"), same_dtype("dst", "src_buffer"), _local_rules),
    values=(_local_inside,),
)
def local_gather(
    dst: Target, src_buffer: Array, index: Array, num_elem_per_idx: int = 1, num_valid_indices: int | None = None,
    name: str | None = None,
) -> Array:  # fmt: skip
    """Gather in groups of 16 partitions, all partitions of a group by the same index list."""
    result = np.empty(dst.shape, src_buffer.dtype)
    for first in range(0, dst.shape[0], 16):
        rows = slice(first, first + 16)
        flat = index[rows].T.reshape(-1)[:num_valid_indices].astype(np.int64)
        columns = (flat[:, None] + np.arange(num_elem_per_idx)[None, :]).reshape(-1)
        result[rows] = src_buffer[rows][:, columns]
    return result


def _partition_rules(call: Call) -> None:
    dst, data, op = call.tensors["dst"], call.tensors["data"], call.args["op"]
    if dst.shape[0] != 1 or per_partition(dst) != per_partition(data):
        call.refuse(ShapeMismatch, "dst", f"has shape {dst.shape}", f"(1, {per_partition(data)}) is the result")
    if op.kind == "bitvec" and not data.dtype.startswith(("int", "uint")):
        call.refuse(WrongDtype, "data", f"is {data.dtype}", "bitvec operators take integers")


@card(
    "gpsimd",
    Operand("dst", "out", spaces=SBUF),
    Operand("data", "in", spaces=SBUF, math="auto"),
    rules=(operator("op", ("add", "average", "maximum", "bitwise_or", "bitwise_and")), _partition_rules),
    math=lambda call: "raw" if call.args["op"].kind == "bitvec" else "fp32",
)
def tensor_partition_reduce(dst: Target, op: Op, data: Array, name: str | None = None) -> Array:
    """Reduce over the partitions."""
    if op.name in ("add", "average"):
        column = total(data, axis=0)
        return column / np.float32(data.shape[0]) if op.name == "average" else column
    return reduce_axis(op, data.T).T


_SEGMENT = frozenset({"float32", "int32"})


def _bounds_rules(call: Call) -> None:
    dst, ids = call.tensors["dst"], call.tensors["segment_ids"]
    if ids.shape[0] != 1 or dst.shape[0] != 1:
        call.refuse(ShapeMismatch, "segment_ids", f"has {ids.shape[0]} partitions", "one partition is processed")
    if per_partition(dst) != 2 * per_partition(ids):
        call.refuse(ShapeMismatch, "dst", f"has shape {dst.shape}", f"(1, 2, {per_partition(ids)}) is the result")


@card(
    "gpsimd",
    Operand("dst", "out", spaces=SBUF, dtypes=_SEGMENT),
    Operand("segment_ids", "in", spaces=SBUF, dtypes=_SEGMENT, math="raw"),
    rules=(same_dtype("dst", "segment_ids"), _bounds_rules),
)
def sequence_bounds(dst: Target, segment_ids: Array, name: str | None = None) -> Array:
    """Return for each element where its segment starts and ends; padding gets (n, -1)."""
    ids = segment_ids[0]
    count = len(ids)
    change = np.flatnonzero(np.diff(ids)) + 1
    starts = np.concatenate([[0], change])
    ends = np.concatenate([change, [count]])
    which = np.searchsorted(ends, np.arange(count), side="right")
    padding = ids == 0
    start = np.where(padding, count, starts[which])
    end = np.where(padding, -1, ends[which])
    return np.stack([start, end])[None].astype(np.int32)


def _nonzero_rules(call: Call) -> None:
    dst, source = call.tensors["dst"], call.tensors["src"]
    if per_partition(dst) != per_partition(source) + 1:
        actual = f"has {per_partition(dst)} elements per partition"
        call.refuse(ShapeMismatch, "dst", actual, f"src has {per_partition(source)}, one less")
    for name in ("index_offset", "padding_val"):
        value = call.args[name]
        if not isinstance(value, (int, np.integer)) or not _INT32[0] <= value <= _INT32[1]:
            call.refuse(WrongArgument, name, f"is {value!r}", "it is an int32")


def _read_rows(call: Call) -> None:
    """Only every 16th partition is read."""
    source = call.tensors["src"]
    for row in range(0, source.shape[0], call.core.geometry.gpsimd_group):
        access.read(call.core, source[row : row + 1], call.who("src"))


@card(
    "gpsimd",
    Operand("dst", "out", spaces=SBUF, dtypes=frozenset({"int32"})),
    Operand("src", "in", spaces=SBUF, dtypes=_SEGMENT, math="raw", checked=True),
    rules=(same_partitions("dst", "src"), _nonzero_rules),
    always=(_read_rows,),
)
def nonzero_with_count(
    dst: Target, src: Array, index_offset: int = 0, padding_val: int = -1, name: str | None = None
) -> Masked:
    """List the indices of non-zero elements, padding, and their count, on every 16th partition."""
    result = np.full(dst.shape, padding_val, np.int32)
    where = np.zeros(dst.shape, bool)
    for row in range(0, dst.shape[0], 16):
        output = np.flatnonzero(src[row])
        result[row, : len(output)] = output + index_offset
        result[row, -1] = len(output)
        where[row] = True
    return Masked(result, where)


def _topk_rules(call: Call) -> None:
    source, values, n = call.tensors["src"], call.tensors["val_dst"], call.args["n"]
    k = per_partition(values)
    if source.shape[0] % 16:
        call.refuse(ShapeMismatch, "src", f"has {source.shape[0]} partitions", "a multiple of 16 is needed")
    if not 8 <= n < 65536 or per_partition(source) < -(-n // 16):
        allowed = "8 to 65535 that fit 16 partitions are allowed"
        call.refuse(WrongArgument, "n", f"is {n} with {per_partition(source)} elements per partition", allowed)
    if not 1 <= k < 32768 or k > n:
        call.refuse(TileTooLarge, "val_dst", f"has {k} elements", f"1 to {min(n, 32767)} results")


def _topk_order(call: Call) -> None:
    if call.args["sorted"]:
        raise NotSimulated("topk", "sorted", "no document here says which way it sorts; leave it False")
    text = (
        "topk: results leave in snake order (result j at partition j % 16, element j // 16), "
        "as the 0.7 manual says; the 0.6 manual does not say where they go"
    )
    call.core.warn("topk", text, AmbiguousManual)


def _topk_work(call: Call) -> dict[str, object]:
    return {
        "elements": per_partition(call.tensors["src"]),
        "inputs": 1,
        "scalar_operands": 0,
        "function": "topk",
        "n": call.args["n"],
        "k": per_partition(call.tensors["val_dst"]),
    }


@card(
    "gpsimd",
    Operand("val_dst", "out", spaces=SBUF, dtypes=frozenset({"bfloat16"})),
    Operand("idx_dst", "out", spaces=SBUF, dtypes=frozenset({"uint32"})),
    Operand("src", "in", spaces=SBUF, dtypes=frozenset({"bfloat16"})),
    rules=(same_elements("val_dst", "idx_dst"), same_partitions("val_dst", "src"), newer("sorted"), _topk_rules),
    always=(_topk_order,),
    work=_topk_work,
)
def topk(
    val_dst: Target, idx_dst: Target, src: Array, n: int, sorted: bool = False, name: str | None = None
) -> tuple[Masked, Masked]:
    """Find the k largest of the n elements that 16 partitions hold in snake order.

    Results are ascending. They leave in the snake order of the input: result j at partition
    j % 16, element j // 16 (the 0.7 page says so, the 0.6 page is silent).
    """
    k = val_dst.shape[1]
    values = np.zeros(val_dst.shape, np.float32)
    index = np.zeros(idx_dst.shape, np.uint32)
    where = np.zeros(val_dst.shape, bool)
    for first in range(0, src.shape[0], 16):
        snake = src[first : first + 16].T.reshape(-1)[:n]
        # the first occurrence wins among equals
        order = np.argsort(-snake, kind="stable")[:k][::-1]
        slots = np.arange(k)
        rows, at = first + slots % 16, slots // 16
        values[rows, at], index[rows, at], where[rows, at] = snake[order], order, True
    return Masked(values, where), Masked(index, where)
