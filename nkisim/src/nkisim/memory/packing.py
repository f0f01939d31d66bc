"""Placing tensors on disjoint partitions at the same bytes, where columns do not fit."""

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
    # tensors on all partitions first where the order of use leaves fragments
    wide = sorted(used, key=lambda a: (a.partitions <= geometry.partitions // 2, a.first, a.number))
    stuck = _pack(used, region, geometry, in_place=False)
    if stuck is not None and _pack(wide, region, geometry, in_place=True) is not None:
        raise full(region, live_at(used, region, stuck.first), stuck)
    highest = max((a.address or 0) + rounded(a, region) for a in used)
    columns = measure(used, region)
    return Peak(region.core, region.space, min(highest, region.size), region.size, columns.live)


def _pack(ordered: list[Allocation], region: Region, geometry: Geometry, in_place: bool) -> Allocation | None:
    """Place in this order; return the tensor that finds no room. `in_place`: a result may replace a last operand."""

    def meet(a: Allocation, b: Allocation) -> bool:
        first, second = (a, b) if a.first < b.first else (b, a)
        return second.first < first.last + (not in_place or first.first == second.first)

    placed = [a for a in ordered if a.explicit]
    for a in ordered:
        if not a.explicit:
            if not _into_quadrants(a, [b for b in placed if meet(a, b)], region, geometry):
                return a
            placed.append(a)
    return None


def _into_quadrants(a: Allocation, busy: list[Allocation], region: Region, geometry: Geometry) -> bool:
    """Give `a` the lowest free bytes among the partitions that it may start at; return whether there are some."""
    step = geometry.quadrant if a.partitions <= geometry.quadrant else 2 * geometry.quadrant
    starts = range(0, geometry.partitions, step) if a.partitions <= step else (0,)
    free = []
    for start in starts:
        neighbours = [b for b in busy if _partitions(b)[0] < start + a.partitions and start < _partitions(b)[1]]
        address = _gap(neighbours, rounded(a, region), region)
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
