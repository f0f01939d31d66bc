"""Executing nl.* math on tensors: each call becomes one or a few nki.isa instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nkisim import isa
from nkisim.core.context import current
from nkisim.errors import NeedsNewerCore, ShapeMismatch, WrongArgument, WrongOperator
from nkisim.isa.activations import ON_SCALAR_ENGINE, UNARY
from nkisim.isa.card import card
from nkisim.isa.functions import rounded, sin
from nkisim.isa.operators import COMPARISONS
from nkisim.isa.rules import HARDWARE_GAPS, NEWER, same_elements
from nkisim.isa.statement import Operand
from nkisim.isa.tokens import TOKENS, Token
from nkisim.language.creation import ndarray
from nkisim.memory.tensor import NkiTensor

# wider types win; floats win over integers
_RANK = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "float8_e5m2", "float8_e4m3", "float16", "bfloat16",
    "tfloat32", "float32",
]  # fmt: skip


def promoted(*values: Any) -> str:
    """Return the dtype of a result: the widest among the tensors."""
    names = [v.dtype for v in values if isinstance(v, NkiTensor)]
    return max(names, key=lambda n: _RANK.index(n) if n in _RANK else -1)


def run(token: Token, arguments: Mapping[str, Any]) -> NkiTensor:
    """Execute a math name on tensors; the result is a new tile in SBUF."""
    if token.op is None or "axis" in arguments:
        return _reduction(token, dict(arguments))
    if "y" in arguments:
        return _binary(token, arguments["x"], arguments["y"], arguments["dtype"])
    if "x" not in arguments:
        raise WrongOperator(f"nl.{token.__name__}", None, "is called", "it is an op= name only")
    return _unary(token, arguments["x"], arguments["dtype"])


def _binary(token: Token, x: Any, y: Any, dtype: Any) -> NkiTensor:
    name = f"nl.{token.__name__}"
    tiles = [v for v in (x, y) if isinstance(v, NkiTensor)]
    if not tiles:
        raise WrongArgument(name, "x and y", f"are {x!r} and {y!r}", "one must be a tensor")
    core = current(name)
    if token.__name__ in NEWER and core.geometry.generation < 4:
        raise NeedsNewerCore(name)
    dst = ndarray(tiles[0].shape, dtype or promoted(*tiles))
    if token.__name__ in HARDWARE_GAPS:
        core.warn(token.__name__, f"{name} has no hardware instruction")
    before, core.hardware_gaps = core.hardware_gaps, True
    try:
        if len(tiles) == 2:
            if x.shape != y.shape:
                actual = f"have shapes {x.shape} and {y.shape}"
                raise ShapeMismatch(name, "x and y", actual, "binary functions do not broadcast")
            isa.tensor_tensor(dst=dst, data1=x, data2=y, op=token)
        elif isinstance(x, NkiTensor):
            isa.tensor_scalar(dst=dst, data=x, op0=token, operand0=y)
        else:
            isa.tensor_scalar(dst=dst, data=y, op0=token, operand0=x, reverse0=True)
    finally:
        core.hardware_gaps = before
    dst._compared = token.__name__ in COMPARISONS
    return dst


@card("vector", Operand("dst", "out"), Operand("data", "in"), rules=(same_elements("dst", "data"),))
def language_function(dst: Any, data: Any, op: Any, name: str | None = None) -> Any:
    """Stand for the undocumented instruction sequence of a language function."""
    return op.fn(data)


def _unary(token: Token, x: Any, dtype: Any) -> NkiTensor:
    name = f"nl.{token.__name__}"
    if not isinstance(x, NkiTensor):
        raise WrongArgument(name, "x", f"is {x!r:.60}", "a tensor is needed")
    op = token.op
    assert op is not None
    dst = ndarray(x.shape, dtype or x.dtype)
    if op.name == "copy":
        isa.tensor_copy(dst=dst, src=x)
        dst._storage.copied = x._storage, x._storage.writes
    elif op.name in {"invert", "rsqrt"}:
        isa.tensor_scalar(dst=dst, data=x, op0=token, operand0=None)
    elif op.name == "reciprocal":
        isa.reciprocal(dst=dst, data=x)
    elif op.name == "negative":
        isa.tensor_scalar(dst=dst, data=x, op0=TOKENS["multiply"], operand0=-1.0)
    elif op.name == "logical_not":
        isa.tensor_scalar(dst=dst, data=x, op0=TOKENS["equal"], operand0=0.0)
    elif op.name in ON_SCALAR_ENGINE and op.name != "sin":
        isa.activation(dst=dst, op=token, data=x)
    else:
        language_function(dst=dst, data=x, op=_REDUCED.get(op.name, op))
    return dst


# nl.sin reduces its range first, the instruction does not
_REDUCED = {"sin": replace(UNARY["sin"], fn=rounded(sin))}


def axes_of(x: NkiTensor, axis: Any) -> tuple[int, ...]:
    """Return the reduced dimensions as sorted non-negative numbers."""
    items: Sequence[int] = (axis,) if isinstance(axis, int) else tuple(axis)
    return tuple(sorted(a % x.ndim for a in items))


def _reduced_shape(x: NkiTensor, axes: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    if keepdims:
        return tuple(1 if d in axes else n for d, n in enumerate(x.shape))
    shape = tuple(n for d, n in enumerate(x.shape) if d not in axes)
    return shape if len(shape) > 1 else (*shape, 1)


def _reduction(token: Token, arguments: dict[str, Any]) -> NkiTensor:
    x, dtype = arguments["x"], arguments["dtype"]
    axes = axes_of(x, arguments["axis"])
    keep = bool(arguments.get("keepdims", False))
    name = token.__name__
    if name == "var":
        return _variance(x, axes, dtype)
    dst = ndarray(_reduced_shape(x, axes, keep), dtype or x.dtype)
    if name != "mean":
        isa.tensor_reduce(dst=dst, op=token, data=x, axis=axes)
        return dst
    total = ndarray(dst.shape, "float32")
    isa.tensor_reduce(dst=total, op=TOKENS["add"], data=x, axis=axes)
    count = x.size // total.size
    isa.tensor_scalar(dst=dst, data=total, op0=TOKENS["multiply"], operand0=1.0 / count)
    return dst


def _variance(x: NkiTensor, axes: tuple[int, ...], dtype: Any) -> NkiTensor:
    """Return the mean of squares minus the squared mean distance; keeps dimensions."""
    if axes[0] != 1:
        raise WrongArgument("nl.var", "axis", f"is {axes}", "all free dimensions are reduced")
    mean = _reduction(TOKENS["mean"], {"x": x, "axis": axes, "dtype": "float32"})
    column = mean.reshape((x.shape[0], 1))
    centered = ndarray(x.shape, "float32")
    isa.tensor_scalar(dst=centered, data=x, op0=TOKENS["subtract"], operand0=column)
    isa.tensor_tensor(dst=centered, data1=centered, data2=centered, op=TOKENS["multiply"])
    total = ndarray((x.shape[0], 1), "float32")
    isa.tensor_reduce(dst=total, op=TOKENS["add"], data=centered, axis=axes)
    dst = ndarray(_reduced_shape(x, axes, True), dtype or x.dtype)
    isa.tensor_scalar(dst=dst, data=total, op0=TOKENS["multiply"], operand0=x.shape[0] / x.size)
    return dst


Token.run = staticmethod(run)
