"""NkiTensor: a view of SBUF, PSUM or HBM; every method returns a new view, none copies."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np

from nkisim.dtypes import INFO, WIDE, Array, bits_of, name_of, storage_of, to_fp32
from nkisim.errors import AmbiguousManual, IllegalView, LawError, NotSimulated, OutOfRange
from nkisim.lines import kernel_line
from nkisim.memory import indexing, patterns, views
from nkisim.memory.no_operators import NoOperators
from nkisim.memory.patterns import Dynamic, Room
from nkisim.memory.storage import Bytes, Storage, view_of
from nkisim.memory.views import Layout
from nkisim.objects import MemoryRegion

# views cached per tensor; a kernel's loop makes the same few again and again
_MOST_SLICES = 256


class NkiTensor(NoOperators):
    """A view with shape, strides and offset in elements of `dtype` over a storage."""

    # set by nki.language: how to execute `tensor[...] = value`
    assign: ClassVar[Callable[[NkiTensor, object], None] | None] = None

    def __init__(
        self,
        shape: Sequence[int],
        dtype: object,
        storage: Storage,
        buffer: MemoryRegion = MemoryRegion.sbuf,
        name: str = "",
        address: object = None,
    ) -> None:
        if address is not None:
            raise NotSimulated("NkiTensor", "address", "allocate with nl.ndarray(address=...)")
        self.shape: tuple[int, ...] = tuple(shape)
        self.strides: tuple[int, ...] = views.row_major(self.shape)
        self.offset = 0
        self.dtype = name_of(dtype)
        self.buffer = buffer
        self.name = name or storage.info.name
        self._storage = storage
        self._dynamic: Dynamic | None = None
        self._on_chip = buffer is MemoryRegion.sbuf or buffer is MemoryRegion.psum
        self._array: Array | None = None
        self._extent: Any = None
        self._signature: tuple[Any, ...] | None = None
        self._written: Array | None = None
        self._products: Array | None = None
        self._slices: dict[Any, NkiTensor] | None = None
        # the result of a comparison, whose truth is that of its data
        self._compared = False
        # the facts for an instruction that takes this view
        self._fault: LawError | None = None

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the view."""
        return math.prod(self.shape)

    @property
    def address(self) -> tuple[int, int] | None:
        """(Start partition, byte in it) as the kernel chose them; None where the compiler places the tensor."""
        info = self._storage.info
        if not info.explicit or info.address is None:
            return None
        partition, element = divmod(self.offset, self._row())
        return info.start_partition + partition, info.address + element * INFO[self.dtype].itemsize

    def _layout(self) -> Layout:
        return Layout(self.shape, self.strides, self.offset)

    def _make(
        self, layout: Layout, dynamic: Dynamic | None, dtype: str = "", fault: LawError | None = None
    ) -> NkiTensor:
        new = NkiTensor.__new__(NkiTensor)
        new.shape, new.strides, new.offset = layout
        new.dtype = dtype or self.dtype
        new.buffer, new.name, new._storage = self.buffer, self.name, self._storage
        new._on_chip, new._dynamic = self._on_chip, dynamic
        new._array = new._extent = new._signature = new._written = new._products = new._slices = None
        new._compared = False
        new._fault = self._fault
        if fault is not None and self._fault is None:
            fault.line = kernel_line()
            new._fault = fault
        return new

    def _judge(self) -> None:
        """Refuse a view that leaves its tensor: an instruction takes it.

        Raises:
            LawError: the fault of the view, at the line that made it.
        """
        if self._fault is not None:
            raise self._fault

    def _same_dims(self, layout: Layout, op: str) -> NkiTensor:
        """Return a view whose dimensions changed; a run-time dimension must not be among them."""
        if self._dynamic is not None and (
            self._dynamic.dim >= len(layout.shape)
            or layout.shape[: self._dynamic.dim + 1] != self.shape[: self._dynamic.dim + 1]
        ):
            self._refuse_dynamic(op)
        return self._make(layout, self._dynamic)

    def _refuse_dynamic(self, op: str) -> NoReturn:
        allowed = "reshape first and index at run time last"
        raise IllegalView(op, self.name, "changes a dimension indexed at run time", allowed)

    def is_contiguous(self) -> bool:
        """Return whether the elements are dense in row-major order; per partition on chip."""
        return views.contiguous(self._layout(), 1 if self._on_chip else 0)

    def get_pattern(self) -> list[list[int]]:
        """Return [[stride, count], ...] of the view."""
        return [[s, n] for s, n in zip(self.strides, self.shape, strict=False)]

    def is_indirect(self) -> bool:
        """Return whether part of the address is known only at run time."""
        return self._dynamic is not None

    def __getitem__(self, key: object) -> NkiTensor:
        static = indexing.static_key(key) if self._dynamic is None else None
        if static is None:
            return self._subscript(key)
        known = self._slices
        if known is None:
            known = self._slices = {}
        result = known.get(static)
        if result is None:
            if len(known) >= _MOST_SLICES:
                known.clear()
            result = known[static] = self._subscript(key)
        return result

    def _subscript(self, key: object) -> NkiTensor:
        layout, pending, remaining, fault = indexing.subscript(self._layout(), key, self._on_chip)
        dynamic = self._dynamic
        if dynamic is not None:
            at = remaining.index(dynamic.dim) if dynamic.dim in remaining else -1
            stays = at >= 0 and layout.shape[at] == self.shape[dynamic.dim]
            if pending is not None or (dynamic.vector and not stays):
                self._refuse_dynamic("subscript")
            if dynamic.vector:
                dynamic = Dynamic(dynamic.source, at, dynamic.stride, dynamic.limit, True)
        elif pending is not None:
            dynamic = Dynamic(pending.source, pending.dim, pending.stride, pending.limit)
        return self._make(layout, dynamic, fault=fault)

    def __setitem__(self, key: object, value: object) -> None:
        """Copy a tensor, or write a number, into the elements."""
        assert NkiTensor.assign is not None, "nki.language is not imported"
        NkiTensor.assign(self[key], value)

    def permute(self, dims: Sequence[int]) -> NkiTensor:
        """Reorder the dimensions; dimension 0 stays first on chip."""
        if self._dynamic is not None:
            self._refuse_dynamic("permute")
        return self._make(views.permute(self._layout(), dims, self._on_chip), None)

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """Repeat a dimension of size 1."""
        return self._make(views.broadcast(self._layout(), dim, size, self._on_chip), self._dynamic)

    def expand_dim(self, dim: int) -> NkiTensor:
        """Insert a dimension of size 1."""
        return self._same_dims(views.expand(self._layout(), dim, self._on_chip), "expand_dim")

    def squeeze_dim(self, dim: int) -> NkiTensor:
        """Remove a dimension of size 1."""
        return self._same_dims(views.squeeze(self._layout(), dim, self._on_chip), "squeeze_dim")

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> NkiTensor:
        """Split one dimension; one part may be -1."""
        layout = views.split(self._layout(), dim, shape, self._on_chip)
        return self._same_dims(layout, "reshape_dim")

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        """Merge start_dim..end_dim (inclusive)."""
        layout = views.flatten(self._layout(), start_dim, end_dim, self._on_chip)
        return self._same_dims(layout, "flatten_dims")

    def reshape(self, shape: Sequence[int]) -> NkiTensor:
        """Change the shape without moving data."""
        return self._same_dims(views.reshape(self._layout(), shape, self._on_chip), "reshape")

    def rearrange(
        self, src_pattern: Sequence[object], dst_pattern: Sequence[object], fixed_sizes: Mapping[str, int] | None = None
    ) -> NkiTensor:
        """Split, reorder and merge dimensions by name: (('b', ('h', 'w')), ('b', 'w', 'h'))."""
        if self._dynamic is not None:
            self._refuse_dynamic("rearrange")
        names = (src_pattern, dst_pattern)
        moved = patterns.rearrange(self._layout(), names, fixed_sizes or {}, self._on_chip)
        return self._make(moved, None)

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        """Take start..end of one dimension; 0 <= start < end <= size."""
        dim = views.axis(self._layout(), dim, "slice")
        size = self.shape[dim]
        view = self[(slice(None),) * dim + (slice(start, end, step),)]
        if 0 <= start < end <= size and step >= 1:
            return view
        actual = f"is the slice [{start}:{end}:{step}]"
        fault = OutOfRange("slice", f"dim {dim}", actual, f"0 <= start < end <= {size} holds")
        return self._make(view._layout(), view._dynamic, fault=fault)

    def select(self, dim: int, index: Any) -> NkiTensor:
        """Take one index of a dimension and drop it; the index may be a run-time scalar."""
        dim = views.axis(self._layout(), dim, "select")
        return self[(slice(None),) * dim + (index,)]

    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        """Take one row of HBM per entry of an SBUF (n, 1) tensor."""
        if self._on_chip or dim != 0:
            where = f"dim {dim} of a tensor in {self.buffer.value}"
            raise IllegalView("vector_select", where, "is selected", "rows of HBM are selected at dim 0")
        if self._dynamic is not None:
            self._refuse_dynamic("vector_select")
        count = vector_offset.shape[0]
        shape = (count, *self.shape[1:])
        dynamic = Dynamic(vector_offset, 0, self.strides[0], self.shape[0] - 1, True)
        return self._make(Layout(shape, (0, *self.strides[1:]), self.offset), dynamic)

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: NkiTensor | None = None,
        indirect_dim: int = 0,
        dtype: object = None,
    ) -> NkiTensor:
        """Address the storage directly with [[step, count], ...] in elements of `dtype`.

        The documents disagree on a view: the docstring adds `offset` to the view's offset, the
        guides ignore the view. On a base tensor both agree; on a shifted view this follows the
        docstring and warns.
        """
        if self._dynamic is not None:
            self._refuse_dynamic("ap")
        if self.offset and offset is not None:
            warnings.warn(
                AmbiguousManual(
                    f"ap on a view of {self.name} that starts at element {self.offset}: the given "
                    "offset is added to it, while other documents ignore the view"
                ),
                stacklevel=2,
            )
        if scalar_offset is not None and vector_offset is not None:
            raise IllegalView("ap", self.name, "has scalar_offset and vector_offset", "use one")
        to = name_of(dtype) if dtype is not None else self.dtype
        old, new = INFO[self.dtype].itemsize, INFO[to].itemsize
        self._may_reinterpret(to)
        start = self.offset * old // new + (offset or 0)
        room = self._room(new)
        layout = self._by_partitions(Layout(tuple(n for _, n in pattern), tuple(s for s, _ in pattern), start), room)
        dynamic = None
        if scalar_offset is not None or vector_offset is not None:
            dim = views.axis(self._layout(), indirect_dim, "ap")
            stride = max(1, views.row_major(self.shape)[dim] * old // new)
            if vector_offset is None:
                dynamic = Dynamic(scalar_offset, dim, stride, patterns.scalar_limit(layout, room, stride))
            else:
                dynamic, layout = self._gather(layout, vector_offset, (dim, stride), room)
        return self._make(layout, dynamic, to, patterns.access(layout, room, dynamic))

    def _by_partitions(self, layout: Layout, room: Room) -> Layout:
        """A pattern whose first step is a part of a partition goes on to the next partition all the same."""
        step = layout.strides[0] if layout.strides else room.row
        if not room.on_chip or layout.shape[0] == 1 or not 0 < step < room.row or room.row % step:
            return layout
        text = f"ap on {self.name} steps by {step} of the {room.row} elements of a partition"
        warnings.warn(AmbiguousManual(f"{text}; it is taken as one partition, as nki-library relies on"), stacklevel=3)
        return layout._replace(strides=(room.row, *layout.strides[1:]))

    def _gather(self, layout: Layout, index: NkiTensor, where: tuple[int, int], room: Room) -> tuple[Dynamic, Layout]:
        """Return rows picked by an index tensor; the row step of the pattern is ignored."""
        indirect_dim, stride = where
        if self._on_chip or indirect_dim != 0:
            actual = f"indexes dim {indirect_dim} of {self.buffer.value}"
            raise IllegalView("ap", "vector_offset", actual, "it indexes dim 0 of a tensor in HBM")
        row = Layout(layout.shape[1:], layout.strides[1:], layout.offset)
        limit = patterns.scalar_limit(row, room, stride)
        layout = Layout(layout.shape, (0, *layout.strides[1:]), layout.offset)
        return Dynamic(index, 0, stride, limit, True), layout

    def _room(self, itemsize: int) -> Room:
        info = self._storage.info
        return Room(self._on_chip, info.partitions, info.size // itemsize)

    def _read_signature(self) -> tuple[Any, ...]:
        """Return the values that rules may depend on: shape, dtype, memory, start partition, limits of patterns."""
        self._judge()
        start, beyond = 0, ""
        if self._on_chip:
            start = self._storage.info.start_partition
            if self.offset:
                start += self.offset // self._row()
            if len(self.shape) > 2 or self.strides[-1] > views.MOST_STRIDE:
                beyond = views.beyond_engines(self._layout())
        self._signature = (self.shape, self.dtype, self.buffer._value_, start, beyond)
        return self._signature

    def _may_reinterpret(self, dtype: str) -> None:
        if dtype != self.dtype and not self._storage.precise:
            why = "with NKI_PRECISE_FP=0 elements have no bits of their own dtype"
            raise NotSimulated("NkiTensor.view", "dtype", why)
        if dtype != self.dtype and WIDE & {dtype, self.dtype}:
            raise NotSimulated("NkiTensor.view", "dtype", "no document lets a view split or join 64-bit elements")

    def view(self, dtype: object) -> NkiTensor:
        """Reinterpret the bits; the last dimension scales with the element size."""
        to = name_of(dtype)
        if self._dynamic is not None:
            self._refuse_dynamic("view")
        self._may_reinterpret(to)
        sizes = INFO[self.dtype].itemsize, INFO[to].itemsize
        return self._make(patterns.reinterpret(self._layout(), *sizes), None, to)

    reinterpret_cast = view

    def indirect(self, index: object, num_elem: int | None = None) -> NkiTensor:
        """Tensor indirection of trn3: a gather of columns as an operand."""
        raise NotSimulated("NkiTensor.indirect", "index", "it came with trn3; gather with nc_n_gather, then compute")

    def _numpy(self) -> Array:
        """Return the elements as a numpy view of the storage's bytes."""
        if self._array is None:
            self._judge()
            storage = self._storage
            dtype = storage_of(self.dtype, storage.precise)
            where = self._where(dtype.itemsize, storage.start, storage.pitch)
            self._array = view_of(storage.data, dtype, self.shape, where)
        return self._array

    def _marks(self, marks: Bytes | None) -> Array:
        """Return per-byte marks of the storage as one unsigned integer per element."""
        assert marks is not None
        storage = self._storage
        width = storage_of(self.dtype, storage.precise).itemsize
        start, pitch = (0, storage.info.size) if storage.separate_marks else (storage.start, storage.pitch)
        return view_of(marks, bits_of(width), self.shape, self._where(width, start, pitch))

    def _written_marks(self) -> Array:
        """Return who of the elements was written."""
        if self._written is None:
            self._written = self._marks(self._storage.mask)
        return self._written

    def _product_marks(self) -> Array:
        """Return which elements of PSUM a matmul wrote last."""
        if self._products is None:
            self._products = self._marks(self._storage.matmul)
        return self._products

    def _where(self, width: int, start: int, pitch: int) -> tuple[int, tuple[int, ...]]:
        """Return the byte offset and byte strides of the view in an array whose tensor begins at `start`."""
        if not self._on_chip:
            return start + self.offset * width, tuple(s * width for s in self.strides)
        partition, element = divmod(self.offset, self._row())
        free = tuple(s * width for s in self.strides[1:])
        return start + partition * pitch + element * width, (pitch, *free)

    def _row(self) -> int:
        """Elements of `dtype` in one partition of the storage."""
        return self._storage.info.size // INFO[self.dtype].itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Copy for the debugger; checks and tracking do not apply."""
        if self._dynamic is not None:
            self._refuse_dynamic("numpy conversion")
        values = np.array(self._numpy())
        return values.astype(dtype) if dtype is not None else values

    def __bool__(self) -> bool:
        """Return that there is a tensor: tracing cannot depend on data, but for `assert nl.equal(a, b)`."""
        return not self._compared or bool(np.all(to_fp32(self.__array__()) != 0))

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        head = f"NkiTensor({self.name}, {self.shape}, {self.dtype}, {self.buffer.value})"
        return head if self._dynamic is not None else f"{head}\n{self.__array__()}"
