"""The critical path of a schedule: the chain of events that the latency consists of, by cause."""

from __future__ import annotations

from typing import NamedTuple

from nkisim.timeline.chip import Numbers
from nkisim.timeline.costs.dma import DmaCost
from nkisim.timeline.program import Program
from nkisim.timeline.schedule_state import DATA, NOBODY, Times

# in the order of the fields of Transfer
TRANSFER_CAUSES = (
    "waiting for descriptors",
    "waiting for dma engines",
    "dma fixed cost",
    "dma data",
    "waiting for hbm",
)


class PathEvent(NamedTuple):
    """One event of the path and the nanoseconds it contributes, by cause."""

    event: int
    parts: tuple[tuple[str, float], ...]


def critical_path(program: Program, times: Times, n: Numbers) -> tuple[PathEvent, ...]:
    """Walk back from the event that ends last to time zero.

    The parts of all steps add up to the latency.
    """
    if not times.end:
        return ()
    event = max(range(len(times.end)), key=times.end.__getitem__)
    until = times.end[event]
    labels = [(f"{engine} data", f"{engine} fixed cost") for _, engine in program.lanes]
    steps: list[PathEvent] = []
    starts, blockers, lane_of, streams = times.start, times.blocker, program.lane_of, times.stream
    while event != NOBODY:
        start, blocker = starts[event], blockers[event]
        if event in times.transfer:
            parts = _transfer_parts(program, times, event, until - start)
        else:
            table = n.scalar_table_load_ns if event in times.table_loads else 0.0
            parts = _own_parts(labels[lane_of[event]], streams[event], table, until - start)
        until = 0.0
        if blocker != NOBODY:
            # an instruction that only had to be read from frees its operand early
            until = min((times.end if times.reason[event] == DATA else times.free)[blocker], start)
        handoff = start - until
        if handoff > 1e-9:
            parts.append(("semaphore", handoff))
        steps.append(PathEvent(event, tuple(parts)))
        event = blocker
    return tuple(reversed(steps))


def _own_parts(labels: tuple[str, str], stream: float, table: float, span: float) -> list[tuple[str, float]]:
    """Split the time that the path spends in one instruction: table load, stream, the rest."""
    parts: list[tuple[str, float]] = []
    if table:
        table = min(span, table)
        parts.append(("scalar table load", table))
        span -= table
    stream = min(stream, span)
    if stream > 0:
        parts.append((labels[0], stream))
    if span > stream:
        parts.append((labels[1], span - stream))
    return parts


def _transfer_parts(program: Program, times: Times, event: int, span: float) -> list[tuple[str, float]]:
    """Split a transfer; of one that only delays the next, its trigger and the full generator."""
    if span < times.end[event] - times.start[event] - 1e-6:
        cost = program.costs["nominal"][event]
        assert isinstance(cost, DmaCost)
        trigger = min(span, cost.trigger)
        parts = [("dma trigger", trigger), (TRANSFER_CAUSES[0], span - trigger)]
        return [part for part in parts if part[1] > 1e-9]
    transfer = times.transfer[event]
    return [(name, time) for name, time in zip(TRANSFER_CAUSES, transfer, strict=False) if time > 1e-9]


def waits_by_cause(path: tuple[PathEvent, ...]) -> dict[str, float]:
    """Nanoseconds of the path per cause, largest first."""
    totals: dict[str, float] = {}
    for _, parts in path:
        for cause, time in parts:
            totals[cause] = totals.get(cause, 0.0) + time
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
