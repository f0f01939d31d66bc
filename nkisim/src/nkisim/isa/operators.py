"""Operators as numpy functions on fp32 (arithmetic) or on raw bits (bitvec)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nkisim.dtypes import Array
from nkisim.isa.functions import power
from nkisim.isa.sums import halved, total

F32 = np.float32
Fn = Callable[..., Array]


@dataclass(frozen=True, slots=True)
class Op:
    """One operator: its class in the manual's tables, its arity and its meaning."""

    name: str
    # "arith" | "bitvec" | "activation"
    kind: str
    arity: int
    fn: Fn
    # start value of a reduction with this operator, if it may reduce
    identity: float | int | None = None
    # the function that reduces an axis, if no order affects the result
    ufunc: np.ufunc | None = None


def _truth(fn: Fn) -> Fn:
    def apply(x: Array, y: Array | float) -> Array:
        return fn(x, y).astype(F32)

    return apply


def _shift(fn: Fn) -> Fn:
    def apply(x: Array, y: Array | float) -> Array:
        """Shift as unsigned bits; counts of the width or more give zero."""
        x = np.asarray(x)
        bits = np.dtype(f"u{x.dtype.itemsize}")
        count = np.asarray(y).astype(bits)
        shifted = fn(x.view(bits), np.minimum(count, 8 * x.dtype.itemsize - 1))
        return np.where(count >= 8 * x.dtype.itemsize, bits.type(0), shifted).view(x.dtype)

    return apply


def _abs_pick(fn: Fn) -> Fn:
    def apply(x: Array, y: Array | float) -> Array:
        return fn(np.abs(x), np.abs(y))

    return apply


def _bit(fn: Fn) -> Fn:
    def apply(x: Array, y: Array | float) -> Array:
        # an immediate takes the bits of the tensor's type
        x = np.asarray(x)
        return fn(x, np.asarray(y).astype(x.dtype))

    return apply


def _logical(fn: Fn) -> Fn:
    def apply(x: Array, y: Array | float) -> Array:
        return fn(np.asarray(x) != 0, np.asarray(y) != 0).astype(F32)

    return apply


def maximum(x: Array, y: Array | np.float32 | float) -> Array:
    """The larger one; which of two zeros a processor takes is its own affair, so that a zero here is +0."""
    return np.add(np.maximum(x, y), 0)


def minimum(x: Array, y: Array | np.float32 | float) -> Array:
    """The smaller one; a zero is +0."""
    return np.add(np.minimum(x, y), 0)


_INF = float("inf")
_BINARY = (
    ("add", np.add, 0.0, None),
    ("subtract", np.subtract, 0.0, None),
    ("multiply", np.multiply, 1.0, None),
    ("divide", np.divide, None, None),
    ("maximum", maximum, -_INF, np.maximum),
    ("minimum", minimum, _INF, np.minimum),
    ("abs_max", _abs_pick(np.maximum), 0.0, None),
    ("abs_min", _abs_pick(np.minimum), _INF, None),
    ("power", power, None, None),
    ("equal", _truth(np.equal), None, None),
    ("not_equal", _truth(np.not_equal), None, None),
    ("less", _truth(np.less), None, None),
    ("less_equal", _truth(np.less_equal), None, None),
    ("greater", _truth(np.greater), None, None),
    ("greater_equal", _truth(np.greater_equal), None, None),
    ("logical_and", _logical(np.logical_and), 1.0, None),
    ("logical_or", _logical(np.logical_or), 0.0, None),
    ("logical_xor", _logical(np.logical_xor), 0.0, None),
    ("fmod", np.fmod, None, None),
    ("mod", np.mod, None, None),
)
_BITVEC = (
    ("bitwise_and", _bit(np.bitwise_and), -1, np.bitwise_and),
    ("bitwise_or", _bit(np.bitwise_or), 0, np.bitwise_or),
    ("bitwise_xor", _bit(np.bitwise_xor), 0, np.bitwise_xor),
    ("left_shift", _shift(np.left_shift), None, None),
    ("right_shift", _shift(np.right_shift), None, None),
)

BINARY: dict[str, Op] = {
    **{n: Op(n, "arith", 2, f, i, u) for n, f, i, u in _BINARY},
    **{n: Op(n, "bitvec", 2, f, i, u) for n, f, i, u in _BITVEC},
    "invert": Op("invert", "bitvec", 1, np.invert),
}
COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")


def reduce_axis(op: Op, values: Array) -> Array:
    """Reduce the last axis of (P, ..., F), keeping it with size 1: sums and products by halves, the rest in order."""
    if op.name in ("add", "multiply"):
        return halved(op.fn, values)
    if op.name == "subtract":
        # ((x0 - x1) - x2) ...
        return values[..., :1] - total(values[..., 1:])
    if op.ufunc is not None:
        # the zero that a maximum may be is +0
        return np.add(op.ufunc.reduce(values, axis=-1, keepdims=True), 0)
    result = op.fn(values[..., :1], values[..., :1]) if op.name.startswith("abs_") else values[..., :1]
    if op.name.startswith("logical"):
        result = (values[..., :1] != 0).astype(F32)
    for i in range(1, values.shape[-1]):
        result = op.fn(result, values[..., i : i + 1])
    return result
