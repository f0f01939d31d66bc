"""Where tensors live: after a run, place every on-chip storage by its first and last use.

A storage is live from the first instruction that touches it to the last one, as a compiler
sees it; the Python lifetime of the variable does not matter. Tensors with an explicit address
keep it. The others take the free bytes that have been dead for the longest time, so that memory is
reused as late as possible. When that does not fit, tensors that stay take the lowest free bytes, and only
the others are spread: one stays if more bytes are requested while it lives than the memory has. Then
first-fit is tried for all, and only then is the kernel refused. The refusal says whether the kernel would
fit if each load came right before the first instruction that uses its data.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

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
        raise full(region, peak, later=_fits_with_later_loads(used, region))
    for spread in _spreads(used, region):
        stuck = _fit(used, region, spread)
        if stuck is None:
            return peak
    assert stuck is not None
    raise full(region, live_at(used, region, stuck.first), stuck, _fits_with_later_loads(used, region))


def _fits_with_later_loads(used: list[Allocation], region: Region) -> bool:
    """Whether all would find room if loaded data lived from its first other use on."""
    moved = [replace(a, first=max(a.first, a.used)) for a in used]
    moved.sort(key=lambda a: (a.first, a.number))
    return any(_fit(moved, region, spread) is None for spread in _spreads(moved, region))


def _spreads(used: list[Allocation], region: Region) -> Iterator[list[bool]]:
    """Which tensors take the bytes that have been dead for the longest time: all, those that do not stay, none."""
    yield [True] * len(used)
    firsts = [a.first for a in used]
    cumulative = list(accumulate((rounded(a, region) for a in used), initial=0))
    yield [cumulative[bisect_right(firsts, a.last)] - cumulative[i] <= region.size for i, a in enumerate(used)]
    yield [False] * len(used)


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


def full(region: Region, peak: Peak, stuck: Allocation | None = None, later: bool = False) -> LawError:
    """Build the refusal, with the list of the live tensors."""
    rows = [f"{name} {size} B ({line[0]}:{line[1]})" for name, size, line in peak.live[:12]]
    more = f" and {len(peak.live) - 12} more" if len(peak.live) > 12 else ""
    actual = f"holds {peak.peak_bytes_per_partition} B per partition at once"
    if stuck is not None:
        actual += f" and has no gap of {stuck.size} B left for {stuck.name}"
    allowed = f"{region.size} B exist on core {region.core}; live then: {', '.join(rows)}{more}"
    if later:
        allowed += "; it fits if each load comes right before the first use of what it brings"
    law = SbufFull if region.space == "sbuf" else PsumFull
    error = law("allocation", region.space, actual, allowed)
    error.line = stuck.line if stuck else (peak.live[0][2] if peak.live else None)
    return error


def _fit(used: list[Allocation], region: Region, spread: list[bool]) -> Allocation | None:
    """Place in order of first use; return the allocation that has no gap, or None."""
    fixed = [a for a in used if a.explicit]
    memory = _Memory(region)
    for a, late in zip(used, spread, strict=True):
        if not a.explicit:
            ahead = [b for b in fixed if b.first <= a.last and b.last >= a.first]
            address = memory.gap(a, rounded(a, region), ahead, late)
            if address is None:
                return a
            a.address = address
        memory.take(a.address or 0, rounded(a, region), a.last)
    return None


class _Memory:
    """The bytes of a region as segments, each with the last use of the tensor that was there, or -1."""

    def __init__(self, region: Region) -> None:
        self.granule = region.granule
        # (start, stop, last use) by address, and (last use, start, stop) by age
        self.segments: list[tuple[int, int, int]] = [(0, region.size, -1)]
        self.by_age: list[tuple[int, int, int]] = [(-1, 0, region.size)]

    def gap(self, tensor: Allocation, size: int, ahead: list[Allocation], late: bool) -> int | None:
        """The address whose bytes have been dead for the longest time, or the lowest free one."""
        taken = [((b.address or 0), (b.address or 0) + b.size) for b in ahead]
        # runs of dead bytes, grown by one segment after the other
        stop_of: dict[int, int] = {}
        start_of: dict[int, int] = {}
        if late:
            dead = self.by_age
        else:
            dead = [(last, start, stop) for start, stop, last in self.segments if last < tensor.first]
        for last, start, stop in dead:
            if last >= tensor.first:
                return None
            low = start_of.pop(start, start)
            high = stop_of.pop(stop, stop)
            stop_of[low], start_of[high] = high, low
            address = self._within(low, high - size, taken, size)
            if address is not None:
                return address
        return None

    def _within(self, low: int, upper: int, taken: list[tuple[int, int]], size: int) -> int | None:
        """The first address from `low` to `most` that no tensor ahead needs."""
        address = -(-low // self.granule) * self.granule
        for start, stop in sorted(taken):
            if start < address + size and address < stop:
                address = -(-stop // self.granule) * self.granule
        return address if address <= upper else None

    def take(self, start: int, size: int, last: int) -> None:
        """Give bytes to a tensor that is used until `last`."""
        stop = start + size
        first = max(0, bisect_left(self.segments, (start,)) - 1)
        end = bisect_left(self.segments, (stop,))
        old = [part for part in self.segments[first:end] if part[1] > start]
        new = [(low, start, used) for low, _, used in old[:1] if low < start]
        new.append((start, stop, last))
        new += [(stop, high, used) for _, high, used in old[-1:] if high > stop]
        self.segments[end - len(old) : end] = new
        for low, high, used in old:
            del self.by_age[bisect_left(self.by_age, (used, low, high))]
        for low, high, used in new:
            insort(self.by_age, (used, low, high))
