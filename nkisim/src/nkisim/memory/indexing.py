"""Subscripts: the meaning of t[...], with nl.ds, and without Python's silent clamping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nkisim.errors import IllegalView, LawError, OutOfRange
from nkisim.memory.views import Layout
from nkisim.objects import NkiScalar, VirtualRegister


@dataclass(frozen=True, slots=True)
class DynamicSlice:
    """nl.ds(start, size): a slice whose start may be known only at run time."""

    start: object
    size: int


@dataclass(frozen=True, slots=True)
class Pending:
    """A run-time start in a subscript: dimension of the result, stride, bound."""

    source: object
    dim: int
    stride: int
    # largest legal start
    limit: int


def static_key(key: object) -> tuple[Any, ...] | None:
    """Return a subscript of plain integers and slices as a hashable value, None for any other."""
    parts: list[Any] = []
    for item in key if type(key) is tuple else (key,):
        kind = type(item)
        if kind is slice:
            parts.append((item.start, item.stop, item.step))
        elif kind is int or item is Ellipsis:
            parts.append(item)
        else:
            return None
    return tuple(parts)


Subscripted = tuple[Layout, Pending | None, tuple[int, ...], LawError | None]


def subscript(layout: Layout, key: object, on_chip: bool) -> Subscripted:
    """Apply a subscript; return the layout, a run-time start if any, the remaining dimensions, and the fault.

    A slice that leaves the tensor or is empty is wrong only when an instruction takes it.

    Raises:
        OutOfRange: an index leaves the tensor.
        IllegalView: too many indices, or a step over partitions.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    keys = _fill(keys, len(layout.shape))
    shape: list[int] = []
    strides: list[int] = []
    remaining: list[int] = []
    offset = layout.offset
    pending: Pending | None = None
    fault: LawError | None = None
    dropped: list[int] = []
    for dim, item in enumerate(keys):
        size, stride = layout.shape[dim], layout.strides[dim]
        if isinstance(item, DynamicSlice) and isinstance(item.start, int | np.integer):
            item = slice(item.start, item.start + item.size)
        if type(item) is slice:
            start, count, step, wrong = _slice(item, size, dim)
            fault = fault or wrong
            if step != 1 and dim == 0 and on_chip:
                raise IllegalView(
                    "subscript", f"dim 0 step {step}", "skips partitions", "an access covers consecutive partitions"
                )
        elif isinstance(item, int | np.integer):
            start, count, step = _integer(int(item), size, dim), 1, 1
            if dim or not on_chip:
                dropped.append(dim)
        else:
            pending, start, count = _dynamic(item, pending, (dim, size, stride), on_chip)
            step = 1
            if not isinstance(item, DynamicSlice):
                dropped.append(dim)
        offset += start * stride
        shape.append(count)
        strides.append(stride * step)
        remaining.append(dim)
    return (*_drop(Layout(tuple(shape), tuple(strides), offset), pending, remaining, (dropped, on_chip)), fault)


def _drop(
    layout: Layout, pending: Pending | None, remaining: list[int], how: tuple[list[int], bool]
) -> tuple[Layout, Pending | None, tuple[int, ...]]:
    """Remove integer-indexed dimensions, keeping two on chip and one in hbm."""
    dropped, on_chip = how
    room = len(remaining) - (2 if on_chip else 1)
    # the last dimensions stay when too few would be left
    gone = set(dropped[: max(0, min(len(dropped), room))])
    if not gone:
        return layout, pending, tuple(remaining)
    stay = [d for d in remaining if d not in gone]
    shape = tuple(layout.shape[d] for d in stay)
    strides = tuple(layout.strides[d] for d in stay)
    return Layout(shape, strides, layout.offset), pending, tuple(stay)


def _fill(keys: list[object], rank: int) -> list[object]:
    dots = [i for i, k in enumerate(keys) if k is Ellipsis]
    if len(dots) > 1:
        raise IllegalView("subscript", None, "has two ellipses", "one is allowed")
    missing = rank - len(keys) + len(dots)
    if missing < 0:
        actual = f"has {len(keys) - len(dots)} indices"
        raise IllegalView("subscript", None, actual, f"the tensor has {rank} dimensions")
    at = dots[0] if dots else len(keys)
    return keys[:at] + [slice(None)] * missing + keys[at + len(dots) :]


def _integer(index: int, size: int, dim: int) -> int:
    if not -size <= index < size:
        raise OutOfRange("subscript", f"dim {dim}", f"is index {index}", f"the size is {size}")
    return index % size


def _slice(item: slice, size: int, dim: int) -> tuple[int, int, int, LawError | None]:
    """Return start, count and step of a slice, and its fault."""
    wrong: LawError | None = None
    step = 1 if item.step is None else int(item.step)
    start = 0 if item.start is None else int(item.start)
    stop = size if item.stop is None else int(item.stop)
    if start < 0:
        start += size
    if stop < 0:
        stop += size
    if not (0 <= start <= size and 0 <= stop <= size):
        actual = f"is the slice [{item.start}:{item.stop}]"
        wrong = OutOfRange("subscript", f"dim {dim}", actual, f"the size is {size}, nothing is clamped")
    elif step < 1 or stop <= start:
        actual = f"is the slice [{item.start}:{item.stop}:{step}]"
        wrong = IllegalView("subscript", f"dim {dim}", actual, "it must hold at least one element")
    step = max(1, step)
    return start, max(0, -(-(stop - start) // step)), step, wrong


def _dynamic(
    item: object, pending: Pending | None, where: tuple[int, int, int], on_chip: bool
) -> tuple[Pending, int, int]:
    dim, size, stride = where
    source, count = (item.start, item.size) if isinstance(item, DynamicSlice) else (item, 1)
    if not (hasattr(source, "_storage") or isinstance(source, VirtualRegister | NkiScalar)):
        allowed = "int, slice, ..., nl.ds, a register, a scalar or a one-element tensor index a tensor"
        raise IllegalView("subscript", f"dim {dim}", f"is {type(item).__name__}", allowed)
    if pending is not None:
        raise IllegalView(
            "subscript", f"dim {dim}", "is a second run-time index", "one run-time index is allowed per tensor"
        )
    if on_chip and dim == 0:
        raise IllegalView(
            "subscript", "dim 0", "is indexed at run time", "the start partition of an on-chip tensor is static"
        )
    if count > size:
        raise OutOfRange("subscript", f"dim {dim}", f"takes {count}", f"the size is {size}")
    return Pending(source, dim, stride, size - count), 0, count
