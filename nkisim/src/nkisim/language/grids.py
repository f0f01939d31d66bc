"""Grids of NKI 0.7: tiles of a tensor, and blocks of tiles; views, and allocations that are laid out as tiles.

A grid selects cells of its source: tiles, or blocks of tiles. Indexing selects among them and gives a grid; `data` is
the selection as one tensor, where one tensor can be it. No page shows more than 2.33's first examples of this, so what
they leave open is refused: `data` of tiles with gaps between them, or of several rows of tiles that lie on chip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nkisim.core.context import since
from nkisim.errors import IllegalView, LawError, OutOfRange, WrongArgument
from nkisim.geometry import CORE_V3
from nkisim.language.creation import ndarray
from nkisim.memory.tensor import NkiTensor
from nkisim.objects import MemoryRegion, NKIObject

__all__ = ["NkiBlockGrid", "NkiGrid", "NkiTileGrid", "alloc_blocks", "alloc_tiles", "blocks", "empty_like", "tiles"]

Shape = tuple[int, ...]
_BY_HAND = "use slices and nl.ndarray"


@dataclass(frozen=True, slots=True)
class Axis:
    """The selected cells of one source dimension, in elements of the source."""

    # elements of a tile (1 where the dimension is not tiled) and tiles of a cell
    tile: int
    tiles: int
    first: int
    end: int
    count: int
    # cells from one selected cell to the next
    step: int = 1
    # False: an integer took the coordinate
    in_shape: bool = True

    @property
    def cell(self) -> int:
        """Elements of a full cell."""
        return self.tile * self.tiles

    @property
    def last(self) -> int:
        """Elements of the last selected cell, which the end of the source may cut."""
        return min(self.cell, self.end - self.first - (self.count - 1) * self.step * self.cell)

    @property
    def elements(self) -> int:
        """Selected elements."""
        return (self.count - 1) * self.cell + self.last

    @property
    def dense(self) -> bool:
        """Whether no element lies between two selected ones."""
        return self.step == 1 or self.count == 1

    def select(self, key: object, dim: int) -> Axis:
        """Return the axis with the cells of an index or a slice.

        Raises:
            OutOfRange: a cell outside of the grid.
            IllegalView: a key that is no int and no slice, or a step below 1.
        """
        if isinstance(key, int):
            if not -self.count <= key < self.count:
                raise OutOfRange("grid", f"dim {dim}", f"is index {key}", f"there are {self.count} cells")
            return self._from(key % self.count, 1, 1, in_shape=False)
        if not isinstance(key, slice) or (key.step or 1) < 1:
            raise IllegalView("grid", f"dim {dim}", f"is {key!r:.60}", "an int or a slice with a positive step selects")
        start, stop = 0 if key.start is None else key.start, self.count if key.stop is None else key.stop
        start, stop = start + self.count * (start < 0), stop + self.count * (stop < 0)
        if not 0 <= start < stop <= self.count:
            raise OutOfRange(
                "grid", f"dim {dim}", f"is {key}", f"of {self.count} cells one is needed, nothing is clamped"
            )
        step = key.step or 1
        return self._from(start, -(-(stop - start) // step), step, in_shape=True)

    def _from(self, start: int, count: int, step: int, in_shape: bool) -> Axis:
        first = self.first + start * self.step * self.cell
        end = min(self.end, first + ((count - 1) * step * self.step + 1) * self.cell)
        return replace(self, first=first, end=end, count=count, step=step * self.step, in_shape=in_shape)


class NkiGrid(NKIObject):
    """A tensor region in coordinates of tiles or of blocks; nl.tiles and nl.blocks make one."""

    def __init__(self, **kwargs: Any) -> None:
        self._base: NkiTensor = kwargs["base"]
        # one of every source dimension; those that are not tiled come first
        self._axes: tuple[Axis, ...] = kwargs["axes"]
        self._tiled: int = kwargs["tiled"]
        # tiles of every dimension where each has a slot of its own after the one before, as alloc_tiles lays them out
        self._slots: Shape | None = kwargs.get("slots")

    @property
    def shape(self) -> Shape:
        """Cells along every coordinate that no integer took."""
        return tuple(axis.count for axis in self._axes if axis.in_shape)

    @property
    def tile_shape(self) -> Shape:
        """Elements of a full tile."""
        return tuple(axis.tile for axis in self._axes[-self._tiled :])

    @property
    def element_shape(self) -> Shape:
        """Selected elements of every source dimension, but of leading ones that an integer took."""
        return tuple(axis.elements for axis in self._shown())

    @property
    def dtype(self) -> str:
        """Type of the elements."""
        return self._base.dtype

    @property
    def buffer(self) -> MemoryRegion:
        """The memory that holds them."""
        return self._base.buffer

    @property
    def index_step_elements(self) -> Shape:
        """Elements of the source from one coordinate to the next."""
        return tuple(axis.step * axis.cell for axis in self._axes if axis.in_shape)

    @property
    def is_remainder(self) -> bool:
        """Whether the end of the source cuts a selected cell."""
        return any(axis.last < axis.cell for axis in self._axes)

    @property
    def is_data_representable(self) -> bool:
        """Whether `data` can be the selection."""
        if self._slots is None:
            return all(axis.dense or axis.cell == 1 for axis in self._axes)
        *outer, inner = self._axes[-self._tiled :]
        isolated = not any(axis.in_shape for axis in self._axes[: -self._tiled]) and all(
            a.elements <= a.tile for a in outer
        )
        return isolated and inner.dense and (inner.elements <= inner.tile or self._tiled == 2)

    @property
    def data(self) -> NkiTensor:
        """The selection as one tensor of shape `element_shape`.

        Raises:
            IllegalView: one tensor cannot be it.
        """
        if not self.is_data_representable:
            where = "in slots on chip" if self._slots else "with gaps"
            allowed = "take one tile, or one row of tiles; no document says the shape of more"
            raise IllegalView("grid", "data", f"is {self.shape} cells {where}", allowed)
        if self._slots is None:
            keys = [slice(a.first, a.end, 1 if a.dense else a.step) for a in self._axes[-self._tiled :]]
            lead = [slice(a.first, a.end, a.step) if a.in_shape else a.first for a in self._axes[: -self._tiled]]
            return self._base[(*lead, *keys)]
        slot = 0
        for axis, count in zip(self._axes, self._slots, strict=True):
            slot = slot * count + axis.first // axis.tile
        width, inner = math.prod(self.tile_shape[1:]), self._axes[-1]
        rows, start = slice(0, self._axes[-self._tiled].elements), slot * width
        if self._tiled == 2:
            return self._base[rows, start : start + inner.elements]
        rows_view = self._base[rows, start : start + width].reshape((rows.stop, *self.tile_shape[1:]))
        return rows_view[(slice(None), *(slice(0, axis.elements) for axis in self._axes[1 - self._tiled :]))]

    def _shown(self) -> list[Axis]:
        return [axis for i, axis in enumerate(self._axes) if axis.in_shape or i >= len(self._axes) - self._tiled]

    def __getitem__(self, key: object) -> NkiGrid:
        keys = key if isinstance(key, tuple) else (key,)
        in_shape = [i for i, axis in enumerate(self._axes) if axis.in_shape]
        _need(
            len(keys) <= len(in_shape), "grid", "key", f"has {len(keys)} coordinates", f"the grid has {len(in_shape)}"
        )
        axes = list(self._axes)
        for dim, (at, item) in enumerate(zip(in_shape, keys, strict=False)):
            axes[at] = axes[at].select(item, dim)
        return type(self)(base=self._base, axes=tuple(axes), tiled=self._tiled, slots=self._slots)


class NkiTileGrid(NkiGrid):
    """A grid whose cells are tiles."""


class NkiBlockGrid(NkiGrid):
    """A grid whose cells are blocks of tiles."""

    @property
    def block_shape(self) -> Shape:
        """Tiles of a full block."""
        return tuple(axis.tiles for axis in self._axes[-self._tiled :])


Source = NkiTensor | NkiGrid


def _need(
    condition: bool, op: str, operand: str, actual: str, allowed: str, law: type[LawError] = WrongArgument
) -> None:
    if not condition:
        raise law(op, operand, actual, allowed)


def _shape(op: str, operand: str, value: object, minimum: int = 1) -> Shape:
    """Check a shape: a tuple of positive Python integers."""
    right = isinstance(value, tuple) and len(value) >= minimum and all(type(n) is int and n > 0 for n in value)
    _need(right, op, operand, f"is {value!r:.60}", f"a tuple of {minimum} or more positive ints is needed")
    assert isinstance(value, tuple)
    return value


def _grouped(op: str, source: Source, tile_shape: Shape | None, block_shape: Shape | None) -> dict[str, Any]:
    """Return the parts of a grid over a tensor, or over the region of a grid."""
    since(op, _BY_HAND)
    if isinstance(source, NkiTensor):
        tile = _shape(op, "tile_shape", tile_shape, 2)
        static = source._dynamic is None
        _need(static, op, "source", "is indexed at run time", "make the grid first", IllegalView)
        fits = len(tile) == source.ndim if source._on_chip else len(tile) <= source.ndim
        allowed = f"{source.buffer.value} of {source.ndim} dimensions is given; on chip all of them are tiled"
        _need(fits, op, "tile_shape", f"is {tile}", allowed)
        axes, slots, base = [Axis(1, 1, 0, n, n) for n in source.shape], None, source
    else:
        _need(isinstance(source, NkiGrid), op, "source", f"is {source!r:.60}", "a tensor or a grid is needed")
        tile = source.tile_shape if tile_shape is None else _shape(op, "tile_shape", tile_shape, 2)
        axes, slots, base = list(source._axes), source._slots, source._base
        same = len(tile) == source._tiled and (slots is None or tile == source.tile_shape)
        allowed = f"the grid has {source.tile_shape}; tiles in slots on chip keep their shape"
        _need(same, op, "tile_shape", f"is {tile}", allowed)
        dense = all(axis.dense for axis in axes[-source._tiled :])
        _need(dense, op, "source", "has gaps between its cells", "group before a slice with a step", IllegalView)
    block = (1,) * len(tile) if block_shape is None else _shape(op, "block_shape", block_shape)
    _need(len(block) == len(tile), op, "block_shape", f"is {block}", f"one count for each of {tile}")
    for i, (elements, count) in enumerate(zip(tile, block, strict=True), len(axes) - len(tile)):
        old = axes[i]
        axes[i] = Axis(elements, count, old.first, old.end, -(-(old.end - old.first) // (elements * count)))
    return {"base": base, "axes": tuple(axes), "tiled": len(tile), "slots": slots}


def tiles(source: Source, *, tile_shape: Shape | None = None) -> NkiTileGrid:
    """View a tensor, or the region of a grid, as tiles; `tile_shape` is of the last dimensions."""
    return NkiTileGrid(**_grouped("tiles", source, tile_shape, None))


def blocks(source: Source, *, tile_shape: Shape | None = None, block_shape: Shape) -> NkiBlockGrid:
    """View a tensor, or the region of a grid, as blocks of `block_shape` tiles."""
    return NkiBlockGrid(**_grouped("blocks", source, tile_shape, _shape("blocks", "block_shape", block_shape)))


def _allocated(op: str, shapes: tuple[object, object], block: Shape | None, how: dict[str, Any]) -> dict[str, Any]:
    """Allocate element_shape in tiles of tile_shape: compact in HBM; on chip a slot for each tile, side by side."""
    since(op, _BY_HAND)
    tile, extent = _shape(op, "tile_shape", shapes[0], 2), _shape(op, "element_shape", shapes[1])
    _need(len(tile) <= len(extent), op, "tile_shape", f"is {tile}", f"element_shape has {len(extent)} dimensions")
    lead = len(extent) - len(tile)
    slots = (*extent[:lead], *(-(-n // t) for n, t in zip(extent[lead:], tile, strict=True)))
    on_chip = how["buffer"] in (MemoryRegion.sbuf, MemoryRegion.psum)
    base = ndarray((tile[0], math.prod(slots) * math.prod(tile[1:])) if on_chip else extent, **how)
    axes = tuple(Axis(1, 1, 0, n, n) for n in extent)
    all_tiles = NkiTileGrid(base=base, axes=axes, tiled=len(tile))
    parts = {"base": base, "tiled": len(tile), "slots": slots if on_chip else None}
    return _grouped(op, all_tiles, tile, block) | parts


def alloc_tiles(
    *, tile_shape: Shape, element_shape: Shape, buffer: MemoryRegion, dtype: object,
    address: tuple[int, int] | None = None, name: str = "",
) -> NkiTileGrid:  # fmt: skip
    """Allocate a tensor of element_shape that is laid out as tiles, without initializing it."""
    how = {"buffer": buffer, "dtype": dtype, "address": address, "name": name}
    return NkiTileGrid(**_allocated("alloc_tiles", (tile_shape, element_shape), None, how))


def alloc_blocks(
    *, tile_shape: Shape, block_shape: Shape, element_shape: Shape, buffer: MemoryRegion, dtype: object,
    address: tuple[int, int] | None = None, name: str = "",
) -> NkiBlockGrid:  # fmt: skip
    """Allocate a tensor of element_shape that is laid out as tiles, in blocks of block_shape tiles."""
    how = {"buffer": buffer, "dtype": dtype, "address": address, "name": name}
    block = _shape("alloc_blocks", "block_shape", block_shape)
    return NkiBlockGrid(**_allocated("alloc_blocks", (tile_shape, element_shape), block, how))


_ORDERS = ((1, 0), (2, 1, 0), (3, 1, 2, 0))


def empty_like(
    x: Any, dtype: object = None, buffer: MemoryRegion | None = None, name: str = "", *,
    transpose_axes: Sequence[int] | None = None, address: tuple[int, int] | None = None,
) -> Any:  # fmt: skip
    """Allocate without initializing, with the shape of a tensor, or the cells of a grid packed without gaps.

    `transpose_axes` is the order of the tiled dimensions that a later dma_transpose into SBUF will give.
    """
    how: dict[str, Any] = {"dtype": dtype or x.dtype, "buffer": buffer or x.buffer, "name": name, "address": address}
    grid = isinstance(x, NkiGrid)
    if grid or transpose_axes is not None or address is not None:
        since("empty_like", "use nl.ndarray")
    extent, tile = list(x.element_shape if grid else x.shape), list(x.tile_shape if grid else x.shape)
    block = list(x.block_shape) if isinstance(x, NkiBlockGrid) else None
    axes = list(x._axes[-x._tiled :]) if grid else []
    if transpose_axes is not None:
        order = tuple(transpose_axes)
        right = order in _ORDERS and len(order) == len(tile) and how["buffer"] is MemoryRegion.sbuf
        allowed = f"{_ORDERS} of as many dimensions, into SBUF"
        _need(right, "empty_like", "transpose_axes", f"are {order} of {tuple(tile)} in {how['buffer'].value}", allowed)
        lead = extent[: len(extent) - len(tile)]
        extent = lead + [extent[len(lead) + i] for i in order]
        rows = min(extent[len(lead)], tile[order[0]])
        _need(rows <= CORE_V3.partitions, "empty_like", "transpose_axes", f"give {rows} partitions", "128 are the most")
        tile, block = [tile[i] for i in order], [block[i] for i in order] if block else None
        axes = [axes[i] for i in order] if grid else []
    if not grid:
        return ndarray(tuple(extent), **how)
    parts = _allocated("empty_like", (tuple(tile), tuple(extent)), tuple(block) if block else None, how)
    taken = tuple(slice(None) if axis.in_shape else 0 for axis in axes)
    return type(x)(**parts)[(*(slice(None) for _ in range(len(extent) - len(tile))), *taken)]
