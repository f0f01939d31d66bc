"""Scalar Engine: activation functions with scale, bias and a running sum."""

from __future__ import annotations

import numpy as np

from nkisim.dtypes import COMPUTED, FLOATS, Array
from nkisim.enums import engine, reduce_cmd
from nkisim.errors import WrongArgument
from nkisim.isa import lanes
from nkisim.isa.activations import ON_SCALAR_ENGINE, VALID
from nkisim.isa.ambiguities import of_bias
from nkisim.isa.card import card
from nkisim.isa.instruction import NkiInstruction
from nkisim.isa.operators import Op
from nkisim.isa.rules import operator, same_elements, same_partitions
from nkisim.isa.statement import Call, Operand, Results, Target
from nkisim.isa.sums import total
from nkisim.isa.tokens import Token
from nkisim.memory.tensor import NkiTensor

_FP32 = frozenset({"float32"})


def reduction(call: Call) -> None:
    """A command that reduces has an operator."""
    command = call.args["reduce_cmd"]
    if command in (reduce_cmd.reduce, reduce_cmd.reset_reduce) and call.args["reduce_op"] is None:
        call.refuse(WrongArgument, "reduce_op", f"is None with reduce_cmd.{command.name}", "nl.add is needed")


def _finish(call: Call, results: Results) -> Results:
    value, total = results
    if call.args["reduce_cmd"] is not reduce_cmd.idle:
        total = lanes.update(call, total, "add")
    elif call.tensors.get("reduce_res") is not None:
        total = lanes.read(call, lanes.first_lane(call, "dst"))
    op = call.args["op"]
    if op.name in VALID and op.name not in call.core.warned:
        _range(call, op.name)
    return [value, total]


def _range(call: Call, name: str) -> None:
    """Warn once per core when an input leaves the function's documented range."""
    data = call.tensors["data"]._numpy().astype(np.float32)
    scaled = _affine(data.reshape(data.shape[0], -1), *(_plain(call, n) for n in ("scale", "bias")))
    low, high = VALID[name]
    if np.any((scaled < low) | (scaled > high)):
        text = (
            f"activation: nl.{name} gets inputs outside [{low:.3g}, {high:.3g}], where the hardware's result is invalid"
        )
        call.core.warn(name, text)


def _plain(call: Call, name: str) -> Array | float | None:
    tensor = call.tensors.get(name)
    if tensor is None:
        return call.args[name]
    return tensor._numpy().astype(np.float32).reshape(tensor.shape[0], 1)


def _affine(data: Array, scale: Array | float | None, bias: Array | float | None) -> Array:
    if not (np.isscalar(scale) and scale == 1.0):
        data = data * (np.asarray(scale, np.float32))
    if bias is None or (np.isscalar(bias) and bias == 0):
        return data
    return data + np.asarray(bias, np.float32)


@card(
    "scalar",
    Operand("dst", "out"),
    Operand("data", "in"),
    Operand("bias", "in", dtypes=COMPUTED - {"tfloat32"}, optional=True, scalar=True, column=True),
    Operand("scale", "in", dtypes=_FP32, scalar=True, column=True),
    Operand("reduce_res", "out", dtypes=FLOATS, optional=True, column=True),
    rules=(
        same_elements("dst", "data"),
        same_partitions("data", "bias", "scale", "reduce_res"),
        operator("op", ON_SCALAR_ENGINE),
        operator("reduce_op", ("add",), optional=True),
        lanes.commands(reduce_cmd.idle, reduce_cmd.reset, reduce_cmd.reduce, reduce_cmd.reset_reduce),
        reduction,
    ),
    always=(of_bias,),
    finish=_finish,
)
def activation(
    dst: Target, op: Op, data: Array, bias: Array | float | None = None, scale: Array | float = 1.0,
    reduce_op: Op | None = None, reduce_res: Target | None = None, reduce_cmd: reduce_cmd = reduce_cmd.idle,
    engine: engine = engine.scalar, name: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute op(data * scale + bias) and, if requested, the sum of the result."""
    value = op.fn(_affine(data, scale, bias))
    if reduce_op is None:
        return value, np.zeros((data.shape[0], 1), np.float32)
    return value, total(value)


def activation_reduce(
    dst: NkiTensor, op: Token, data: NkiTensor, reduce_op: Token, reduce_res: NkiTensor,
    bias: NkiTensor | float | None = None, scale: NkiTensor | float = 1.0, name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Compute an activation and its sum over the free dimensions (older spelling)."""
    return activation(
        dst=dst, op=op, data=data, bias=bias, scale=scale, reduce_op=reduce_op,
        reduce_res=reduce_res, reduce_cmd=reduce_cmd.reset_reduce, name=name,
    )  # fmt: skip
