"""Moving and combining tiles: load, store, transpose, matmul, and small composites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nkisim import isa
from nkisim.dtypes import name_of
from nkisim.errors import NotSimulated, ShapeMismatch, WrongArgument, WrongSpace
from nkisim.isa.tokens import TOKENS
from nkisim.language.creation import ndarray
from nkisim.language.elementwise import axes_of, promoted
from nkisim.memory.tensor import NkiTensor
from nkisim.objects import MemoryRegion

__all__ = [
    "broadcast_to", "device_print", "dropout", "expand_dims", "gather_flattened", "load", "load_transpose2d", "matmul",
    "rms_norm", "softmax", "store", "transpose", "where",
]  # fmt: skip

_ADD, _MULTIPLY = TOKENS["add"], TOKENS["multiply"]


def _hbm(src: NkiTensor, op: str) -> None:
    if src._on_chip:
        raise WrongSpace(op, "src", f"is in {src.buffer.value}", "it must be in HBM")
    if src.ndim < 2:
        raise ShapeMismatch(op, "src", f"has shape {src.shape}", "reshape it to (partitions, elements) first")


def load(src: NkiTensor, dtype: object = None) -> NkiTensor:
    """Copy a tensor of HBM into a new tile in SBUF."""
    _hbm(src, "nl.load")
    tile = ndarray(src.shape, dtype or src.dtype)
    isa.dma_copy(dst=tile, src=src)
    return tile


def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Copy a tile of SBUF to HBM."""
    if dst._on_chip:
        raise WrongSpace("nl.store", "dst", f"is in {dst.buffer.value}", "it must be in HBM")
    isa.dma_copy(dst=dst, src=value)


def assign(dst: NkiTensor, value: object) -> None:
    """Execute `tensor[...] = value`, which the migration guide writes and no page defines: a copy, or a memset.

    Raises:
        WrongArgument: the value is neither a tensor nor a number.
    """
    if isinstance(value, NkiTensor):
        copy = isa.tensor_copy if dst._on_chip and value._on_chip else isa.dma_copy
        copy(dst=dst, src=value)
    elif isinstance(value, (bool, int, float)):
        isa.memset(dst=dst, value=value)
    else:
        allowed = "a tensor or a number is copied into the elements; an instruction takes them as dst="
        raise WrongArgument("NkiTensor.__setitem__", "value", f"is {type(value).__name__}", allowed)


NkiTensor.assign = staticmethod(assign)


def load_transpose2d(src: NkiTensor, dtype: object = None) -> NkiTensor:
    """Copy a two-dimensional tensor of HBM into SBUF, transposed."""
    _hbm(src, "nl.load_transpose2d")
    if src.ndim != 2:
        raise ShapeMismatch("nl.load_transpose2d", "src", f"has shape {src.shape}", "two dimensions are needed")
    tile = ndarray((src.shape[1], src.shape[0]), src.dtype)
    isa.dma_transpose(dst=tile, src=src)
    if dtype is None or dtype == tile.dtype:
        return tile
    cast = ndarray(tile.shape, dtype)
    isa.tensor_copy(dst=cast, src=tile)
    return cast


def transpose(x: NkiTensor, dtype: object = None) -> NkiTensor:
    """Transpose a tile of at most 128 x 128 into PSUM."""
    if x.ndim != 2:
        raise ShapeMismatch("nl.transpose", "x", f"has shape {x.shape}", "two dimensions are needed")
    dst = ndarray((x.shape[1], x.shape[0]), x.dtype, MemoryRegion.psum)
    isa.nc_transpose(dst=dst, data=x)
    return _as(dst, dtype)


def _as(tile: NkiTensor, dtype: object) -> NkiTensor:
    """Return the tile, or a copy in a different dtype."""
    if dtype is None or name_of(dtype) == tile.dtype:
        return tile
    dst = ndarray(tile.shape, dtype, tile.buffer)
    isa.tensor_copy(dst=dst, src=tile)
    return dst


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False) -> NkiTensor:
    """Compute x.T @ y of tiles with the contraction on partitions; the result is in PSUM."""
    if not transpose_x:
        why = "only transpose_x=True works in the release (known issue); pass x transposed"
        raise NotSimulated("nl.matmul", "transpose_x=False", why)
    columns = x.size // x.shape[0], y.size // y.shape[0]
    dst = ndarray(columns, "float32", MemoryRegion.psum)
    isa.nc_matmul(dst=dst, stationary=x, moving=y)
    return dst


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    """Return a view with a dimension of size 1 inserted."""
    return x.expand_dim(axis if axis >= 0 else axis + x.ndim + 1)


def _on_partitions(row: NkiTensor, count: int) -> NkiTensor:
    """Return a tile with one partition's elements in `count` partitions, shuffled out 32 at a time."""
    tile = ndarray((count, *row.shape[1:]), row.dtype)
    for start in range(0, count, 32):
        isa.nc_stream_shuffle(dst=tile[start : min(start + 32, count)], src=row, shuffle_mask=[0] * 32)
    return tile


