"""The critical path of a schedule: the chain of events that the latency consists of, by cause."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from nkisim.timeline.chip import ResolvedSpec
from nkisim.timeline.costs.dma import DmaCost
from nkisim.timeline.costs.engines import EngineCost
from nkisim.timeline.program import Program
from nkisim.timeline.schedule_state import NO_EVENT, Times

DESCRIPTORS = "waiting for descriptors"


class PathEvent(NamedTuple):
    """One event of the path and the nanoseconds it contributes, by cause."""

    event: int
    parts: tuple[tuple[str, float], ...]


def critical_path(program: Program, times: Times, n: ResolvedSpec) -> tuple[PathEvent, ...]:
    """Walk back from the event that ends last to time zero.

    The parts of all steps add up to the latency.
    """
    if not times.end:
        return ()
    starts, ends, frees, blockers, waited = times.start, times.end, times.free, times.blocker, times.waited
    streams, loads, costs, lane_of = times.stream, times.table_loads, program.costs["nominal"], program.lane_of
    labels = [(f"{engine} data", f"{engine} fixed cost") for _, engine in program.lanes]
    until = max(ends)
    event = ends.index(until)
    steps: list[PathEvent] = []
    while event != NO_EVENT:
        start, blocker, cost = starts[event], blockers[event], costs[event]
        if type(cost) is DmaCost:
            parts = _transfer_parts(cost, times, event, until - start)
        else:
            stream = cost.stream if type(cost) is EngineCost else streams[event]
            table = min(until - start, n.scalar_table_load_ns) if event in loads else 0.0
            parts = _work_parts(labels[lane_of[event]], stream, until - start - table)
            if table:
                parts.insert(0, ("scalar table load", table))
        until = 0.0
        if blocker != NO_EVENT:
            # an instruction that only had to be read from frees its operand early
            until = (ends if waited[event] else frees)[blocker]
            until = until if until < start else start
        if start - until > 1e-9:
            parts.append(("semaphore", start - until))
        steps.append(PathEvent(event, tuple(parts)))
        event = blocker
    steps.reverse()
    return tuple(steps)


def _work_parts(labels: tuple[str, str], stream: float, span: float) -> list[tuple[str, float]]:
    """Split the time that the path spends in one instruction: its data, the rest."""
    if 0.0 < stream < span:
        return [(labels[0], stream), (labels[1], span - stream)]
    return [(labels[stream <= 0.0], span)] if span > 0.0 else []


def _transfer_parts(cost: DmaCost, times: Times, event: int, span: float) -> list[tuple[str, float]]:
    """Split a transfer; of one that only delays the next, its trigger and the full generator."""
    start = times.start[event]
    if span < times.end[event] - start - 1e-6:
        trigger = min(span, cost.trigger)
        parts = {"dma trigger": trigger, DESCRIPTORS: span - trigger}
    else:
        begin, data, stream, shared, end = times.moved[event]
        parts = {
            DESCRIPTORS: begin - start - cost.trigger,
            "waiting for dma engines": end - data - stream - shared,
            "dma fixed cost": cost.trigger + cost.lead + cost.tail,
            "dma data": stream,
            "waiting for hbm": shared,
        }
    return [part for part in parts.items() if part[1] > 1e-9]


def waits_by_cause(path: tuple[PathEvent, ...]) -> dict[str, float]:
    """Nanoseconds of the path per cause, largest first."""
    totals: defaultdict[str, float] = defaultdict(float)
    for _, parts in path:
        for cause, time in parts:
            totals[cause] += time
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
