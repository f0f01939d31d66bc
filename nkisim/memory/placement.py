"""Where tensors live: after a run, place every on-chip storage by its first and last use.

A storage is live from the first instruction that touches it to the last one, as a compiler
sees it; the Python lifetime of the variable does not matter. Tensors with an explicit address
keep it. The others take the free bytes that have been dead for the longest time, so that memory is
reused as late as possible; when that does not fit, first-fit is tried, and only then is the kernel refused.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from nkisim.errors import LawError, PsumFull, SbufFull
from nkisim.event import Peak
from nkisim.geometry import Geometry
from nkisim.memory.storage import Allocation


@dataclass(frozen=True, slots=True)
class Region:
    """One memory to place into: its size and the granule of an allocation, in bytes."""

    space: str
    core: int
    size: int
    granule: int
    # an allocation of at most this many bytes must not cross a multiple of it; 0 for none
    block: int


def regions(core: int, geometry: Geometry) -> tuple[Region, Region]:
    """Return SBUF and PSUM of one core as regions."""
    bank = geometry.psum_bank_bytes
    return (
        Region("sbuf", core, geometry.sbuf_bytes_per_partition, 32, 0),
        Region("psum", core, geometry.psum_bytes_per_partition, bank, bank),
    )


def place(allocations: list[Allocation], region: Region) -> Peak:
    """Give every used allocation an address and return the peak.

    Raises:
        SbufFull, PsumFull: more bytes are live at one instruction than the memory has, or the
            free bytes are in pieces too small for the next tensor.
    """
    used = [a for a in allocations if a.first >= 0 and a.space == region.space]
    used.sort(key=lambda a: (a.first, a.number))
    peak = measure(used, region)
    if peak.peak_bytes_per_partition > region.size:
        raise full(region, peak)
    for late in (True, False):
        stuck = _fit(used, region, late)
        if stuck is None:
            return peak
    assert stuck is not None
    raise full(region, live_at(used, region, stuck.first), stuck)


def rounded(allocation: Allocation, region: Region) -> int:
    return -(-allocation.size // region.granule) * region.granule


def measure(used: list[Allocation], region: Region) -> Peak:
    """Return the largest sum of live bytes over the program."""
    steps: dict[int, int] = {}
    for a in used:
        size = rounded(a, region)
        steps[a.first] = steps.get(a.first, 0) + size
        steps[a.last + 1] = steps.get(a.last + 1, 0) - size
    live = best = when = 0
    for clock in sorted(steps):
        live += steps[clock]
        if live > best:
            best, when = live, clock
    return live_at(used, region, when, best)


def live_at(used: list[Allocation], region: Region, clock: int, peak: int | None = None) -> Peak:
    live = [a for a in used if a.first <= clock <= a.last]
    live.sort(key=lambda a: -a.size)
    total = sum(rounded(a, region) for a in live) if peak is None else peak
    rows = tuple((a.name, a.size, a.line) for a in live)
    return Peak(region.core, region.space, total, region.size, rows)


def full(region: Region, peak: Peak, stuck: Allocation | None = None) -> LawError:
    """Build the refusal, with the list of what was live."""
    rows = [f"{name} {size} B ({line[0]}:{line[1]})" for name, size, line in peak.live[:12]]
    more = f" and {len(peak.live) - 12} more" if len(peak.live) > 12 else ""
    found = f"holds {peak.peak_bytes_per_partition} B per partition at once"
    if stuck is not None:
        found += f" and has no gap of {stuck.size} B left for {stuck.name}"
    allowed = f"{region.size} B exist on core {region.core}; live then: {', '.join(rows)}{more}"
    law = SbufFull if region.space == "sbuf" else PsumFull
    error = law("allocation", region.space, found, allowed)
    error.line = stuck.line if stuck else (peak.live[0][2] if peak.live else None)
    return error


def _fit(used: list[Allocation], region: Region, late: bool) -> Allocation | None:
    """Place in order of first use; return the allocation that found no gap, or None."""
    fixed = [a for a in used if a.explicit]
    memory = _Memory(region)
    for a in used:
        if not a.explicit:
            ahead = [b for b in fixed if b.first <= a.last and b.last >= a.first]
            address = memory.gap(a, rounded(a, region), ahead, late)
            if address is None:
                return a
            a.address = address
        memory.take(a.address or 0, rounded(a, region), a.last)
    return None


class _Memory:
    """The bytes of a region as segments (start, stop, last use of the tensor that was there, or -1)."""

    def __init__(self, region: Region) -> None:
        self.granule = region.granule
        self.segments: list[tuple[int, int, int]] = [(0, region.size, -1)]

    def gap(self, tensor: Allocation, size: int, ahead: list[Allocation], late: bool) -> int | None:
        """The address whose bytes have been dead for the longest time, or the lowest free one."""
        taken = [((b.address or 0), (b.address or 0) + b.size) for b in ahead]
        starts = [start for start, _, _ in self.segments]
        candidates = sorted({*starts, *[high for _, high in taken]}) if taken else starts
        best, dead_since = None, tensor.first
        for start in candidates:
            address = -(-start // self.granule) * self.granule
            latest = self._latest(bisect_right(starts, start) - 1, address + size, dead_since)
            if latest >= dead_since or any(low < address + size and address < high for low, high in taken):
                continue
            best, dead_since = address, latest
            if not late or latest < 0:
                break
        return best

    def _latest(self, at: int, stop: int, limit: int) -> int:
        """The last use of the bytes from a segment up to `stop`; `limit` if that is too late or too far."""
        latest = -1
        for _, end, last in self.segments[at:]:
            if last >= limit:
                return limit
            latest = max(latest, last)
            if end >= stop:
                return latest
        return limit

    def take(self, start: int, size: int, last: int) -> None:
        """Give bytes to a tensor that is used until `last`."""
        stop = start + size
        cut: list[tuple[int, int, int]] = []
        placed = False
        for low, high, used in self.segments:
            if high <= start or low >= stop:
                if low >= stop and not placed:
                    cut.append((start, stop, last))
                    placed = True
                cut.append((low, high, used))
                continue
            if low < start:
                cut.append((low, start, used))
            if not placed:
                cut.append((start, stop, last))
                placed = True
            if high > stop:
                cut.append((stop, high, used))
        self.segments = cut
