"""Memory of a launch: HBM shared by its cores, and SBUF and PSUM of each core."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

import numpy as np

from nkisim.dtypes import INFO, storage_of
from nkisim.errors import (
    AddressTaken,
    CoresDiverge,
    DuplicateName,
    HbmFull,
    Line,
    Misaligned,
    PsumFull,
    SbufFull,
    StartPartition,
    TooManyPartitions,
)
from nkisim.geometry import Geometry
from nkisim.memory.storage import AccessHistory, Allocation, Bytes, Storage, poison
from nkisim.policy import Policy


@dataclass(frozen=True, slots=True)
class Request:
    """A kernel's request for a new tensor."""

    shape: tuple[int, ...]
    dtype: str
    space: str
    name: str
    line: Line
    address: tuple[int, int] | None = None


@dataclass(eq=False)
class SharedMemory:
    """HBM of one launch, and the numbering of storages."""

    geometry: Geometry
    policy: Policy
    cores: int
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    lock: threading.Lock = field(default_factory=threading.Lock)
    hbm_used: int = 0
    # shared tensors by explicit name, or by position among a core's unnamed ones
    shared: dict[object, Storage] = field(default_factory=dict)
    # storages of kernel arguments
    inputs: list[Storage] = field(default_factory=list)

    def hbm(self, request: Request, core: int, data: Bytes | None = None) -> Storage:
        """Allocate HBM; `data` adopts bytes that the host filled."""
        precise = self.policy.precise_fp
        width = storage_of(request.dtype, precise).itemsize
        count = int(np.prod(request.shape, dtype=np.int64))
        size = count * INFO[request.dtype].itemsize
        with self.lock:
            self.hbm_used += size
            used = self.hbm_used
        if used > self.geometry.hbm_bytes:
            allowed = f"one stack has {self.geometry.hbm_bytes} B"
            raise HbmFull("ndarray", request.name or "tensor", f"brings HBM to {used} B", allowed)
        info = Allocation(next(self.numbers), request.name or "hbm", "hbm", core, 1, size, request.line, address=0)
        mask = None
        if data is None:
            data = np.empty((1, count * width), np.uint8)
            if self.policy.tracking:
                mask = np.zeros((1, count * width), np.uint8)
                if self.policy.numerics:
                    poison(data, request.dtype)
        history = AccessHistory() if core < 0 and self.cores > 1 and self.policy.races else None
        return Storage(info, data, mask, request.dtype, precise, complete=mask is None, history=history)

    def shared_hbm(self, request: Request, key: object) -> Storage:
        """Return the one storage that every core of the launch reaches under `key`."""
        with self.lock:
            result = self.shared.get(key)
        if result is None:
            storage = self.hbm(request, -1)
            with self.lock:
                result = self.shared.setdefault(key, storage)
        size = int(np.prod(request.shape, dtype=np.int64)) * INFO[request.dtype].itemsize
        if result.info.size != size or result.dtype != request.dtype:
            name, other = request.name or "unnamed shared_hbm tensor", f"{result.info.size} B of {result.dtype}"
            actual = f"is {size} B of {request.dtype} on one core and {other} on the other"
            raise CoresDiverge("ndarray", name, actual, "give shared tensors of different kind different names")
        return result


