"""Reading and writing memory through views: poison, written-marks, replaced bytes, races."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nkisim.core import races
from nkisim.core.context import Core
from nkisim.dtypes import INFO, INTS, WIDE, Array, Flags, storage_of, store, to_fp32
from nkisim.errors import DynamicOutOfRange, IllegalView, NotComputed, Relaxed, ReplacedRead, UnwrittenRead, WrongDtype
from nkisim.memory.memory import shared_bytes
from nkisim.memory.patterns import Dynamic
from nkisim.memory.storage import INT_SENTINEL, OVERWRITTEN, UNWRITTEN, WRITTEN, Allocation, Storage
from nkisim.memory.tensor import NkiTensor
from nkisim.memory.views import Layout, last_element
from nkisim.objects import NkiScalar, VirtualRegister

# every byte of an element written, by element width
WRITTEN_MARK = {width: int.from_bytes(bytes([WRITTEN]) * width, "little") for width in (1, 2, 4, 8)}
_INDEX_DTYPES = frozenset({"int32", "uint32", "int16", "uint16", "int8", "uint8"})

Who = tuple[str, str]


def read(core: Core, tensor: NkiTensor, who: Who) -> Array:
    """Return the elements as a numpy view, after the checks of a read.

    Raises:
        UnwrittenRead, ReplacedRead, HbmRace: the law of that name is broken.
    """
    storage = tensor._storage
    if not storage.complete:
        fault = unwritten(tensor, who)
        if fault is not None:
            marks = tensor._written_marks()
            on_unwritten_read(core, marks != WRITTEN_MARK[marks.itemsize], fault)
    if storage.history is not None:
        races.note(core, tensor, who)
    storage.info.touch(core.clock)
    return tensor._array if tensor._array is not None else tensor._numpy()


def unwritten(tensor: NkiTensor, who: Who) -> UnwrittenRead | None:
    """Return the refusal of a view that holds unwritten elements.

    Raises:
        ReplacedRead: they were written, and then a different tensor on the same bytes was.
    """
    storage = tensor._storage
    if storage.complete or storage.mask is None:
        return None
    marks = tensor._written_marks()
    full = WRITTEN_MARK[marks.itemsize]
    if int(marks.min()) == full:
        if covers(tensor) and not storage.info.explicit:
            storage.complete = True
        return None
    other = storage.replaced_by
    if other is not None and np.any(marks & marks.dtype.type(OVERWRITTEN * (full // WRITTEN))):
        actual = f"is read after {other.name} ({other.line[0]}:{other.line[1]}) was written on its bytes"
        raise ReplacedRead(*who, actual, f"{tensor.name} ends where another tensor is written at its address")
    missing = int(np.count_nonzero(marks != full))
    first = tuple(int(i) for i in np.unravel_index(int(np.argmax(marks != full)), marks.shape))
    line = storage.info.line
    actual = (
        f"reads {missing} of {tensor.size} elements of {tensor.name} {tensor.shape} that nobody "
        f"wrote, the first at {list(first)}"
    )
    return UnwrittenRead(*who, actual, f"write it first, it was allocated at {line[0]}:{line[1]}")


def on_unwritten_read(core: Core, missing: Flags, fault: UnwrittenRead) -> None:
    """Refuse a read of unwritten elements, or let it read sentinels as the policy says."""
    if core.policy.unwritten_read == "raise":
        raise fault
    core.unwritten.append(missing)
    core.warn("unwritten read", f"{fault}; NaN (integers: {INT_SENTINEL}) is read instead", Relaxed)


def propagate_unwritten(core: Core, tensor: NkiTensor) -> None:
    """Mark the results of unwritten elements as unwritten: floats by their NaN, others by the operand's elements."""
    target = tensor._numpy()
    if INFO[tensor.dtype].kind == "float":
        missing: Flags = np.isnan(to_fp32(target))
    else:
        missing = np.any([_reached(mask, target.shape) for mask in core.unwritten], axis=0)
    if missing.any():
        marked(tensor._storage)
        tensor._written_marks()[missing] = UNWRITTEN


def _reached(mask: Flags, shape: tuple[int, ...]) -> Flags:
    """The results that unwritten elements of an operand may reach: by place, else by partition, else all."""
    if mask.size == math.prod(shape):
        return mask.reshape(shape)
    rows = mask.reshape(len(mask), -1).any(axis=1)
    if len(mask) != shape[0]:
        rows = np.full(shape[0], rows.any())
    return np.broadcast_to(rows.reshape(-1, *(1,) * (len(shape) - 1)), shape)


def marked(storage: Storage) -> None:
    """Begin to keep marks where all was written so far."""
    if storage.mask is None:
        storage.mask = np.full(storage.data.shape, WRITTEN, np.uint8)
    elif storage.complete:
        storage.mask.fill(WRITTEN)
    storage.complete = False


