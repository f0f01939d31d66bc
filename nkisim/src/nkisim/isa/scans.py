"""Vector Engine: running reductions along the free dimension."""

from __future__ import annotations

import numpy as np

from nkisim.dtypes import COMPUTED, Array
from nkisim.enums import reduce_cmd
from nkisim.errors import WrongArgument
from nkisim.isa import lanes
from nkisim.isa.card import card
from nkisim.isa.operators import Op
from nkisim.isa.rules import ARITHMETIC, not_both_psum, operator, same_elements, same_partitions
from nkisim.isa.statement import Call, Operand, Results, Target
from nkisim.isa.vector import apply

_NARROW = COMPUTED - {"int32", "uint32", "tfloat32"}


def _load(call: Call) -> None:
    init, command = call.args["imm1"], call.args["reduce_cmd"]
    if (init is not None) != (command is reduce_cmd.load_reduce):
        allowed = "it belongs to reduce_cmd.load_reduce, which needs it"
        call.refuse(WrongArgument, "imm1", f"is {init!r} with {command.name}", allowed)


def _start(call: Call) -> None:
    """Give the body the register values that the running result starts from."""
    command, op = call.args["reduce_cmd"], call.args["op1"].name
    if command is reduce_cmd.reset_reduce:
        call.args["imm1"] = lanes.START[op]
    elif command is reduce_cmd.reduce:
        call.args["imm1"] = np.array(lanes.read(call, lanes.first_lane(call, "dst")))


def _keep(call: Call, results: Results) -> Results:
    registers = call.core.registers(call.engine)
    if registers.operator is None:
        registers.values[...] = np.nan
    registers.values[lanes.first_lane(call, "dst")] = results[0][:, -1:]
    registers.operator, registers.lost_to = call.args["op1"].name, None
    return results


@card(
    "vector",
    Operand("dst", "out", dtypes=_NARROW),
    Operand("src", "in", dtypes=_NARROW),
    Operand("imm0", "in", dtypes=frozenset({"float32"}), scalar=True, column=True),
    Operand("imm1", "in", dtypes=frozenset({"float32"}), optional=True, scalar=True, column=True),
    rules=(
        same_elements("dst", "src"),
        same_partitions("src", "imm0", "imm1"),
        operator("op0", ARITHMETIC),
        operator("op1", ("add", "subtract", "multiply", "maximum", "minimum")),
        lanes.commands(reduce_cmd.reset_reduce, reduce_cmd.reduce, reduce_cmd.load_reduce),
        _load,
    ),
    values=(_start,),
    finish=_keep,
)
def tensor_scalar_cumulative(
    dst: Target, src: Array, op0: Op, op1: Op, imm0: Array | float, imm1: Array | float | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce, name: str | None = None,
) -> Array:  # fmt: skip
    """Store every step of register = op1(op0(x, imm0), register)."""
    steps = apply(op0, src, imm0)
    register = np.broadcast_to(np.asarray(imm1, np.float32), (steps.shape[0], 1))[:, 0]
    result = np.empty(steps.shape, np.float32)
    for i in range(steps.shape[1]):
        register = op1.fn(steps[:, i], register)
        result[:, i] = register
    return result


@card(
    "vector",
    Operand("dst", "out"),
    Operand("data0", "in"),
    Operand("data1", "in"),
    Operand("initial", "in", scalar=True, column=True),
    rules=(
        same_elements("dst", "data0", "data1"),
        same_partitions("data0", "initial"),
        not_both_psum("data0", "data1"),
        operator("op0", ARITHMETIC),
        operator("op1", ARITHMETIC),
    ),
)
def tensor_tensor_scan(
    dst: Target, data0: Array, data1: Array, initial: Array | float, op0: Op, op1: Op, reverse0: bool = False,
    reverse1: bool = False, name: str | None = None,
) -> Array:  # fmt: skip
    """Store every step of result = op1(op0(data0, result), data1)."""
    before = np.broadcast_to(np.asarray(initial, np.float32), (data0.shape[0], 1))[:, 0]
    # columns contiguous, so that a step touches full cache lines
    first, second = np.ascontiguousarray(data0.T), np.ascontiguousarray(data1.T)
    result = np.empty(first.shape, np.float32)
    for i in range(first.shape[0]):
        inner = op0.fn(before, first[i]) if reverse0 else op0.fn(first[i], before)
        before = op1.fn(second[i], inner) if reverse1 else op1.fn(inner, second[i])
        result[i] = before
    return result.T