@dataclass(eq=False)
class CoreMemory:
    """SBUF and PSUM of one core, and the list of everything allocated there."""

    core: int
    shared: SharedMemory
    allocations: list[Allocation] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    unnamed_shared: int = 0
    # the bytes that tensors with explicit addresses are windows of
    arenas: dict[str, Bytes] = field(default_factory=dict)
    placed: dict[str, list[Storage]] = field(default_factory=dict)

    def allocate(self, request: Request) -> Storage:
        """Allocate in the requested memory.

        Raises:
            TooManyPartitions, SbufFull, PsumFull, AddressTaken, Misaligned, StartPartition,
            DuplicateName, CoresDiverge, HbmFull: the request breaks that law.
        """
        if request.space == "shared_hbm":
            return self._shared(request)
        self._claim(request.name)
        if request.space == "private_hbm":
            return self.shared.hbm(request, self.core)
        return self._on_chip(request)

    def _claim(self, name: str) -> None:
        if not name:
            return
        if name in self.names:
            raise DuplicateName("ndarray", f"name {name!r}", "is used twice", "explicit names are unique on a core")
        self.names.add(name)

    def _shared(self, request: Request) -> Storage:
        key: object = request.name
        if request.name:
            self._claim(request.name)
        else:
            key = self.unnamed_shared
            self.unnamed_shared += 1
        return self.shared.shared_hbm(request, key)

    def _on_chip(self, request: Request) -> Storage:
        geometry, policy = self.shared.geometry, self.shared.policy
        partitions = request.shape[0]
        if partitions > geometry.partitions:
            allowed = f"on-chip memory has {geometry.partitions}"
            raise TooManyPartitions("ndarray", request.name or "tensor", f"has {partitions} partitions", allowed)
        free = int(np.prod(request.shape[1:], dtype=np.int64))
        size = free * INFO[request.dtype].itemsize
        self._check_size(request, size)
        width = storage_of(request.dtype, policy.precise_fp).itemsize
        number = next(self.shared.numbers)
        name = request.name or f"{request.space}.{number}"
        info = Allocation(number, name, request.space, self.core, partitions, size, request.line)
        self.allocations.append(info)
        if request.address is not None:
            return self._at_address(request, info, width)
        storage = self._fresh(request, info, (partitions, free * width))
        if policy.tracking and policy.numerics:
            poison(storage.data, request.dtype)
        return storage

    def _fresh(self, request: Request, info: Allocation, size: tuple[int, int]) -> Storage:
        """Return a storage with bytes of its own."""
        policy = self.shared.policy
        mask = np.zeros(size, np.uint8) if policy.tracking else None
        matmul = np.zeros(size, np.uint8) if request.space == "psum" else None
        return Storage(info, np.empty(size, np.uint8), mask, request.dtype, policy.precise_fp,
                       pitch=size[1], complete=mask is None, matmul=matmul)  # fmt: skip

    def _check_size(self, request: Request, size: int) -> None:
        geometry = self.shared.geometry
        psum = request.space == "psum"
        limit = geometry.psum_bytes_per_partition if psum else geometry.sbuf_bytes_per_partition
        if size > limit:
            law = PsumFull if psum else SbufFull
            allowed = f"{request.space} has {limit} B per partition"
            raise law("ndarray", request.name or "tensor", f"takes {size} B per partition", allowed)

    def _at_address(self, request: Request, info: Allocation, width: int) -> Storage:
        """Place at an explicit (partition, byte) address; no byte changes until somebody writes."""
        assert request.address is not None
        partition, offset = request.address
        self._check_address(request, info)
        info.start_partition, info.address, info.explicit = partition, offset, True
        if not self.shared.policy.precise_fp:
            # widened elements have no byte address; the storage shares no bytes
            count = info.size // INFO[request.dtype].itemsize
            return self._fresh(request, info, (info.partitions, count * width))
        return self._window(request, info)

    def _window(self, request: Request, info: Allocation) -> Storage:
        """Return a storage whose bytes are a window of the core's memory."""
        assert info.address is not None
        data, tracking = self._arena(request.space), self.shared.policy.tracking
        older = self.placed.setdefault(request.space, [])
        neighbours = [s for s in older if _overlap(s.info, info)]
        if tracking:
            _poison_fresh(data, info, request.dtype, neighbours)
        size, pitch = (info.partitions, info.size), data.strides[0]
        mask = np.zeros(size, np.uint8) if tracking else None
        matmul = np.zeros(size, np.uint8) if request.space == "psum" else None
        start = info.start_partition * pitch + info.address
        storage = Storage(info, data, mask, request.dtype, True, pitch, start, complete=not tracking,
                          matmul=matmul, separate_marks=True, neighbours=neighbours)  # fmt: skip
        for other in neighbours:
            other.neighbours = [*other.neighbours, storage]
        older.append(storage)
        return storage

    def _arena(self, space: str) -> Bytes:
        if space not in self.arenas:
            geometry = self.shared.geometry
            size = geometry.psum_bytes_per_partition if space == "psum" else geometry.sbuf_bytes_per_partition
            # odd multiple of a cache line between rows, so that columns do not share a cache set
            self.arenas[space] = np.zeros((geometry.partitions, size + 64 * 5), np.uint8)
        return self.arenas[space]

    def _check_address(self, request: Request, info: Allocation) -> None:
        assert request.address is not None
        geometry = self.shared.geometry
        partition, offset = request.address
        name = request.name or "tensor"
        psum = request.space == "psum"
        limit = geometry.psum_bytes_per_partition if psum else geometry.sbuf_bytes_per_partition
        check_start(partition, info.partitions, geometry, ("ndarray", f"address of {name}"))
        if offset < 0 or offset + info.size > limit:
            actual = f"covers bytes [{offset}, {offset + info.size})"
            raise AddressTaken("ndarray", name, actual, f"{request.space} has {limit} B")
        align = geometry.psum_bank_bytes if psum else geometry.sbuf_min_align
        if offset % align:
            actual = f"starts at byte {offset}"
            raise Misaligned("ndarray", name, actual, f"{request.space} starts are multiples of {align}")


