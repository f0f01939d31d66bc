"""A schedule as a Chrome trace: open the JSON in Perfetto or chrome://tracing.

`python -m nkisim.timeline.trace_viewer RECORDING.json --out TRACE.json`. All times are simulated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nkisim import command
from nkisim.event import Event
from nkisim.timeline.recording_file import read
from nkisim.timeline.schedule import Schedule, schedule


def describe(extent_space: str, name: str, dtype: str, count: int) -> str:
    """One operand in a few words."""
    return f"{name} {dtype} x {count} in {extent_space}"


def trace(events: Sequence[Event], result: Schedule) -> dict[str, Any]:
    """Complete events ("X") per lane; microseconds, as the format wants."""
    on_path = {step.event for step in result.critical}
    rows: list[dict[str, Any]] = []
    cores = sorted({event.core for event in events})
    for core in cores:
        rows.append(_name("process_name", core, 0, f"core {core} ({result.chip}, simulated)"))
    for lane, label in enumerate(result.lanes):
        core = int(label.split()[1])
        rows.append(_name("thread_name", core, lane, label.split(" ", 2)[2]))
        rows.append(
            {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": core,
                "tid": lane,
                "args": {"sort_index": lane},
            }
        )
    for i, event in enumerate(events):
        rows.append(
            {
                "ph": "X",
                "name": event.name or event.op,
                "cat": event.engine + (",critical" if i in on_path else ""),
                "pid": event.core,
                "tid": result.lane_of[i],
                "ts": result.start[i] / 1000,
                "dur": max(result.end[i] - result.start[i], 1.0) / 1000,
                "args": {
                    "op": event.op,
                    "line": f"{event.line[0]}:{event.line[1]}",
                    "reads": [describe(x.space, x.name, x.dtype, x.elements) for x in event.reads],
                    "writes": [describe(x.space, x.name, x.dtype, x.elements) for x in event.writes],
                    "on critical path": i in on_path,
                },
            }
        )
    about = {"source": "simulated", "chip": result.chip, "latency_ns": result.latency_ns}
    band = {"low_ns": result.low_ns, "high_ns": result.high_ns}
    return {"traceEvents": rows, "displayTimeUnit": "ns", "otherData": {**about, **band}}


def _name(kind: str, core: int, lane: int, label: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": core, "tid": lane, "args": {"name": label}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: the last line of stdout is the written file."""
    parser = argparse.ArgumentParser(prog="nkisim.timeline.trace_viewer", description=__doc__)
    parser.add_argument("recording", type=Path, help="a file written by nkisim.timeline.recording_file")
    parser.add_argument("--out", type=Path, required=True, help="the trace to write")
    options = parser.parse_args(arguments)
    events = read(options.recording).events
    options.out.write_text(json.dumps(trace(events, schedule(events))), encoding="utf-8")
    print(options.out)
    return 0


if __name__ == "__main__":
    command.run(main)
