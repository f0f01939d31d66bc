"""Placing tensors on disjoint partitions at the same bytes, where columns alone do not fit."""

from __future__ import annotations

from nkisim.event import Peak
from nkisim.geometry import Geometry
from nkisim.memory.placement import Region, full, live_at, measure, rounded
from nkisim.memory.storage import Allocation


def pack(allocations: list[Allocation], region: Region, geometry: Geometry) -> Peak:
    """Like place, but tensors on disjoint partitions may share bytes.

    A tensor of at most 64 partitions may then start at partition 64, one of at most 32 at any multiple of 32.

    Raises:
        SbufFull, PsumFull: they still do not fit.
    """
    used = [a for a in allocations if a.first >= 0 and a.space == region.space]
    used.sort(key=lambda a: (a.first, a.number))
    live: list[Allocation] = []
    highest = 0
    for a in used:
        live = [b for b in live if b.last >= a.first]
        if not a.explicit and not _into_quadrants(a, live + _later(a, used), region, geometry):
            raise full(region, live_at(used, region, a.first), a)
        live.append(a)
        highest = max(highest, (a.address or 0) + rounded(a, region))
    columns = measure(used, region)
    return Peak(region.core, region.space, min(highest, region.size), region.size, columns.live)


def _later(a: Allocation, used: list[Allocation]) -> list[Allocation]:
    """Return the tensors at explicit addresses that come to live while `a` does."""
    return [b for b in used if b.explicit and b.first > a.first and b.first <= a.last]


def _into_quadrants(a: Allocation, busy: list[Allocation], region: Region, geometry: Geometry) -> bool:
    """Give `a` the lowest free bytes among the partitions that it may start at; tell whether there are some."""
    step = geometry.quadrant if a.partitions <= geometry.quadrant else 2 * geometry.quadrant
    starts = range(0, geometry.partitions, step) if a.partitions <= step else (0,)
    free = []
    for start in starts:
        beside = [b for b in busy if _partitions(b)[0] < start + a.partitions and start < _partitions(b)[1]]
        address = _gap(beside, rounded(a, region), region)
        if address is not None:
            free.append((address, start))
    if free:
        a.address, a.shift = min(free)
    return bool(free)


def _partitions(a: Allocation) -> tuple[int, int]:
    start = a.start_partition + a.shift
    return start, start + a.partitions


def _gap(busy: list[Allocation], size: int, region: Region) -> int | None:
    """Return the lowest address with enough free bytes."""
    at = 0
    for start, stop in sorted((b.address or 0, (b.address or 0) + rounded(b, region)) for b in busy):
        if at + size <= start:
            break
        at = -(-max(at, stop) // region.granule) * region.granule
    return at if at + size <= region.size else None