def _poison_fresh(data: Bytes, info: Allocation, dtype: str, neighbours: list[Storage]) -> None:
    """Poison the bytes of a window that no tensor covers yet; the others stay as they are."""
    poisoned = np.empty((info.partitions, info.size), np.uint8)
    poison(poisoned, dtype)
    fresh = np.ones(poisoned.shape, bool)
    for other in neighbours:
        fresh[shared_bytes(info, other.info)] = False
    assert info.address is not None
    rows = slice(info.start_partition, info.start_partition + info.partitions)
    np.copyto(data[rows, info.address : info.address + info.size], poisoned, where=fresh)


def shared_bytes(a: Allocation, b: Allocation) -> tuple[slice, slice]:
    """Return the partitions and bytes of `a`, counted from its start, that `b` covers too."""
    assert a.address is not None
    assert b.address is not None
    rows = _common(a.start_partition, a.partitions, b.start_partition, b.partitions)
    return rows, _common(a.address, a.size, b.address, b.size)


def _common(a: int, a_size: int, b: int, b_size: int) -> slice:
    return slice(max(0, b - a), max(0, min(a_size, b + b_size - a)))


def _overlap(a: Allocation, b: Allocation) -> bool:
    assert a.address is not None
    assert b.address is not None
    rows = a.start_partition < b.start_partition + b.partitions
    rows = rows and b.start_partition < a.start_partition + a.partitions
    return rows and a.address < b.address + b.size and b.address < a.address + a.size


def check_start(start: int, count: int, geometry: Geometry, who: tuple[str, str]) -> None:
    """Check the rule of start partitions for an access of `count` partitions from `start`.

    Raises:
        StartPartition: more than 64 partitions start at 0, 33-64 at 0 or 64, up to 32 at any
            multiple of 32 (architecture guide of Trainium1).
    """
    quadrant, total = geometry.quadrant, geometry.partitions
    if start == 0 and count <= total:
        return
    step = quadrant if count <= quadrant else (2 * quadrant if count <= 2 * quadrant else total)
    if start % step or start + count > total or start < 0:
        allowed = f"{count} partitions may start at a multiple of {step} below {total}"
        raise StartPartition(who[0], who[1], f"covers partitions [{start}, {start + count})", allowed)
