"""A schedule as JSON trace events, which Perfetto and chrome://tracing open; `nkisim trace` writes it.

Both want the slices of one thread to nest, and instructions in flight together do not: each lane has as many threads
as it ever needs at once. Times are integer nanoseconds, which Perfetto cuts them to: of two fractions that meet it
would see an overlap. Numbers of processes and threads begin at 1, since Perfetto takes thread 0 for the idle one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from nkisim.event import Event, Extent
from nkisim.timeline.drawing import shown_from
from nkisim.timeline.schedule import Schedule

# a slice of no length would not be seen
SHORTEST_NS = 1


def trace(events: Sequence[Event], result: Schedule) -> dict[str, Any]:
    """Complete events ("X") per thread, in order of time; microseconds, as the format wants."""
    on_path = {step.event for step in result.critical}
    spans = [_span(i, result) for i in range(len(events))]
    threads = _threads(spans, result)
    rows = _names(threads, result)
    for i in sorted(range(len(events)), key=spans.__getitem__):
        event, (start, end) = events[i], spans[i]
        rows.append(
            {
                "ph": "X",
                "name": event.name or event.op,
                "cat": event.engine + (",critical" if i in on_path else ""),
                "pid": event.core + 1,
                "tid": threads[i][0],
                "ts": start / 1000,
                "dur": (end - start) / 1000,
                "args": {
                    "op": event.op,
                    "line": f"{event.line[0]}:{event.line[1]}",
                    "issued_us": result.start[i] / 1000,
                    "reads": [describe(extent) for extent in event.reads],
                    "writes": [describe(extent) for extent in event.writes],
                    "on critical path": i in on_path,
                },
            }
        )
    about = {"source": "simulated", "chip": result.chip, "latency_ns": result.latency_ns}
    band = {"low_ns": result.low_ns, "high_ns": result.high_ns}
    return {"traceEvents": rows, "displayTimeUnit": "ns", "otherData": {**about, **band}}


def describe(extent: Extent) -> str:
    """One operand in a few words."""
    return f"{extent.name} {extent.dtype} x {extent.elements} in {extent.space}"


def _span(event: int, result: Schedule) -> tuple[int, int]:
    """When a slice is seen, in nanoseconds: a transfer while its data move."""
    start = math.floor(shown_from(result, event))
    return start, max(math.floor(result.end[event]), start + SHORTEST_NS)


def _threads(spans: Sequence[tuple[int, int]], result: Schedule) -> dict[int, tuple[int, int, int]]:
    """Per event: its thread, its lane, and which of the lane's threads that is."""
    ends: dict[int, list[int]] = {}
    numbers: dict[tuple[int, int], int] = {}
    threads: dict[int, tuple[int, int, int]] = {}
    for i in sorted(range(len(spans)), key=spans.__getitem__):
        lane, (start, end) = result.lane_of[i], spans[i]
        busy = ends.setdefault(lane, [])
        row = next((r for r, until in enumerate(busy) if until <= start), len(busy))
        busy[row:] = [end, *busy[row + 1 :]]
        threads[i] = (numbers.setdefault((lane, row), len(numbers) + 1), lane, row)
    return threads


def _names(threads: dict[int, tuple[int, int, int]], result: Schedule) -> list[dict[str, Any]]:
    """Perfetto's processes and threads, and their order."""
    rows: list[dict[str, Any]] = []
    for tid, lane, row in sorted(set(threads.values()), key=lambda thread: thread[1:]):
        _, core, name = result.lanes[lane].split(" ", 2)
        pid = int(core) + 1
        if all(known["pid"] != pid for known in rows):
            rows.append(_named("process_name", pid, tid, {"name": f"core {core} ({result.chip}, simulated)"}))
        rows.append(_named("thread_name", pid, tid, {"name": f"{name} {row + 1}" if row else name}))
        rows.append(_named("thread_sort_index", pid, tid, {"sort_index": len(rows)}))
    return rows


def _named(kind: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}