def broadcast_to(x: NkiTensor, shape: Sequence[int], dtype: object = None) -> NkiTensor:
    """Repeat the dimensions of size 1, partitions too, to `shape` (same rank); x itself where nothing changes."""
    if len(shape) != x.ndim:
        raise ShapeMismatch("nl.broadcast_to", "shape", f"is {tuple(shape)}", f"x has {x.ndim} dimensions")
    view = x
    for dim, (have, want) in enumerate(zip(x.shape, shape, strict=False)):
        if have != want:
            if have != 1:
                allowed = "each dimension matches or is repeated from size 1"
                raise ShapeMismatch("nl.broadcast_to", "shape", f"goes from {x.shape} to {tuple(shape)}", allowed)
            view = view.broadcast(dim, want) if dim else _on_partitions(x, want)
    if view is x and dtype in (None, x.dtype):
        return x
    dst = ndarray(tuple(shape), dtype or x.dtype)
    isa.tensor_copy(dst=dst, src=view)
    return dst


def where(condition: NkiTensor, x: Any, y: Any, dtype: object = None) -> NkiTensor:
    """Choose x where the condition (0 or 1) is not zero, else y."""
    tiles = [v for v in (x, y) if isinstance(v, NkiTensor)]
    named = dtype or (promoted(*tiles) if tiles else "float32")
    dst = ndarray(condition.shape, named)
    for value in tiles:
        if value.shape != condition.shape:
            allowed = f"the condition has {condition.shape}"
            raise ShapeMismatch("nl.where", "x or y", f"has shape {value.shape}", allowed)
    flag = ndarray(condition.shape, "uint8")
    isa.tensor_scalar(dst=flag, data=condition, op0=TOKENS["not_equal"], operand0=0.0)
    _fill(dst, y)
    source = x
    if isinstance(x, NkiTensor) and x.dtype != dst.dtype:
        source = ndarray(x.shape, dst.dtype)
        isa.tensor_copy(dst=source, src=x)
    isa.tensor_copy_predicated(dst=dst, src=source, predicate=flag)
    return dst


def _fill(dst: NkiTensor, value: Any) -> None:
    if isinstance(value, NkiTensor):
        isa.tensor_copy(dst=dst, src=value)
    else:
        isa.memset(dst=dst, value=value)


def gather_flattened(data: NkiTensor, indices: NkiTensor, axis: int = 0, dtype: object = None) -> NkiTensor:
    """Pick elements of each partition by their index in the flattened free dimensions."""
    if axis != 0:
        why = "the manual says what is gathered for axis 0 only: the flattened free dimensions"
        raise NotSimulated("nl.gather_flattened", f"axis={axis}", why)
    dst = ndarray(indices.shape, data.dtype)
    isa.nc_n_gather(dst=dst, data=data, indices=indices)
    return _as(dst, dtype)


def dropout(x: NkiTensor, rate: Any, dtype: object = None) -> NkiTensor:
    """Replace elements by zero with probability `rate`."""
    dst = ndarray(x.shape, x.dtype)
    isa.dropout(dst=dst, data=x, prob=rate)
    return _as(dst, dtype)


def _last(x: NkiTensor, axis: Any, op: str) -> tuple[int, ...]:
    axes = axes_of(x, axis)
    if axes != tuple(range(1, x.ndim)):
        raise WrongArgument(op, "axis", f"is {axis} of {x.ndim} dimensions", "all free dimensions are reduced")
    return axes


def softmax(x: NkiTensor, axis: Any = -1, dtype: object = None) -> NkiTensor:
    """Compute exp(x - max) / sum over the free dimensions."""
    axes = _last(x, axis, "nl.softmax")
    top = ndarray((x.shape[0], 1), "float32")
    isa.tensor_reduce(dst=top, op=TOKENS["maximum"], data=x, axis=axes, negate=True)
    power, total = ndarray(x.shape, "float32"), ndarray((x.shape[0], 1), "float32")
    isa.activation_reduce(dst=power, op=TOKENS["exp"], data=x, bias=top, reduce_op=_ADD, reduce_res=total)
    isa.reciprocal(dst=total, data=total)
    dst = ndarray(x.shape, dtype or x.dtype)
    isa.tensor_scalar(dst=dst, data=power, op0=_MULTIPLY, operand0=total)
    return dst


def rms_norm(
    x: NkiTensor, w: NkiTensor, axis: Any, n: int, epsilon: float = 1e-06, dtype: object = None,
    compute_dtype: object = None,
) -> NkiTensor:  # fmt: skip
    """Compute x / sqrt(sum(x**2) / n + epsilon) * w over the free dimensions."""
    axes = _last(x, axis, "nl.rms_norm")
    middle = compute_dtype or "float32"
    square, total = ndarray(x.shape, middle), ndarray((x.shape[0], 1), "float32")
    isa.tensor_tensor(dst=square, data1=x, data2=x, op=_MULTIPLY)
    isa.tensor_reduce(dst=total, op=_ADD, data=square, axis=axes)
    scaled = ndarray((x.shape[0], 1), "float32")
    isa.tensor_scalar(dst=scaled, data=total, op0=_MULTIPLY, operand0=1.0 / n, op1=_ADD, operand1=epsilon)
    isa.tensor_scalar(dst=scaled, data=scaled, op0=TOKENS["rsqrt"], operand0=None)
    if w.shape != x.shape:
        raise ShapeMismatch("nl.rms_norm", "w", f"has shape {w.shape}", f"x has {x.shape}, broadcast w first")
    dst = ndarray(x.shape, dtype or x.dtype)
    isa.scalar_tensor_tensor(dst=dst, data=x, op0=_MULTIPLY, operand0=scaled, op1=_MULTIPLY, operand1=w)
    return dst


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """Print a tensor's values."""
    print(print_prefix, np.asarray(tensor))
