"""The bytes of tensors: poisoned when fresh, tracked per byte, aware of who wrote PSUM."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nkisim.dtypes import INFO, Array
from nkisim.errors import Line

Bytes = NDArray[np.uint8]

# mask values of one byte: it is unwritten, an instruction wrote it through another tensor since, it is written;
# the largest is the good one, so that the smallest element decides for all
UNWRITTEN, OVERWRITTEN, WRITTEN = 0, 1, 2
# the official simulator's sentinel of unwritten integer memory
INT_SENTINEL = 4


@dataclass(slots=True, eq=False)
class Allocation:
    """The facts of one storage apart from its bytes; they outlive the bytes."""

    number: int
    name: str
    space: str
    core: int
    partitions: int
    # bytes per partition on chip, bytes of the tensor in hbm
    size: int
    line: Line
    start_partition: int = 0
    # absolute byte address in the partition; None until the planner has placed the storage
    address: int | None = None
    explicit: bool = False
    # partitions that the planner moved the storage by, to share bytes with others
    shift: int = 0
    # positions in the core's program of the first and last instruction that touched it
    first: int = -1
    last: int = -1
    # the first that did not load it, and the one that loads it now
    used: int = -1
    loading: int = -1

    def touch(self, clock: int) -> None:
        """Note that the instruction at `clock` uses this storage."""
        if self.first < 0:
            self.first = clock
        if self.used < 0 and clock != self.loading:
            self.used = clock
        self.last = clock


@dataclass(slots=True, eq=False)
class Storage:
    """Bytes, their written-marks, and the allocation that they belong to.

    `data` is an array of bytes in which the tensor's first byte is at `start`, and a partition follows the one
    before after `pitch` bytes. `mask` and `matmul` have the same layout, or begin with the tensor and are dense
    where `own_marks` is set: tensors at explicit addresses share bytes, not marks.
    """

    info: Allocation
    data: Bytes
    # WRITTEN where an instruction wrote the byte; None when tracking is off or the host wrote all
    mask: Bytes | None
    dtype: str
    # off: every float takes 4 bytes here, whatever its dtype says
    precise: bool
    pitch: int = 0
    start: int = 0
    # instructions that wrote to it
    writes: int = 0
    # the source of nl.copy, and its `writes` at that time
    copied: tuple[Storage, int] | None = None
    # without numerics: values that were not computed were written to it
    unknown: bool = False
    # shortcut: once everything is written the mask need not be read again
    complete: bool = False
    separate_marks: bool = False
    # the last tensor that was written on bytes of this one
    replaced_by: Allocation | None = None
    # storages at explicit addresses that share bytes with this one
    neighbours: Sequence[Storage] = ()
    history: AccessHistory | None = None
    # psum only: the number of the accumulation chain that wrote the byte last, 0 where no matmul did; the last chain's
    matmul: Bytes | None = None
    chain: int = 0


@dataclass(slots=True, eq=False)
class Access:
    """One access of a core to a shared storage inside one epoch."""

    core: int
    write: bool
    line: Line
    op: str
    tensor: Any


@dataclass(slots=True, eq=False)
class AccessHistory:
    """Who accessed which byte of a shared storage since its cores last met."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    accesses: list[Access] = field(default_factory=list)
    marks: Bytes | None = None
    # a race that changes nothing if both cores end with the same bytes: its error and the core that it was seen on
    race: tuple[Exception, Any] | None = None
    # from such a race on: the bytes that each core wrote last, and which the cores wrote differently at some time
    last: tuple[Bytes, Bytes] | None = None
    differed: Bytes | None = None


def poison(data: Bytes, dtype: str) -> None:
    """Fill fresh memory with NaN, or with the integer sentinel."""
    if INFO[dtype].kind == "float":
        # all ones is a NaN in every float format here
        data.fill(0xFF)
    elif INFO[dtype].itemsize == 1:
        data.fill(INT_SENTINEL)
    else:
        storage = INFO[dtype].storage
        data.view(storage)[...] = storage.type(INT_SENTINEL)


def view_of(
    storage_bytes: Bytes, dtype: np.dtype[Any], shape: tuple[int, ...], where: tuple[int, tuple[int, ...]]
) -> Array:
    """Return a numpy view of bytes; `where` is (byte offset, byte strides)."""
    offset, strides = where
    return np.ndarray(shape, dtype, storage_bytes, offset, strides)
