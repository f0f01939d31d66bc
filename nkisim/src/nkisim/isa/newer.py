"""Instructions that came with NeuronCore-v4 (trn3), by their pages; a launch for trn2 refuses them.

Microscaling: 8 partitions of 4 elements share a scale, 2^(byte - 127). The scales of 32 partitions lie on the first
four partitions of their quadrant, one column for each packed element.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nkisim.core import access
from nkisim.dtypes import COMPUTED, FLOATS, Array
from nkisim.enums import engine, reduce_cmd
from nkisim.errors import ShapeMismatch, TileTooLarge, WrongArgument, WrongOperator
from nkisim.isa import lanes
from nkisim.isa.activations import ON_SCALAR_ENGINE, UNARY
from nkisim.isa.card import card
from nkisim.isa.operators import Op
from nkisim.isa.rng import generator
from nkisim.isa.rules import operator, per_partition, same_elements, same_partitions
from nkisim.isa.scalar import reduction
from nkisim.isa.statement import PSUM, SBUF, Call, Masked, Operand, Results, Target
from nkisim.isa.sums import products, total
from nkisim.isa.tensor import accumulate as accumulated
from nkisim.isa.tensor import one_bank

_FP32 = frozenset({"float32"})
_SCALES = frozenset({"uint8", "float8_e8m0fnu"})
# the element type of a packed one, the largest exponent of its values, and its bits
_PACKED = {
    "float8_e4m3fn_x4": (ml_dtypes.float8_e4m3fn, 8, 8),
    "float8_e5m2_x4": (ml_dtypes.float8_e5m2, 15, 8),
    "float4_e2m1fn_x4": (ml_dtypes.float4_e2m1fn, 2, 4),
}
_BIAS, _LANES, _GROUP = 127, 4, 8


def _scale_rows(partitions: int) -> NDArray[np.intp]:
    """The partition of each partition's scales."""
    rows = np.arange(partitions)
    return 32 * (rows // 32) + rows % 32 // _GROUP


def _scales(call: Call, name: str, rows: int, columns: int) -> None:
    """Check the shape of scales."""
    scale = call.tensors[name]
    if scale.shape[0] not in ((4, 32) if rows == 32 else (rows,)) or per_partition(scale) != columns:
        allowed = f"{rows} partitions have {columns} scales each on the first four partitions of every 32"
        call.refuse(ShapeMismatch, name, f"has shape {scale.shape}", allowed)


def _quadrants(call: Call, name: str) -> int:
    rows = call.tensors[name].shape[0]
    if rows % 32 or rows > 128:
        call.refuse(TileTooLarge, name, f"has {rows} partitions", "32, 64, 96 or 128 are needed")
    return rows


def _product_shapes(call: Call) -> None:
    rows, moving, dst = _quadrants(call, "stationary"), call.tensors["moving"], call.tensors["dst"]
    m, n = per_partition(call.tensors["stationary"]), per_partition(moving)
    limit = 512 if dst.dtype == "float32" else 1024
    if m % 2 or m > 128 or n > limit:
        call.refuse(TileTooLarge, "stationary and moving", f"have {m} and {n} columns", f"even to 128, and {limit}")
    if moving.shape[0] != rows or dst.shape[0] != m or per_partition(dst) != n:
        actual = f"has shape {dst.shape} and moving {moving.shape}"
        call.refuse(ShapeMismatch, "dst", actual, f"the product over {rows} partitions is ({m}, {n})")
    for name, columns in (("stationary", m), ("moving", n)):
        _scales(call, f"{name}_scale", rows, columns)


def _read_scales(call: Call) -> None:
    """Check the scales that are read; the other partitions of their tiles may be unwritten."""
    for name in ("stationary_scale", "moving_scale"):
        scale = call.tensors[name]
        for row in range(0, scale.shape[0], 32):
            access.read(call.core, scale[row : row + 4], call.who(name))


def _dequantized(packed: Array, scale: Array, dtype: str) -> Array:
    """(K, N) of packed elements and their scales as (4 K, N) fp32."""
    kind, _, bits = _PACKED[dtype]
    lanes_ = [((packed >> (bits * i)) & (2**bits - 1)).astype(np.uint8).view(kind) for i in range(_LANES)]
    exponents = scale.view(np.uint8)[_scale_rows(len(packed))].astype(np.int32)
    values = [np.ldexp(lane.astype(np.float32), exponents - _BIAS) for lane in lanes_]
    return np.concatenate([np.where(exponents == 255, np.float32(np.nan), v) for v in values])


def _multiplied(call: Call, results: Results) -> Results:
    sides = []
    for name, values, scale in zip(("stationary", "moving"), results[:2], results[2:], strict=True):
        sides.append(_dequantized(values, scale, call.tensors[name].dtype))
    return [products(*sides).astype(call.tensors["dst"]._numpy().dtype)]


@card(
    "tensor",
    Operand("dst", "out", spaces=PSUM, dtypes=_FP32 | {"bfloat16"}),
    Operand("stationary", "in", spaces=SBUF, dtypes=frozenset(_PACKED), math="raw"),
    Operand("moving", "in", spaces=SBUF, dtypes=frozenset(_PACKED), math="raw"),
    Operand("stationary_scale", "in", spaces=SBUF, dtypes=_SCALES, math="raw", checked=True),
    Operand("moving_scale", "in", spaces=SBUF, dtypes=_SCALES, math="raw", checked=True),
    rules=(_product_shapes,),
    always=(one_bank,),
    values=(_read_scales,),
    finish=_multiplied,
    writer=accumulated,
    generation=4,
)
def nc_matmul_mx(
    dst: Target, stationary: Array, moving: Array, stationary_scale: Array, moving_scale: Array,
    tile_position: tuple[int, int] | None = None, tile_size: tuple[int, int] | None = None,
    accumulate: bool | None = None, name: str | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    """Multiply MX-quantized tiles, over partitions and the four elements packed in each."""
    return stationary, moving, stationary_scale, moving_scale


def _quantized_shapes(call: Call) -> None:
    rows, columns = _quadrants(call, "src"), per_partition(call.tensors["src"])
    dst = call.tensors["dst"]
    if columns % _LANES or dst.shape[0] != rows or per_partition(dst) != columns // _LANES:
        call.refuse(ShapeMismatch, "dst", f"has shape {dst.shape}", f"four of {rows} x {columns} elements are packed")
    _scales(call, "dst_scale", rows, columns // _LANES)


def _quantized(call: Call, results: Results) -> Results:
    kind, largest, bits = _PACKED[call.tensors["dst"].dtype]
    (values,) = results
    rows, columns = values.shape[0], values.shape[1] // _LANES
    groups = np.abs(values.reshape(rows // _GROUP, _GROUP, columns, _LANES)).max(axis=(1, 3))
    exponents = np.where(groups == 0, 0, np.frexp(groups)[1] - 1 - (largest - 1) + _BIAS)
    scales = np.where(np.isfinite(groups), np.clip(exponents, 0, 254), 255)
    shared = np.repeat(scales, _GROUP, axis=0)[:, :, None]
    elements = np.ldexp(values.reshape(rows, columns, _LANES), _BIAS - shared).astype(kind).view(np.uint8)
    packed = sum(elements[:, :, i].astype(np.uint32) << np.uint32(bits * i) for i in range(_LANES))
    target = call.tensors["dst_scale"]
    placed = np.zeros((target.shape[0], columns), np.uint8)
    where = np.zeros(placed.shape, np.bool_)
    at = np.unique(_scale_rows(rows))
    placed[at], where[at] = scales, True
    return [packed, Masked(placed.view(target._numpy().dtype), where)]


@card(
    "vector",
    Operand("dst", "out", spaces=SBUF, dtypes=frozenset(_PACKED) - {"float4_e2m1fn_x4"}),
    Operand("src", "in", spaces=SBUF, dtypes=frozenset({"float16", "bfloat16"})),
    Operand("dst_scale", "out", spaces=SBUF, dtypes=_SCALES),
    rules=(_quantized_shapes,),
    finish=_quantized,
    generation=4,
)
def quantize_mx(dst: Target, src: Array, dst_scale: Target, name: str | None = None) -> Array:
    """Quantize to MXFP8: the scale of a group is 2^(floor(log2(its largest magnitude)) - largest exponent + 1)."""
    return src


_FIRST = ("multiply", "add", "subtract", "bypass")
_STAGES = {("multiply", "add"), ("multiply", "subtract"), *((name, "bypass") for name in _FIRST)}
_ABSOLUTE = {"abs_max": "maximum", "abs_min": "minimum"}


def _stages(call: Call) -> None:
    pair = call.args["op0"].name, call.args["op1"].name
    if pair not in _STAGES:
        allowed = "multiply goes with add, subtract or bypass, and add, subtract and bypass with bypass"
        call.refuse(WrongOperator, "op0 and op1", f"are nl.{pair[0]} and nl.{pair[1]}", allowed)


def _activated(call: Call, results: Results) -> Results:
    value, op = results[0], call.args["reduce_op"]
    name = op.name if op is not None else "add"
    kind = _ABSOLUTE.get(name, name)
    data = np.abs(value) if kind != name else value
    partial = total(data) if kind == "add" else getattr(np, kind).reduce(data, axis=1, keepdims=True)
    if call.args["reduce_cmd"] is not reduce_cmd.idle:
        return [value, lanes.update(call, partial, kind)]
    return [value, lanes.read(call, lanes.first_lane(call, "dst")) if "reduce_res" in call.tensors else None]


@card(
    "scalar",
    Operand("dst", "out"),
    Operand("data", "in"),
    Operand("imm0", "in", scalar=True, column=True),
    Operand("imm1", "in", scalar=True, column=True),
    Operand("relu_param", "in", scalar=True, column=True),
    Operand("reduce_res", "out", dtypes=FLOATS, optional=True, column=True),
    rules=(
        same_elements("dst", "data"),
        same_partitions("data", "imm0", "imm1", "relu_param", "reduce_res"),
        operator("op", ON_SCALAR_ENGINE | {"prelu"}),
        operator("op0", _FIRST),
        operator("op1", _FIRST),
        operator("reduce_op", ("add", "maximum", "minimum", *_ABSOLUTE), optional=True),
        lanes.commands(reduce_cmd.idle, reduce_cmd.reset, reduce_cmd.reduce, reduce_cmd.reset_reduce),
        _stages,
        reduction,
    ),
    finish=_activated,
    generation=4,
)
def activate2(
    dst: Target, op: Op, data: Array, imm0: Array | float, imm1: Array | float, op0: Op, op1: Op,
    relu_param: Array | float = 0.0, reverse0: bool = False, reverse1: bool = False, reduce_op: Op | None = None,
    reduce_res: Target | None = None, reduce_cmd: reduce_cmd = reduce_cmd.idle, engine: engine = engine.scalar,
    name: str | None = None,
) -> Array:  # fmt: skip
    """Compute op((data op0 imm0) op1 imm1) and, if requested, a reduction of the result."""
    value = data
    for stage, other, swapped in ((op0, imm0, reverse0), (op1, imm1, reverse1)):
        if stage.name != "bypass":
            number = np.asarray(other, np.float32)
            value = stage.fn(number, value) if swapped else stage.fn(value, number)
    if op.name == "prelu":
        return np.where(value > 0, value, value * np.asarray(relu_param, np.float32))
    return op.fn(value)


def _summed(call: Call, results: Results) -> Results:
    if call.args["reduce_cmd"] is reduce_cmd.idle:
        lanes.lose(call)
        return results[:1]
    return [results[0], lanes.update(call, total(results[0]), "add", call.args["reduce_init"])]


@card(
    "vector",
    Operand("dst", "out", dtypes=COMPUTED - {"uint32", "bool"}),
    Operand("src", "in", dtypes=COMPUTED - {"tfloat32", "bool"}),
    Operand("max_value", "in", dtypes=_FP32, scalar=True, column=True),
    Operand("reduce_res", "out", dtypes=FLOATS, optional=True, column=True),
    rules=(
        same_elements("dst", "src"),
        same_partitions("src", "max_value", "reduce_res"),
        lanes.commands(reduce_cmd.idle, reduce_cmd.reduce, reduce_cmd.reset_reduce, reduce_cmd.load_reduce),
    ),
    finish=_summed,
    generation=4,
)
def exponential(
    dst: Target, src: Array, max_value: Array | float = 0.0, reduce_res: Target | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle, reduce_init: float = 0.0, name: str | None = None,
) -> Array:  # fmt: skip
    """Compute exp(src - max_value) on the Vector Engine and, if requested, its sum."""
    return UNARY["exp"].fn(src - np.asarray(max_value, np.float32))


def _range(call: Call) -> None:
    low, high = call.args["min"], call.args["max"]
    if "min" not in call.tensors and "max" not in call.tensors and not low < high:
        call.refuse(WrongArgument, "min and max", f"are {low} and {high}", "min is below max")


def _uniform(call: Call, results: Results) -> Results:
    low, high = (np.asarray(bound, np.float32) for bound in results[0])
    dst = call.tensors["dst"]
    numbers = generator(call.core).random((dst.shape[0], per_partition(dst)), dtype=np.float32)
    return [low + (high - low) * numbers]


@card(
    "vector",
    Operand("dst", "out", dtypes=COMPUTED - {"bool"}),
    Operand("min", "in", dtypes=_FP32, scalar=True, column=True),
    Operand("max", "in", dtypes=_FP32, scalar=True, column=True),
    rules=(same_partitions("dst", "min", "max"), _range),
    finish=_uniform,
    generation=4,
)
def rand2(
    dst: Target, min: Array | float, max: Array | float, name: str | None = None
) -> tuple[tuple[Array | float, Array | float]]:
    """Generate uniform numbers of [min, max); the generator is a stand-in, as that of rng is."""
    return ((min, max),)
