"""GatheredRows picked at run time: reading and writing HBM through a vector of indices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nkisim.core import access, races
from nkisim.core.context import Core
from nkisim.dtypes import Array, Flags, store
from nkisim.errors import ShapeMismatch, UnwrittenRead
from nkisim.memory.tensor import NkiTensor
from nkisim.memory.views import Layout


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """A gathering view resolved: all rows it may name, the named ones, and which are inside."""

    # every legal row of the tensor as one static view
    all: NkiTensor
    index: NDArray[np.int64]
    valid: Flags


def resolve(core: Core, tensor: NkiTensor, who: access.Who, skip: bool) -> GatheredRows:
    """Read the indices of a gathering view.

    Raises:
        DynamicOutOfRange: an index leaves the tensor and `skip` is off.
        ShapeMismatch: there are fewer indices than rows.
    """
    dynamic = tensor._dynamic
    assert dynamic is not None
    assert dynamic.vector
    index = access.indices(core, dynamic, who)
    count = tensor.shape[dynamic.dim]
    if len(index) < count:
        raise ShapeMismatch(*who, f"takes {count} rows", f"the index tensor has {len(index)} entries")
    index = index[:count]
    valid = (index >= 0) & (index <= dynamic.limit)
    if not skip and not valid.all():
        raise access.out_of_range(core, tensor, who)
    shape = (dynamic.limit + 1, *tensor.shape[1:])
    layout = Layout(shape, (dynamic.stride, *tensor.strides[1:]), tensor.offset)
    return GatheredRows(tensor._make(layout, None), index, valid)


def read(core: Core, rows: GatheredRows, who: access.Who) -> Array:
    """Return a row per index, after the checks of a read; rows out of range are zeros."""
    picked = rows.index[rows.valid]
    storage = rows.all._storage
    storage.info.touch(core.clock)
    if not storage.complete and storage.mask is not None:
        marks = rows.all._marks(storage.mask)[picked]
        bad = marks != access.WRITTEN_MARK[marks.itemsize]
        if bad.any():
            row = int(picked[int(np.argmax(bad.reshape(len(picked), -1).any(axis=1)))])
            line = storage.info.line
            actual = f"gathers row {row} of {rows.all.name}, which nobody wrote entirely"
            fault = UnwrittenRead(*who, actual, f"it was allocated at {line[0]}:{line[1]}")
            missing = np.zeros((len(rows.index), *bad.shape[1:]), np.bool_)
            missing[rows.valid] = bad
            access.on_unwritten_read(core, missing, fault)
    if storage.history is not None:
        for row in np.unique(picked):
            races.note(core, rows.all[int(row) : int(row) + 1], who)
    stored = rows.all._numpy()
    if len(picked) == len(rows.index):
        return stored[picked]  # type: ignore[no-any-return]
    values = np.zeros((len(rows.index), *stored.shape[1:]), stored.dtype)
    values[rows.valid] = stored[picked]
    return values


def write(core: Core, rows: GatheredRows, values: Array, who: access.Who) -> None:
    """Scatter one value row per index; rows with an index out of range are dropped."""
    target = rows.all._numpy()
    shape = (len(rows.index), *target.shape[1:])
    rounded = np.empty(shape, target.dtype)
    storage = rows.all._storage
    store(rounded, values.reshape(shape), rows.all.dtype, storage.precise)
    picked = rows.index[rows.valid]
    storage.info.touch(core.clock)
    if storage.history is not None:
        arriving = rounded[rows.valid]
        for row in np.unique(picked):
            last = np.flatnonzero(picked == row)[-1:]
            races.note(core, rows.all[int(row) : int(row) + 1], who, arriving[last])
    storage.writes += 1
    target[picked] = rounded[rows.valid]
    if not storage.complete and storage.mask is not None:
        marks = rows.all._marks(storage.mask)
        marks[picked] = access.WRITTEN_MARK[marks.itemsize]
    if core.unwritten:
        access.propagate_unwritten(core, rows.all)
