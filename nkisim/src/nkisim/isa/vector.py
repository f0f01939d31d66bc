"""Vector Engine: element-wise operators, reductions, scans, statistics."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkisim.dtypes import Array
from nkisim.enums import engine, reduce_cmd
from nkisim.errors import NotSimulated, ShapeMismatch, WrongArgument, WrongDtype, WrongEngine, WrongOperator
from nkisim.isa import lanes
from nkisim.isa.card import card
from nkisim.isa.operators import Op, reduce_axis
from nkisim.isa.rules import (
    ARITHMETIC,
    BITVEC,
    UNARY,
    integers_for_bitvec,
    newer,
    not_both_psum,
    operator,
    per_partition,
    same_elements,
    same_partitions,
)
from nkisim.isa.statement import Call, Operand, Results, Target, is_psum
from nkisim.isa.tokens import resolve
from nkisim.memory.tensor import NkiTensor

WORDS = frozenset({"int32", "uint32"})
REDUCERS = frozenset({
    "add", "subtract", "multiply", "maximum", "minimum", "logical_and", "logical_or", "logical_xor", "bitwise_and",
    "bitwise_or", "bitwise_xor",
})  # fmt: skip
_SIMPLE = ("add", "multiply", "maximum", "minimum")


def _all_words(call: Call) -> bool:
    return all(t.dtype in WORDS for t in call.tensors.values())


def _any_psum(call: Call) -> bool:
    return any(is_psum(t) for t in call.tensors.values())


def _tensor_tensor_engine(call: Call) -> str:
    op = resolve(call.args["op"], call.who("op"))
    if op.name == "power":
        return "gpsimd"
    words = op.kind != "bitvec" and _all_words(call) and not _any_psum(call)
    return "gpsimd" if words else "vector"


def _tensor_tensor_rules(call: Call) -> None:
    op = call.args["op"]
    if op.name == "power" and call.engine != "gpsimd":
        call.refuse(WrongEngine, "engine", f"is {call.engine} for nl.power", "power runs on gpsimd")
    if op.kind == "bitvec" and call.engine == "gpsimd":
        call.refuse(WrongEngine, "engine", f"is gpsimd for nl.{op.name}", "bitvec operators run on vector")


def _tensor_tensor_math(call: Call) -> str:
    if call.args["op"].kind == "bitvec":
        return "raw"
    return "raw" if call.engine == "gpsimd" and _all_words(call) else "fp32"


@card(
    "vector gpsimd",
    Operand("dst", "out"),
    Operand("data1", "in", math="auto"),
    Operand("data2", "in", math="auto"),
    rules=(
        same_elements("dst", "data1", "data2"),
        not_both_psum("data1", "data2"),
        operator("op", ARITHMETIC | BITVEC),
        _tensor_tensor_rules,
        integers_for_bitvec("op", "dst", "data1", "data2"),
    ),
    pick=_tensor_tensor_engine,
    math=_tensor_tensor_math,
)
def tensor_tensor(
    dst: Target, data1: Array, data2: Array, op: Op, engine: engine = engine.unknown, name: str | None = None
) -> Array:
    """Combine two tiles element by element."""
    return op.fn(data1, data2)


def _tensor_scalar_engine(call: Call) -> str:
    names = [resolve(call.args["op0"], call.who("op0")).name]
    if call.args["op1"] is not None:
        names.append(resolve(call.args["op1"], call.who("op1")).name)
    return "gpsimd" if "rsqrt" in names else "vector"


def _tensor_scalar_rules(call: Call) -> None:
    op0, op1 = call.args["op0"], call.args["op1"]
    if op1 is None and call.args["operand1"] is not None:
        call.refuse(WrongArgument, "operand1", "is given without op1", "leave both None")
    if op1 is not None and (op0.kind == "bitvec") != (op1.kind == "bitvec"):
        actual = f"is nl.{op1.name} after nl.{op0.name}"
        call.refuse(WrongOperator, "op1", actual, "both are bitvec or both are arithmetic")
    for number, op in enumerate((op0, op1)):
        if op is not None:
            _tensor_scalar_operand(call, f"operand{number}", op)
    _tensor_scalar_engine_rules(call)


def _tensor_scalar_operand(call: Call, operand: str, op: Op) -> None:
    value = call.args[operand]
    if op.arity == 1:
        if value is not None and not (np.isscalar(value) and value == 0):
            call.refuse(WrongArgument, operand, f"is {value!r} for the unary nl.{op.name}", "leave it None")
        return
    if value is None:
        call.refuse(WrongArgument, operand, "is missing", f"nl.{op.name} takes two operands")
    tensor = call.tensors.get(operand)
    if op.kind == "bitvec":
        if tensor is None and not isinstance(value, (int, np.integer)):
            call.refuse(WrongArgument, operand, f"is {value!r} for nl.{op.name}", "bitvec operands are integers")
    elif tensor is not None and tensor.dtype != "float32" and not _all_words(call):
        call.refuse(WrongDtype, operand, f"is {tensor.dtype}", "arithmetic column operands are float32")


def _tensor_scalar_engine_rules(call: Call) -> None:
    op0, op1 = call.args["op0"], call.args["op1"]
    pair = (op0.name, op1.name if op1 is not None else None)
    if call.engine == "scalar":
        allowed = {("multiply", "add"), ("multiply", None), ("add", None)}
        if pair not in allowed:
            call.refuse(
                WrongEngine, "engine", f"is scalar for {pair}", "on trn2 it runs (multiply, add), (multiply) and (add)"
            )
    elif call.engine == "gpsimd" and "rsqrt" not in pair:
        call.refuse(WrongEngine, "engine", f"is gpsimd for {pair}", "gpsimd runs rsqrt only")
    elif call.engine == "vector" and "rsqrt" in pair:
        call.refuse(WrongEngine, "engine", "is vector for rsqrt", "rsqrt runs on gpsimd")


def _tensor_scalar_math(call: Call) -> str:
    # int32 tiles with int32 columns are address arithmetic, exact in integers
    column = any(n.startswith("operand") for n in call.tensors)
    exact = column and _all_words(call)
    return "raw" if exact or call.args["op0"].kind == "bitvec" else "fp32"


def apply(op: Op, data: Array, operand: Array | float | None, reverse: bool = False) -> Array:
    """Apply one operator of tensor_scalar."""
    if op.arity == 1:
        return op.fn(data)
    value: Any = operand
    if isinstance(operand, (int, float, np.number)) and data.dtype.kind == "f":
        value = np.float32(operand)
    return op.fn(np.broadcast_to(value, data.shape), data) if reverse else op.fn(data, value)


@card(
    "vector scalar gpsimd",
    Operand("dst", "out"),
    Operand("data", "in", math="auto"),
    Operand("operand0", "in", optional=True, scalar=True, column=True, math="auto"),
    Operand("operand1", "in", optional=True, scalar=True, column=True, math="auto"),
    rules=(
        same_elements("dst", "data"),
        same_partitions("data", "operand0", "operand1"),
        operator("op0", ARITHMETIC | BITVEC | UNARY | {"invert"}),
        operator("op1", ARITHMETIC | BITVEC | UNARY | {"invert"}, optional=True),
        _tensor_scalar_rules,
        integers_for_bitvec("op0", "dst", "data", "operand0", "operand1"),
    ),
    pick=_tensor_scalar_engine,
    math=_tensor_scalar_math,
)
def tensor_scalar(
    dst: Target, data: Array, op0: Op, operand0: Array | float | None, reverse0: bool = False, op1: Op | None = None,
    operand1: Array | float | None = None, reverse1: bool = False, engine: engine = engine.unknown,
    name: str | None = None,
) -> Array:  # fmt: skip
    """Apply (data op0 operand0) op1 operand1 with scalars or columns."""
    result = apply(op0, data, operand0, reverse0)
    return result if op1 is None else apply(op1, result, operand1, reverse1)


def _no_reduction(call: Call) -> None:
    if call.args["reduce_res"] is not None or call.args["reduce_op"] is not None:
        why = "no document here says what it reduces; use tensor_scalar_reduce, or a tensor_reduce after it"
        raise NotSimulated("scalar_tensor_tensor", "reduce_res", why)


def _may_reset(call: Call) -> None:
    """In 0.7 its reduce_cmd is reset_reduce by default, whether it gives a result or not."""
    if call.core.policy.traced:
        lanes.lose(call)


@card(
    "vector",
    Operand("dst", "out"),
    Operand("data", "in"),
    Operand("operand0", "in", scalar=True, column=True),
    Operand("operand1", "in"),
    rules=(
        same_elements("dst", "data", "operand1"),
        same_partitions("data", "operand0"),
        not_both_psum("data", "operand1"),
        operator("op0", ARITHMETIC),
        operator("op1", ARITHMETIC),
        *map(newer, ("reduce_cmd", "reduce_op", "reduce_res")),
        _no_reduction,
    ),
    values=(_may_reset,),
)
def scalar_tensor_tensor(
    dst: Target, data: Array, op0: Op, operand0: Array | float, op1: Op, operand1: Array, reverse0: bool = False,
    reverse1: bool = False, reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce, reduce_op: Op | None = None,
    reduce_res: NkiTensor | None = None, name: str | None = None,
) -> Array:  # fmt: skip
    """Apply (data op0 operand0) op1 operand1 with a scalar or column, then a tile."""
    return apply(op1, apply(op0, data, operand0, reverse0), operand1, reverse1)


def reduced_axes(call: Call) -> tuple[int, ...]:
    """Return the reduced dimensions; they must be the last ones."""
    axis, rank = call.args["axis"], call.tensors["data"].ndim
    axes = sorted(a % rank for a in ((axis,) if isinstance(axis, int) else tuple(axis)))
    if not axes or axes != list(range(rank - len(axes), rank)) or axes[0] == 0:
        actual = f"is {axis} of a tile with {rank} dimensions"
        call.refuse(WrongArgument, "axis", actual, "it names the last free dimensions, not 0")
    return tuple(axes)


def _reduce_rules(call: Call) -> None:
    axes = reduced_axes(call)
    call.args["axis"] = axes
    data, dst, op = call.tensors["data"], call.tensors["dst"], call.args["op"]
    remaining = int(np.prod(data.shape[1 : axes[0]], dtype=np.int64))
    if dst.shape[0] != data.shape[0] or per_partition(dst) != remaining:
        call.refuse(ShapeMismatch, "dst", f"has shape {dst.shape}", f"{(data.shape[0], remaining)} elements remain")
    if call.args["negate"] and op.kind == "bitvec":
        call.refuse(WrongArgument, "negate", f"is set for nl.{op.name}", "it needs arithmetic")


def _reduce_math(call: Call) -> str:
    return "raw" if call.args["op"].kind == "bitvec" else "fp32"


@card(
    "vector",
    Operand("dst", "out"),
    Operand("data", "in", math="auto", shaped=True),
    rules=(operator("op", REDUCERS), _reduce_rules, integers_for_bitvec("op", "dst", "data")),
    math=_reduce_math,
)
def tensor_reduce(
    dst: Target, op: Op, data: Array, axis: tuple[int, ...], negate: bool = False, keepdims: bool = False,
    name: str | None = None,
) -> Array:  # fmt: skip
    """Reduce the last free dimensions."""
    flat = data.reshape(*data.shape[: axis[0]], -1)
    result = reduce_axis(op, flat)
    return -result if negate else result


def _tensor_scalar_reduce_finish(call: Call, results: Results) -> Results:
    command, init = call.args["reduce_cmd"], call.args["reduce_init"]
    if (init is not None) != (command is reduce_cmd.load_reduce):
        allowed = "it belongs to reduce_cmd.load_reduce, which needs it"
        call.refuse(WrongArgument, "reduce_init", f"is {init!r} with {command.name}", allowed)
    total = lanes.update(call, results[1], call.args["reduce_op"].name, init)
    assert total is not None
    return [results[0], -total if call.args["reduce_res_negate"] else total]


def _tensor_scalar_reduce_rules(call: Call) -> None:
    if call.args["reverse0"]:
        raise NotSimulated("tensor_scalar_reduce", "reverse0", "the manual has not got it yet")
    _tensor_scalar_operand(call, "operand0", call.args["op0"])


@card(
    "vector",
    Operand("dst", "out"),
    Operand("data", "in"),
    Operand("operand0", "in", optional=True, scalar=True, column=True),
    Operand("reduce_res", "out", optional=True, column=True),
    rules=(
        same_elements("dst", "data"),
        same_partitions("data", "operand0", "reduce_res"),
        operator("op0", ARITHMETIC | UNARY),
        operator("reduce_op", _SIMPLE),
        _tensor_scalar_reduce_rules,
        lanes.commands(reduce_cmd.reset_reduce, reduce_cmd.reduce, reduce_cmd.load_reduce),
    ),
    finish=_tensor_scalar_reduce_finish,
)
def tensor_scalar_reduce(
    dst: Target, data: Array, op0: Op, operand0: Array | float | None, reduce_op: Op, reduce_res: Target | None = None,
    reverse0: bool = False, reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce, reduce_init: float | None = None,
    reduce_res_negate: bool = False, name: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Apply data op0 operand0 and reduce the result over all free dimensions."""
    result = apply(op0, data, operand0)
    return result, reduce_axis(reduce_op, result)
