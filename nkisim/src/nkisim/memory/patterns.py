"""Access patterns: ap(), rearrange() and bit reinterpretation as functions on layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nkisim.errors import IllegalView, OutOfRange
from nkisim.memory import views
from nkisim.memory.views import Layout


@dataclass(frozen=True, slots=True)
class Dynamic:
    """A run-time part of an address: `source` times `stride` is added to the offset.

    A scalar source moves the full view; a vector source gives one row index per entry of
    dimension 0. `limit` is the largest legal index.
    """

    source: Any
    dim: int
    stride: int
    limit: int
    vector: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """The storage that a pattern may walk: partitions (1 in hbm) of `row` elements."""

    on_chip: bool
    partitions: int
    row: int


def access(layout: Layout, room: Room, dynamic: Dynamic | None) -> OutOfRange | None:
    """Return the fault of a pattern that leaves its storage.

    Raises:
        IllegalView: the pattern steps over partitions or indexes them at run time.
    """
    if room.on_chip:
        if layout.shape[0] != 1 and layout.strides[0] != room.row:
            actual = f"has partition step {layout.strides[0]}"
            raise IllegalView("ap", "pattern", actual, f"the step is {room.row}, one partition")
        if dynamic is not None and dynamic.dim == 0:
            raise IllegalView(
                "ap",
                "indirect_dim 0",
                "is the partition dimension",
                "the start partition of an on-chip tensor is static",
            )
    if any(n < 1 for n in layout.shape) or layout.offset < 0:
        return OutOfRange(
            "ap",
            "pattern",
            f"has counts {layout.shape} from {layout.offset}",
            "counts are positive and the offset is not negative",
        )
    start, count = divmod(layout.offset, room.row) if room.on_chip else (layout.offset, 0)
    if room.on_chip:
        rows = start + layout.shape[0]
        last = views.last_element(Layout(layout.shape[1:], layout.strides[1:], count))
        if rows > room.partitions or last >= room.row:
            allowed = f"the tensor has {room.partitions} partitions of {room.row} elements"
            return OutOfRange("ap", "pattern", f"reaches partition {rows - 1}, element {last}", allowed)
    elif not (dynamic and dynamic.vector) and views.last_element(layout) >= room.row:
        actual = f"reaches element {views.last_element(layout)}"
        return OutOfRange("ap", "pattern", actual, f"the tensor has {room.row} elements")
    return None


def scalar_limit(layout: Layout, room: Room, stride: int) -> int:
    """Return the largest run-time index that keeps the pattern inside its storage."""
    if room.on_chip:
        free = Layout(layout.shape[1:], layout.strides[1:], layout.offset % room.row)
        return (room.row - 1 - views.last_element(free)) // stride
    return (room.row - 1 - views.last_element(layout)) // stride


def reinterpret(layout: Layout, old_bytes: int, new_bytes: int) -> Layout:
    """Return the layout in elements of a different size; the last dimension must be dense."""
    if old_bytes == new_bytes:
        return layout
    if layout.strides[-1] != 1 and layout.shape[-1] != 1:
        actual = f"has a last dimension of stride {layout.strides[-1]}"
        raise IllegalView("view", "tensor", actual, "the last dimension must be contiguous")
    sizes = (layout.shape[-1], layout.offset, *layout.strides[:-1])
    if any(s * old_bytes % new_bytes for s in sizes):
        actual = f"holds {layout.shape[-1]} elements of {old_bytes} B from {layout.offset}"
        raise IllegalView("view", "tensor", actual, f"it must divide into {new_bytes} B elements")
    last, offset, *strides = (s * old_bytes // new_bytes for s in sizes)
    return Layout((*layout.shape[:-1], last), (*strides, 1), offset)


Names = Sequence[object]


def rearrange(layout: Layout, patterns: tuple[Names, Names], sizes: Mapping[str, int], on_chip: bool) -> Layout:
    """Split, reorder and merge dimensions by name."""
    source, target = (_groups(p) for p in patterns)
    if len(source) != len(layout.shape):
        allowed = f"the tensor has {len(layout.shape)}"
        raise IllegalView("rearrange", "src_pattern", f"names {len(source)} dimensions", allowed)
    order = [name for group in source for name in group]
    wanted = [name for group in target for name in group]
    if sorted(order) != sorted(wanted) or len(set(order)) != len(order):
        raise IllegalView("rearrange", "dst_pattern", f"names {wanted}", f"it must use {order}")
    for dim in reversed(range(len(source))):
        group = source[dim]
        if len(group) != 1:
            parts = [sizes.get(name, -1) for name in group]
            layout = views.split(layout, dim, parts, on_chip)
    layout = views.permute(layout, [order.index(name) for name in wanted], on_chip)
    for at, group in enumerate(target):
        if not group:
            layout = views.expand(layout, at, on_chip)
        elif len(group) > 1:
            layout = views.flatten(layout, at, at + len(group) - 1, on_chip)
    return layout


def _groups(names: Names) -> list[tuple[str, ...]]:
    return [tuple(n) if isinstance(n, (tuple, list)) else (str(n),) for n in names]
