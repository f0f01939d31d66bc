"""View algebra: pure functions from one layout (shape, strides, offset) to a new one.

Strides and offset are in elements. On chip, dimension 0 is the partition dimension and its
stride is the number of elements of one partition of the storage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from nkisim.errors import IllegalView, OutOfRange


class Layout(NamedTuple):
    """How a view walks its storage."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def contiguous(layout: Layout, first: int = 0) -> bool:
    """Return whether dimensions from `first` on are dense and row-major."""
    step = 1
    for size, stride in zip(reversed(layout.shape[first:]), reversed(layout.strides[first:]), strict=False):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def axis(layout: Layout, dim: int, op: str) -> int:
    """Return `dim` as a non-negative index."""
    rank = len(layout.shape)
    if not isinstance(dim, int) or not -rank <= dim < rank:
        raise OutOfRange(op, f"dim {dim}", "does not exist", f"the tensor has {rank} dimensions")
    return dim % rank


def not_partition(dim: int, on_chip: bool, op: str) -> None:
    """Refuse an operation on the partition dimension."""
    if on_chip and dim == 0:
        allowed = "dimension 0 of an on-chip tensor is the partition dimension and stays as it is"
        raise IllegalView(op, "dim 0", "is the partition dimension", allowed)


def permute(layout: Layout, dims: Sequence[int], on_chip: bool) -> Layout:
    """Reorder dimensions."""
    dims = tuple(axis(layout, d, "permute") for d in dims)
    if sorted(dims) != list(range(len(layout.shape))):
        allowed = f"a permutation of {len(layout.shape)} dimensions is needed"
        raise IllegalView("permute", f"dims {dims}", "is not a permutation", allowed)
    if on_chip and dims[0] != 0:
        raise IllegalView(
            "permute", f"dims {dims}", "moves dimension 0", "the partition dimension of an on-chip tensor stays first"
        )
    shape = tuple(layout.shape[d] for d in dims)
    return Layout(shape, tuple(layout.strides[d] for d in dims), layout.offset)


def broadcast(layout: Layout, dim: int, size: int, on_chip: bool) -> Layout:
    """Repeat a dimension of size 1 with stride 0."""
    dim = axis(layout, dim, "broadcast")
    not_partition(dim, on_chip, "broadcast")
    if layout.shape[dim] != 1:
        raise IllegalView("broadcast", f"dim {dim}", f"has size {layout.shape[dim]}", "only size 1 can be broadcast")
    return replace(layout, dim, (size,), (0,))


def replace(layout: Layout, dim: int, shape: tuple[int, ...], strides: tuple[int, ...], shift: int = 0) -> Layout:
    """Replace one dimension by any number of dimensions."""
    return Layout(
        layout.shape[:dim] + shape + layout.shape[dim + 1 :],
        layout.strides[:dim] + strides + layout.strides[dim + 1 :],
        layout.offset + shift,
    )


def expand(layout: Layout, dim: int, on_chip: bool) -> Layout:
    """Insert a dimension of size 1 before `dim`."""
    rank = len(layout.shape)
    if not -rank - 1 <= dim <= rank:
        raise OutOfRange("expand_dim", f"dim {dim}", "does not exist", f"0 to {rank} exist")
    dim %= rank + 1
    not_partition(dim, on_chip, "expand_dim")
    shape = (*layout.shape[:dim], 1, *layout.shape[dim:])
    return Layout(shape, (*layout.strides[:dim], 1, *layout.strides[dim:]), layout.offset)


def squeeze(layout: Layout, dim: int, on_chip: bool) -> Layout:
    """Remove a dimension of size 1."""
    dim = axis(layout, dim, "squeeze_dim")
    not_partition(dim, on_chip, "squeeze_dim")
    if layout.shape[dim] != 1:
        raise IllegalView("squeeze_dim", f"dim {dim}", f"has size {layout.shape[dim]}", "only size 1 can be removed")
    return replace(layout, dim, (), ())


def split(layout: Layout, dim: int, shape: Sequence[int], on_chip: bool) -> Layout:
    """Split one dimension into several; one of them may be -1."""
    dim = axis(layout, dim, "reshape_dim")
    parts = solve(layout.shape[dim], shape, "reshape_dim")
    if on_chip and dim == 0 and parts[0] != layout.shape[0]:
        not_partition(dim, on_chip, "reshape_dim")
    inner = row_major(parts)
    return replace(layout, dim, parts, tuple(s * layout.strides[dim] for s in inner))


