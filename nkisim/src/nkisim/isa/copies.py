"""On-chip copies: tensor_copy, memset, predicated copy and the selecting copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nkisim.dtypes import FLOATS, INFO, MOVED, PACKED, Array
from nkisim.enums import engine, reduce_cmd
from nkisim.errors import ShapeMismatch, TileTooLarge, WrongArgument, WrongDtype
from nkisim.isa import lanes
from nkisim.isa.card import card
from nkisim.isa.operators import BINARY, Op, reduce_axis
from nkisim.isa.rules import not_both_psum, operator, same_dtype, same_elements, same_partitions
from nkisim.isa.statement import Call, Masked, Operand, Results, Target
from nkisim.isa.tokens import TOKENS
from nkisim.memory.memory import check_start

FP32_MIN = -3.4028234663852886e38
_COMPARE = ("equal", "less", "less_equal", "greater", "greater_equal")
maximum = TOKENS["maximum"]


def _copy_math(call: Call) -> str:
    same = call.tensors["dst"].dtype == call.tensors["src"].dtype
    return "raw" if same else "fp32"


@card(
    "vector scalar gpsimd",
    Operand("dst", "out", dtypes=MOVED),
    Operand("src", "in", dtypes=MOVED, math="auto"),
    rules=(same_elements("dst", "src"),),
    math=_copy_math,
)
def tensor_copy(dst: Target, src: Array, engine: engine = engine.unknown, name: str | None = None) -> Array:
    """Copy a tile; bit-exact between equal dtypes, through fp32 otherwise."""
    return src


def _memset_value(call: Call) -> None:
    value, dtype = call.args["value"], call.tensors["dst"].dtype
    if not isinstance(value, (int, float, np.number, bool)):
        call.refuse(WrongArgument, "value", f"is {value!r}", "a compile-time number is needed")
    if dtype in PACKED and value != 0:
        call.refuse(WrongArgument, "value", f"is {value!r} for {dtype}", "packed types take 0 only")
    if INFO[dtype].kind == "int":
        if value != int(value):
            call.refuse(WrongArgument, "value", f"is {value!r} for {dtype}", "an integer tile takes a whole number")
        limits = np.iinfo(INFO[dtype].storage)
        if not limits.min <= int(value) <= limits.max:
            call.refuse(WrongArgument, "value", f"is {value} for {dtype}", f"{limits.min} to {limits.max} fit")


@card("vector gpsimd", Operand("dst", "out", dtypes=MOVED), rules=(_memset_value,))
def memset(dst: Target, value: float, engine: engine = engine.unknown, name: str | None = None) -> Array:
    """Fill a tile with a constant."""
    kind = np.int64 if INFO[dst.dtype].kind != "float" else np.float32
    if INFO[dst.dtype].kind == "packed":
        kind = INFO[dst.dtype].storage.type
    return np.broadcast_to(np.array(value, kind), dst.shape)


def _predicate(call: Call) -> None:
    if call.tensors["predicate"].dtype not in ("uint8", "uint16", "uint32", "bool"):
        actual = f"is {call.tensors['predicate'].dtype}"
        call.refuse(WrongDtype, "predicate", actual, "it can be uint8, uint16 or uint32")


@card(
    "vector",
    Operand("dst", "out"),
    Operand("src", "in", scalar=True, math="raw"),
    Operand("predicate", "in", math="raw"),
    rules=(
        same_elements("dst", "src", "predicate"),
        same_dtype("dst", "src"),
        _predicate,
        not_both_psum("src", "predicate"),
    ),
)
def tensor_copy_predicated(
    dst: Target, src: Array | float, predicate: Array, reverse_pred: bool = False, name: str | None = None
) -> Masked:
    """Copy where the predicate is not zero; elsewhere dst stays."""
    chosen = (predicate == 0) if reverse_pred else (predicate != 0)
    return Masked(np.broadcast_to(np.asarray(src), dst.shape), chosen)


def _select_dtypes(call: Call) -> None:
    if call.tensors["on_true"].dtype in ("tfloat32", "int32", "uint32"):
        actual = f"is {call.tensors['on_true'].dtype}"
        call.refuse(WrongDtype, "on_true", actual, "tfloat32, int32 and uint32 are not supported")


def _select_finish(call: Call, results: Results) -> Results:
    wanted = call.tensors.get("reduce_res") is not None
    if call.args["reduce_cmd"] is reduce_cmd.idle:
        if wanted:
            call.refuse(
                WrongArgument,
                "reduce_res",
                "is given with reduce_cmd.idle",
                "reduce_cmd.reset_reduce or reduce produce a result",
            )
        lanes.lose(call)
        return [results[0], None]
    return [results[0], lanes.update(call, results[1], "maximum")]


@card(
    "vector",
    Operand("dst", "out"),
    Operand("predicate", "in", dtypes=frozenset({"int8", "uint8", "int16", "uint16", "bool"}), math="raw"),
    Operand("on_true", "in"),
    Operand("on_false", "in", scalar=True, column=True),
    Operand("reduce_res", "out", dtypes=FLOATS, optional=True, column=True),
    rules=(
        same_elements("dst", "on_true", "predicate"),
        same_partitions("dst", "on_false", "reduce_res"),
        not_both_psum("on_true", "predicate"),
        _select_dtypes,
        operator("reduce_op", ("maximum",)),
        lanes.commands(reduce_cmd.idle, reduce_cmd.reset_reduce, reduce_cmd.reduce),
    ),
    finish=_select_finish,
)
def select_reduce(
    dst: Target, predicate: Array, on_true: Array, on_false: Array | float, reduce_res: Target | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle, reduce_op: Any = maximum, reverse_pred: bool = False,
    name: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Choose between a tile and a scalar or column; optionally keep a running maximum."""
    chosen = (predicate == 0) if reverse_pred else (predicate != 0)
    picked = np.where(chosen, on_true, np.asarray(on_false, np.float32))
    return picked, reduce_axis(BINARY["maximum"], picked)