def covers(tensor: NkiTensor) -> bool:
    """Return whether the view names every byte of its storage."""
    info = tensor._storage.info
    if tensor.offset or 0 in tensor.strides:
        return False
    rows = tensor.shape[0] if tensor._on_chip else 1
    free = tensor.size // rows
    return rows == info.partitions and free == tensor._row()


def write(core: Core, tensor: NkiTensor, values: Array, who: Who, together: bool = False) -> None:
    """Round `values` to the tensor's dtype, store them, and mark them written; `together`: both cores mean to."""
    if together and not core.numerics:
        write_unknown(core, tensor, who)
        return
    target = tensor._numpy()
    if values.shape != target.shape:
        values = values.reshape(target.shape)
    if tensor._storage.history is not None:
        rounded = np.empty(target.shape, target.dtype)
        store(rounded, values, tensor.dtype, tensor._storage.precise)
        races.note(core, tensor, who, rounded, together)
        values = rounded
    mark(core, tensor)
    store(target, values, tensor.dtype, tensor._storage.precise)
    if core.unwritten:
        propagate_unwritten(core, tensor)


def write_unknown(core: Core, tensor: NkiTensor, who: Who) -> None:
    """Mark a write of values that were not computed; to the other core they equal the present ones."""
    tensor._storage.unknown = True
    if tensor._storage.history is not None:
        races.note(core, tensor, who, tensor._numpy(), together=True)
    mark(core, tensor)


# elements up to which a launch without numerics computes all the same: addresses are computed in such tiles
SMALL = 1024


def computed(tensors: Iterable[NkiTensor]) -> bool:
    """Return whether a launch without numerics computes an instruction: integers and small tiles of known values."""
    listed = list(tensors)
    small = all(t.dtype in INTS | WIDE for t in listed) or all(t.size <= SMALL for t in listed)
    return small and not any(t._storage.unknown for t in listed)


def known(tensor: NkiTensor, who: Who) -> None:
    """Refuse a run-time address that a launch without numerics did not compute."""
    if tensor._storage.unknown:
        actual = "is a run-time address that follows from values"
        raise NotComputed(*who, actual, "a launch without numerics does not have them; leave numerics on")


def write_where(core: Core, tensor: NkiTensor, masked: tuple[Array, Flags], who: Who) -> None:
    """Store the elements whose mask is true; the others keep value and written-mark."""
    values, where = masked
    target = tensor._numpy()
    rounded = np.empty(target.shape, target.dtype)
    store(rounded, np.asarray(values).reshape(target.shape), tensor.dtype, tensor._storage.precise)
    where = where.reshape(target.shape)
    storage = tensor._storage
    if storage.neighbours:
        _overwrite(tensor)
    if storage.history is not None:
        races.note(core, tensor, who, np.where(where, rounded, target))
    storage.writes += 1
    storage.info.touch(core.clock)
    np.copyto(target, rounded, where=where)
    if storage.matmul is not None:
        tensor._product_marks()[where] = 0
    if not storage.complete and storage.mask is not None:
        marks = tensor._written_marks()
        marks[where] = WRITTEN_MARK[marks.itemsize]
    if core.unwritten:
        propagate_unwritten(core, tensor)


def mark(core: Core, tensor: NkiTensor, matmul: bool = False) -> None:
    """Note a write to the elements of a view."""
    storage = tensor._storage
    storage.writes += 1
    storage.info.touch(core.clock)
    if storage.neighbours:
        _overwrite(tensor)
    if storage.matmul is not None:
        writers = tensor._product_marks()
        writers[...] = chain_mark(storage, writers.itemsize) if matmul else 0
    if storage.complete or storage.mask is None:
        return
    if covers(tensor) and not storage.info.explicit:
        storage.complete = True
        return
    marks = tensor._written_marks()
    marks[...] = WRITTEN_MARK[marks.itemsize]


def chain_mark(storage: Storage, width: int) -> int:
    """The mark of an element of `width` bytes that the last accumulation chain wrote."""
    return WRITTEN_MARK[width] // WRITTEN * storage.chain


def _overwrite(tensor: NkiTensor) -> None:
    """Take the bytes of a view that is about to be written from the other tensors that share them."""
    storage = tensor._storage
    info, first, last, low, high, *_ = extent(tensor)
    rows = slice(first - info.start_partition, last - info.start_partition)
    width = storage_of(tensor.dtype, storage.precise).itemsize
    written = np.zeros((info.partitions, info.size), bool)
    if tensor.size // tensor.shape[0] * width == high - low:
        written[rows, low:high] = True
    else:
        marks = tensor._marks(written.view(np.uint8))
        marks[...] = WRITTEN_MARK[width]
    for other in storage.neighbours:
        touched = written[shared_bytes(info, other.info)]
        block = shared_bytes(other.info, info)
        if other.mask is not None:
            np.copyto(other.mask[block], OVERWRITTEN, where=touched & (other.mask[block] == WRITTEN))
        if other.matmul is not None:
            np.copyto(other.matmul[block], 0, where=touched)
        if touched.any():
            other.replaced_by = info


