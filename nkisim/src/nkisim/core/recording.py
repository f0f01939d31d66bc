"""Turning the raw logs of cores into events, once every storage has its address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nkisim.core.context import Core
from nkisim.errors import WrongArgument
from nkisim.event import Event, Extent, Peak, Recording


def build(cores: Sequence[Core], schedule: Sequence[Any] = (), peaks: tuple[Peak, ...] = ()) -> Recording:
    """Return the launch-wide list of events: core after core, each in program order.

    `after` holds positions in that list.
    """
    total = sum(core.clock for core in cores)
    start: dict[int, int] = {}
    at = 0
    for core in cores:
        start[core.number] = at
        at += len(core.log)
    positions: dict[int, dict[int, int]] = {
        core.number: {raw[0]: start[core.number] + i for i, raw in enumerate(core.log)} for core in cores
    }
    links = Links(positions, _meetings(cores, positions), {}, {})
    events = [_event(core, raw, links) for core in cores for raw in core.log]
    return Recording(_scheduled(events, schedule), peaks, total)


def _meetings(cores: Sequence[Core], positions: dict[int, dict[int, int]]) -> dict[tuple[int, int], tuple[int, ...]]:
    """Pair the k-th exchange or barrier of one key on one core with the k-th on the other.

    A meeting ends when both cores are there: each side starts after the instructions that precede the other.
    """
    order: dict[tuple[int, object], list[tuple[Core, int, int]]] = {}
    for core in cores:
        counts: dict[object, int] = {}
        for raw in core.log:
            key = raw[5].get("meets")
            if key is not None:
                number = counts[key] = counts.get(key, -1) + 1
                order.setdefault((number, key), []).append((core, raw[0], positions[core.number][raw[0]]))
    after: dict[tuple[int, int], tuple[int, ...]] = {}
    for group in order.values():
        for core, clock, _ in group:
            others = [p - 1 for c, k, p in group if c is not core and k > 0]
            after[core.number, clock] = tuple(others)
    return after


@dataclass(frozen=True, slots=True)
class Links:
    """The values that events refer to."""

    # core -> clock -> position in the launch-wide list
    positions: dict[int, dict[int, int]]
    # (core, clock) of a meeting -> positions that must end before it
    meetings: dict[tuple[int, int], tuple[int, ...]]
    # one tuple per list of views and one Extent per view, since loops use the same ones in many instructions
    operands: dict[tuple[int, ...], tuple[Extent, ...]]
    extents: dict[int, Extent]


def _event(core: Core, raw: tuple[Any, ...], links: Links) -> Event:
    clock, engine, op, reads, writes, work, line, name = raw
    after: tuple[int, ...] = ()
    if clock in core.edges:
        places = links.positions
        after = tuple(places[c][i] for c, i in core.edges[clock] if i in places[c])
    if links.meetings:
        after += links.meetings.get((core.number, clock), ())
    known, read, written = links.operands, tuple(map(id, reads)), tuple(map(id, writes))
    sources = known.get(read) or _operands(read, reads, links)
    targets = known.get(written) or _operands(written, writes, links)
    return Event(clock, core.number, engine, op, sources, targets, work, line, name, after)


def _operands(key: tuple[int, ...], raws: Sequence[tuple[Any, ...]], links: Links) -> tuple[Extent, ...]:
    known = links.extents
    same = links.operands[key] = tuple([known.get(id(raw)) or _extent(raw, known) for raw in raws])
    return same


def _extent(raw: tuple[Any, ...], known: dict[int, Extent]) -> Extent:
    # the log keeps every raw tuple alive, so its identity is stable
    info, first, last, low, high, count, dtype, _, dense = raw
    base = info.address or 0
    result = known[id(raw)] = Extent(
        info.space,
        info.number,
        info.name,
        info.core,
        (first + info.shift, last + info.shift) if info.space != "hbm" else (0, 1),
        (base + low, base + high),
        count,
        dtype,
        dense,
    )
    return result


def _scheduled(events: list[Event], schedule: Sequence[Any]) -> list[Event]:
    """Add the edges of Kernel.with_schedule between named instructions."""
    if not schedule:
        return events
    by_name: dict[tuple[int, str], int] = {(e.core, e.name): i for i, e in enumerate(events) if e.name is not None}
    for consumer, producers in schedule:
        names = [producers] if isinstance(producers, str) else list(producers)
        for core in {e.core for e in events}:
            for missing in (n for n in (consumer, *names) if (core, n) not in by_name):
                raise WrongArgument(
                    "with_schedule", f"name {missing!r}", "is no instruction", "name the instructions with name="
                )
            at = by_name[core, consumer]
            edges = tuple(by_name[core, n] for n in names)
            events[at] = replace(events[at], after=events[at].after + edges)
    return events
