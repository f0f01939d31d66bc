"""A kernel as the events it would leave, without data: time does not depend on values.

A sketch has tiles and HBM tensors, and one method for each instruction that the measured kernels use. `events`
places the tiles as a launch does and returns the parts of a recording.
"""

from __future__ import annotations

from dataclasses import dataclass

from nkisim.dtypes import INFO
from nkisim.event import Event, Extent
from nkisim.geometry import CORE_V3, NEURONX_CC, Geometry
from nkisim.memory.placement import place, regions
from nkisim.memory.storage import Allocation


@dataclass(frozen=True, slots=True)
class View:
    """A part of a tensor: its storage, partitions, bytes in it, elements, dtype and contiguous bytes."""

    info: Allocation
    partitions: tuple[int, int]
    span: tuple[int, int]
    elements: int
    dtype: str
    row_bytes: int

    def extent(self) -> Extent:
        """The operand, once its storage has an address."""
        base, info = self.info.address or 0, self.info
        span = base + self.span[0], base + self.span[1]
        return Extent(info.space, info.number, info.name, info.core, self.partitions, span,
                      self.elements, self.dtype, self.row_bytes)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tile:
    """A tensor on chip of (partitions, columns)."""

    info: Allocation
    columns: int
    dtype: str

    def part(self, start: int, stop: int, first: int = 0, last: int | None = None) -> View:
        """Columns [start, stop) of partitions [first, last)."""
        last = self.info.partitions if last is None else last
        size = INFO[self.dtype].itemsize
        bytes_ = start * size, stop * size
        return View(self.info, (first, last), bytes_, (stop - start) * (last - first), self.dtype,
                    bytes_[1] - bytes_[0])  # fmt: skip

    def all(self) -> View:
        """The full tile."""
        return self.part(0, self.columns)


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor in HBM of (rows, columns)."""

    info: Allocation
    columns: int
    dtype: str

    def block(self, rows: tuple[int, int], columns: tuple[int, int]) -> View:
        """Rows and columns [start, stop)."""
        size = INFO[self.dtype].itemsize
        pitch, row = self.columns * size, (columns[1] - columns[0]) * size
        low = rows[0] * pitch + columns[0] * size
        span = low, (rows[1] - 1) * pitch + columns[0] * size + row
        count = (rows[1] - rows[0]) * (columns[1] - columns[0])
        return View(self.info, (0, 1), span, count, self.dtype, row)


class Sketch:
    """The instructions of one kernel on one core."""

    def __init__(
        self, core: int = 0, first_number: int = 0, dge: str = "unknown", geometry: Geometry = CORE_V3
    ) -> None:
        # how descriptors are made: by the compiler's choice, or on the host ("none")
        self.core, self.first_number, self.dge, self.geometry = core, first_number, dge, geometry
        self.log: list[tuple[str, str, tuple[View, ...], tuple[View, ...], dict[str, object]]] = []
        self.allocations: list[Allocation] = []

    def tile(self, columns: int, dtype: str, space: str = "sbuf", partitions: int = 128) -> Tile:
        """A fresh tile."""
        return Tile(self._allocate(space, partitions, columns * INFO[dtype].itemsize), columns, dtype)

    def array(self, rows: int, columns: int, dtype: str) -> Array:
        """A tensor in HBM."""
        return Array(self._allocate("hbm", 1, rows * columns * INFO[dtype].itemsize), columns, dtype)

    def _allocate(self, space: str, partitions: int, size: int) -> Allocation:
        number = self.first_number + len(self.allocations)
        info = Allocation(number, f"{space}{number}", space, self.core, partitions, size, ("sketch", number))
        self.allocations.append(info)
        return info

    def add(self, engine: str, op: str, reads: tuple[View, ...], writes: tuple[View, ...], /, **work: object) -> None:
        for view in (*reads, *writes):
            view.info.touch(len(self.log))
        self.log.append((engine, op, reads, writes, work))

    def dma_copy(self, dst: View, src: View) -> None:
        """A transfer that leaves its queue to the compiler; a row of it is a contiguous range."""
        sizes = [view.elements * INFO[view.dtype].itemsize for view in (dst, src)]
        row = min(dst.row_bytes, src.row_bytes)
        self.add("dma", "dma_copy", (src,), (dst,), bytes=max(sizes), rows=max(sizes) // row, row_bytes=row,
                  dge=self.dge, transpose=False, issuer="sync")  # fmt: skip

    def nc_matmul(self, dst: View, stationary: View, moving: View, accumulate: bool) -> None:
        """A product of 128 rows; after the first one into a tile it adds."""
        columns = moving.elements // (moving.partitions[1] - moving.partitions[0])
        weights = stationary.elements // (stationary.partitions[1] - stationary.partitions[0])
        reads = (stationary, moving, dst) if accumulate else (stationary, moving)
        self.add("tensor", "nc_matmul", reads, (dst,), rows=moving.partitions[1] - moving.partitions[0],
                  cols_stationary=weights, cols_moving=columns, fp32=moving.dtype == "float32")  # fmt: skip

    def transpose(self, dst: View, data: View, identity: View) -> None:
        """A product with the identity that moves bits: `data` is the stationary operand."""
        columns = data.elements // (data.partitions[1] - data.partitions[0])
        self.add("tensor", "nc_matmul", (data, identity), (dst,), rows=data.partitions[1] - data.partitions[0],
                  cols_stationary=columns, cols_moving=identity.partitions[1] - identity.partitions[0], fp32=False,
                  dtype=data.dtype, transpose=True)  # fmt: skip

    def activation(self, function: str, dst: View, /, *data: View) -> None:
        """An activation over the columns of dst."""
        self.compute("scalar", "activation", dst, *data, function=function)

    def compute(self, engine: str, op: str, dst: View, /, *data: View, **work: object) -> None:
        """An instruction of the vector or scalar engine over the columns of dst."""
        columns = dst.elements // (dst.partitions[1] - dst.partitions[0])
        self.add(engine, op, data, (dst,), **{"elements": columns, "function": op, **work})

    def events(self) -> list[Event]:
        """Place the tiles and return the events."""
        for region in regions(self.core, self.geometry):
            place(self.allocations, region)
        return [
            Event(index, self.core, engine, op, tuple([view.extent() for view in reads]),
                  tuple([view.extent() for view in writes]), work, ("sketch", index), None)
            for index, (engine, op, reads, writes, work) in enumerate(self.log)
        ]  # fmt: skip


def static_sketch() -> Sketch:
    """Of a kernel that neuronx-cc compiled without generated descriptors."""
    return Sketch(dge="none", geometry=NEURONX_CC)