def resolve_dynamic_offset(core: Core, tensor: NkiTensor, who: Who) -> NkiTensor | None:
    """Return a view whose run-time scalar index has been read; None when it is out of range.

    Raises:
        IllegalView: the view gathers rows, which only DMA can do.
        WrongDtype: the index tensor is not an integer scalar.
    """
    dynamic = tensor._dynamic
    assert dynamic is not None
    if dynamic.vector:
        actual = "gathers rows by a vector of indices"
        raise IllegalView(*who, actual, "only dma_copy, dma_compute and dma_transpose can")
    index = scalar(core, dynamic.source, who)
    if tensor._on_chip and isinstance(dynamic.source, NkiScalar) and dynamic.source.dtype == "int64":
        raise WrongDtype(*who, f"is indexed in {tensor.buffer.value} by an int64 scalar", "on chip an offset is int32")
    if not 0 <= index <= dynamic.limit:
        return None
    offset = tensor.offset + index * dynamic.stride
    return tensor._make(Layout(tensor.shape, tensor.strides, offset), None)


def out_of_range(core: Core, tensor: NkiTensor, who: Who) -> DynamicOutOfRange:
    """Build the error for a run-time index that leaves its tensor."""
    dynamic = tensor._dynamic
    assert dynamic is not None
    if dynamic.vector:
        values = indices(core, dynamic, who)
        bad = values[(values < 0) | (values > dynamic.limit)]
        actual = f"has run-time indices {bad[:4].tolist()} into {tensor.name}"
    else:
        actual = f"has run-time index {scalar(core, dynamic.source, who)} into {tensor.name}"
    return DynamicOutOfRange(*who, actual, f"0 to {dynamic.limit} is inside the tensor")


def scalar(core: Core, source: Any, who: Who) -> int:
    """Read a run-time scalar from a register or a one-element tensor."""
    if isinstance(source, (VirtualRegister, NkiScalar)):
        return source.value(who[0])
    if isinstance(source, int):
        return source
    if not isinstance(source, NkiTensor) or source.size != 1 or source.dtype not in _INDEX_DTYPES:
        actual = f"is indexed by {getattr(source, 'dtype', type(source).__name__)}"
        raise WrongDtype(*who, actual, "a register or a one-element integer tensor is needed")
    known(source, who)
    return int(read(core, source, who).reshape(-1)[0])


def indices(core: Core, dynamic: Dynamic, who: Who) -> NDArray[np.int64]:
    """Read the row indices of a gathering view as int64, in its row order."""
    source = dynamic.source
    if not isinstance(source, NkiTensor) or source.dtype not in ("int32", "uint32"):
        actual = f"is indexed by {getattr(source, 'dtype', type(source).__name__)}"
        raise WrongDtype(*who, actual, "row indices are an int32 or uint32 tensor in SBUF")
    values = read(core, source, (who[0], f"{who[1]} indices"))
    if source._storage.unknown:
        # without numerics any rows do: the event is the same
        return np.arange(values.size) % (dynamic.limit + 1)
    # column after column, as the DMA engine walks a two-dimensional index tile
    return values.reshape(values.shape[0], -1).T.reshape(-1).astype(np.int64)


Raw = tuple[Allocation, int, int, int, int, int, str, int, int]


def extent(tensor: NkiTensor) -> Raw:
    """Return (allocation, first partition, end, first byte, end, elements, dtype, run bytes, dense bytes).

    A run is contiguous as the view walks; dense are bytes of HBM that are contiguous in whatever order it walks them.
    """
    if tensor._extent is None:
        tensor._extent = _extent(tensor)
    return tensor._extent  # type: ignore[no-any-return]


def _extent(tensor: NkiTensor) -> Raw:
    info = tensor._storage.info
    width = info.size // tensor._row() if tensor._row() else 1
    first = 1 if tensor._on_chip else 0
    shape, strides = tensor.shape[first:], tensor.strides[first:]
    walked = list(zip(reversed(strides), reversed(shape), strict=True))
    run = _contiguous(walked)
    dense = run if tensor._on_chip or 0 in strides else _contiguous(sorted(walked))
    start, rows, at = 0, 1, tensor.offset
    if tensor._on_chip:
        (start, at), rows = divmod(tensor.offset, tensor._row()), tensor.shape[0]
    end = last_element(Layout(shape, strides, at)) + 1
    if tensor._dynamic is not None and tensor._dynamic.vector:
        at, end = 0, tensor._row()
    start += info.start_partition
    return (info, start, start + rows, at * width, end * width, tensor.size, tensor.dtype, run * width, dense * width)


def _contiguous(walked: list[tuple[int, int]]) -> int:
    """Elements that lie together, from (stride, count) of the dimensions, innermost first."""
    run = 1
    for stride, count in walked:
        if count != 1 and stride != run:
            break
        run *= count
    return run
