"""The critical path of a schedule: the chain of events that the latency consists of, by cause."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from nkisim.costs_dma import DmaCost
from nkisim.program import Program
from nkisim.schedule_state import DATA, NOBODY, Times

# in the order of the fields of Transfer
TRANSFER_CAUSES = (
    "waiting for descriptors", "waiting for dma engines", "dma fixed cost", "dma data",
    "waiting for hbm",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One event of the path and the nanoseconds it contributes, by cause."""

    event: int
    parts: tuple[tuple[str, float], ...]


def critical_path(program: Program, times: Times, n: SimpleNamespace) -> tuple[Step, ...]:
    """Walk back from the event that ends last to time zero.

    The parts of all steps add up to the latency.
    """
    if not times.end:
        return ()
    event = max(range(len(times.end)), key=times.end.__getitem__)
    until = times.end[event]
    steps: list[Step] = []
    while event != NOBODY:
        start, blocker = times.start[event], times.blocker[event]
        parts = _own_parts(program, times, n, event, until - start)
        if blocker == NOBODY:
            handoff, until = start, 0.0
        elif times.reason[event] == DATA:
            # an instruction that only had to be read from frees its operand early
            until = min(times.end[blocker], start)
            handoff = start - until
        else:
            until = min(times.free[blocker], start)
            handoff = start - until
        if handoff > 1e-9:
            parts = [*parts, ("semaphore", handoff)]
        steps.append(Step(event, tuple(parts)))
        event = blocker
    return tuple(reversed(steps))


def _own_parts(
    program: Program, times: Times, n: SimpleNamespace, event: int, span: float
) -> list[tuple[str, float]]:
    """Split the time that the path spends in one event."""
    engine = program.lanes[program.lane_of[event]][1]
    if event in times.transfer:
        return _transfer_parts(program, times, event, span)
    parts: list[tuple[str, float]] = []
    if event in times.table_loads:
        table = min(span, n.scalar_table_load_ns)
        parts.append(("scalar table load", table))
        span -= table
    stream = min(span, times.stream[event])
    if stream > 0:
        parts.append((f"{engine} data", stream))
    if span - stream > 0:
        parts.append((f"{engine} fixed cost", span - stream))
    return parts


def _transfer_parts(
    program: Program, times: Times, event: int, span: float
) -> list[tuple[str, float]]:
    """Split a transfer; of one that only delays the next, its trigger and the full generator."""
    if span < times.end[event] - times.start[event] - 1e-6:
        cost = program.costs["nominal"][event]
        assert isinstance(cost, DmaCost)
        trigger = min(span, cost.trigger)
        parts = [("dma trigger", trigger), (TRANSFER_CAUSES[0], span - trigger)]
        return [part for part in parts if part[1] > 1e-9]
    transfer = times.transfer[event]
    return [
        (name, time) for name, time in zip(TRANSFER_CAUSES, transfer, strict=False) if time > 1e-9
    ]


def waits_by_cause(path: tuple[Step, ...]) -> dict[str, float]:
    """Nanoseconds of the path per cause, largest first."""
    totals: dict[str, float] = {}
    for step in path:
        for cause, time in step.parts:
            totals[cause] = totals.get(cause, 0.0) + time
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