def _range_limits(call: Call) -> None:
    start = call.args["range_start"]
    size = call.tensors["dst"].size // call.tensors["dst"].shape[0]
    if not isinstance(start, (int, np.integer)) or start < 0 or start + size > 2**24:
        call.refuse(TileTooLarge, "range_start", f"is {start!r} with {size} elements", "indices must stay below 2**24")
    value = float(call.args["on_false_value"])
    if not math.isclose(value, FP32_MIN, rel_tol=1e-6):
        call.refuse(WrongArgument, "on_false_value", f"is {value}", f"the hardware takes {FP32_MIN}")


def _range_finish(call: Call, results: Results) -> Results:
    if call.args["reduce_cmd"] is reduce_cmd.idle:
        lanes.lose(call)
        return [results[0], None]
    return [results[0], lanes.update(call, results[1], "maximum")]


@card(
    "vector",
    Operand("dst", "out", dtypes=FLOATS),
    Operand("on_true_tile", "in", dtypes=FLOATS),
    Operand("bound0", "in", dtypes=frozenset({"float32"}), column=True),
    Operand("bound1", "in", dtypes=frozenset({"float32"}), column=True),
    Operand("reduce_res", "out", dtypes=FLOATS, optional=True, column=True),
    rules=(
        same_elements("dst", "on_true_tile"),
        same_partitions("dst", "bound0", "bound1", "reduce_res"),
        operator("comp_op0", _COMPARE),
        operator("comp_op1", _COMPARE),
        operator("reduce_op", ("maximum",)),
        _range_limits,
    ),
    finish=_range_finish,
)
def range_select(
    dst: Target, on_true_tile: Array, comp_op0: Op, comp_op1: Op, bound0: Array, bound1: Array,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce, reduce_res: Target | None = None, reduce_op: Any = maximum,
    range_start: int = 0, on_false_value: float = FP32_MIN, name: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Keep the elements whose index lies between two bounds; elsewhere the lowest fp32."""
    index = np.arange(range_start, range_start + on_true_tile.shape[1], dtype=np.float32)[None, :]
    inside = (comp_op0.fn(index, bound0) != 0) & (comp_op1.fn(index, bound1) != 0)
    picked = np.where(inside, on_true_tile, np.float32(FP32_MIN))
    return picked, reduce_axis(BINARY["maximum"], picked)


def _shuffle_rules(call: Call) -> None:
    mask = call.args["shuffle_mask"]
    if len(mask) != 32 or any(not (0 <= int(m) < 32 or int(m) == 255) for m in mask):
        call.refuse(WrongArgument, "shuffle_mask", f"is {list(mask)!r:.60}",
                    "32 entries from 0 to 31, or 255 to keep, are needed")  # fmt: skip
    dst, src = call.tensors["dst"], call.tensors["src"]
    if dst.size // dst.shape[0] != src.size // src.shape[0]:
        call.refuse(ShapeMismatch, "src", f"has shape {src.shape}", f"dst has {dst.shape}")
    geometry = call.core.geometry
    active = -(-max(dst.shape[0], src.shape[0]) // 32) * 32
    for operand in ("dst", "src"):
        start = lanes.first_lane(call, operand).start
        check_start(start, active, geometry, call.who(operand))
    for row in range(dst.shape[0]):
        source = int(mask[row % 32])
        if source != 255 and row // 32 * 32 + source >= src.shape[0]:
            actual = f"sends partition {row // 32 * 32 + source} to {row}"
            call.refuse(WrongArgument, "shuffle_mask", actual, f"src has {src.shape[0]} partitions")


@card(
    "vector",
    Operand("dst", "out", dtypes=MOVED),
    Operand("src", "in", dtypes=MOVED, math="raw"),
    rules=(_shuffle_rules, same_dtype("dst", "src")),
)
def nc_stream_shuffle(dst: Target, src: Array, shuffle_mask: Sequence[int], name: str | None = None) -> Masked:
    """Move rows inside each group of 32 partitions."""
    rows = np.arange(dst.shape[0])
    mask = np.asarray(shuffle_mask, np.int64)[rows % 32]
    keep = mask == 255
    moved = src[np.where(keep, 0, rows // 32 * 32 + mask)]
    return Masked(moved, np.broadcast_to(~keep[:, None], dst.shape))