def solve(size: int, shape: Sequence[int], op: str) -> tuple[int, ...]:
    """Return `shape` with its -1 replaced so that the product is `size`."""
    known = math.prod(s for s in shape if s != -1)
    parts = tuple(shape)
    if parts.count(-1) == 1 and known and size % known == 0:
        parts = tuple(size // known if s == -1 else s for s in parts)
    if math.prod(parts) != size or any(s < 0 for s in parts):
        actual = f"does not hold {size} elements"
        raise IllegalView(op, f"shape {tuple(shape)}", actual, "the element count must not change")
    return parts


def flatten(layout: Layout, start: int, end: int, on_chip: bool) -> Layout:
    """Merge the dimensions start..end (inclusive), which must be contiguous with each other."""
    start, end = axis(layout, start, "flatten_dims"), axis(layout, end, "flatten_dims")
    not_partition(start, on_chip and end > start, "flatten_dims")
    group = [(n, s) for n, s in zip(layout.shape[start : end + 1], layout.strides[start : end + 1], strict=False)]
    total = math.prod(n for n, _ in group)
    real = [(n, s) for n, s in group if n != 1]
    for (_, outer), (count, inner) in itertools.pairwise(real):
        if outer != count * inner:
            actual = f"have strides {layout.strides[start : end + 1]}"
            allowed = "merged dimensions must be contiguous with each other"
            raise IllegalView("flatten_dims", f"dims {start}..{end}", actual, allowed)
    stride = real[-1][1] if real else 1
    shape = (*layout.shape[:start], total, *layout.shape[end + 1 :])
    return Layout(shape, (*layout.strides[:start], stride, *layout.strides[end + 1 :]), layout.offset)


def reshape(layout: Layout, shape: Sequence[int], on_chip: bool) -> Layout:
    """Change the shape without moving data; on chip the partition count stays."""
    shape = solve(math.prod(layout.shape), shape, "reshape")
    if on_chip and (not shape or shape[0] != layout.shape[0]):
        actual = f"changes {layout.shape[0]} partitions"
        raise IllegalView("reshape", f"shape {shape}", actual, "shape[0] stays on chip")
    first = 1 if on_chip else 0
    if shape[first:] == layout.shape[first:]:
        return layout
    strides = _restride(layout, shape, first)
    if strides is None:
        actual = f"cannot be reached from shape {layout.shape} with strides {layout.strides}"
        raise IllegalView("reshape", f"shape {shape}", actual, "the layout needs a copy")
    return Layout(shape, layout.strides[:first] + strides, layout.offset)


def _restride(layout: Layout, shape: tuple[int, ...], first: int) -> tuple[int, ...] | None:
    """Return the strides of the new free dimensions, or None if no such strides exist."""
    old = [(n, s) for n, s in zip(layout.shape[first:], layout.strides[first:], strict=False) if n != 1]
    new, strides = list(shape[first:]), []
    i = 0
    while i < len(new):
        if new[i] == 1:
            strides.append(1)
            i += 1
            continue
        j, want, have = i, new[i], 1
        chunk: list[tuple[int, int]] = []
        while have != want or not chunk:
            if have < want and old:
                chunk.append(old.pop(0))
                have *= chunk[-1][0]
            elif have > want and j + 1 < len(new):
                j += 1
                want *= new[j]
            else:
                return None
        if any(a[1] != b[0] * b[1] for a, b in itertools.pairwise(chunk)):
            return None
        strides += [s * chunk[-1][1] for s in row_major(new[i : j + 1])]
        i = j + 1
    return tuple(strides)


# architecture guide of Trainium1: access patterns of up to four dimensions, strides of 16 bits in elements
MOST_DIMS, MOST_STRIDE = 4, 2**15 - 1


def beyond_engines(layout: Layout) -> str:
    """Say why a compute engine cannot walk the free dimensions of an on-chip view; empty if it can."""
    dims: list[tuple[int, int]] = []
    for count, stride in zip(layout.shape[1:], layout.strides[1:], strict=True):
        if count == 1:
            continue
        if dims and dims[-1][1] == count * stride:
            dims[-1] = (dims[-1][0] * count, stride)
        else:
            dims.append((count, stride))
    if len(dims) > MOST_DIMS:
        return f"walks {len(dims)} free dimensions that do not merge"
    far = [stride for _, stride in dims if abs(stride) > MOST_STRIDE]
    return f"steps {far[0]} elements at a time" if far else ""


def last_element(layout: Layout) -> int:
    """Return the largest storage offset that the view reaches."""
    reach = (s * (n - 1) for n, s in zip(layout.shape, layout.strides, strict=False) if s > 0)
    return layout.offset + sum(reach)
