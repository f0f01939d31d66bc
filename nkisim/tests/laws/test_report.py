"""Recording files, the HTML report and the trace: read back, labelled, and well formed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from nkisim.__main__ import main
from nkisim.event import Event
from nkisim.timeline.access_drawing import accesses, cells, draw_accesses
from nkisim.timeline.drawing import bars, clock, draw, nice_step
from nkisim.timeline.recording_file import BadRecording, from_json, read, save, to_json
from nkisim.timeline.schedule import schedule
from validation.instruction_models import EventBuilder


def small() -> list[Event]:
    tape = EventBuilder()
    a, b, c = (tape.tile("sbuf", 512) for _ in range(3))
    tape.transfer(tape.tile("hbm", 512), a, "hwdge")
    tape.add("vector", "tensor_copy", (a,), (b,), elements=512)
    tape.add("scalar", "activation", (b,), (c,), elements=512, function="exp")
    tape.transfer(c, tape.tile("hbm", 512), "hwdge")
    return tape.events


def test_recording_reads_back_as_it_was(tmp_path: Path) -> None:
    events = small()
    events[2] = replace(events[2], after=(0, 1), name="soft<max>", line=("a/b.py", 7))
    save(tmp_path / "r.json", events, {"kernel": "k"})
    loaded = read(tmp_path / "r.json")
    assert loaded.events == events
    assert loaded.about == {"kernel": "k"}
    assert schedule(loaded.events) == schedule(events)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[1]")
    (tmp_path / "y.json").write_text("no json")
    for name in ("x.json", "y.json"):
        with pytest.raises(BadRecording):
            read(tmp_path / name)
    with pytest.raises(BadRecording, match="nkisim-recording-1"):
        from_json({**to_json(small(), {}), "format": "other"})


def test_report_is_one_labelled_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "r.json", small(), {"kernel": "soft<max>", "dims": "B1"})
    assert main(["report", str(tmp_path / "r.json"), "--out", str(tmp_path / "r.html")]) == 0
    assert capsys.readouterr().out.strip().endswith("r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert not re.search(r"\b(src|href)=", text), "the page fetches something"
    assert "soft&lt;max&gt;: simulated timeline" in text
    assert "Simulated by nkisim, not measured." in text
    assert "share of the roofline" in text
    assert 'aria-label="accesses of SBUF"' in text


def test_drawing_is_svg_and_every_bar_is_labelled_simulated() -> None:
    events = small()
    root = ElementTree.fromstring(draw(events, schedule(events)))
    titles = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) > len(events)
    assert all("simulated" in title or title == "critical path" for title in titles)


def test_the_picture_of_a_tensor_s_lifetime_and_accesses() -> None:
    events = small()
    result = schedule(events)
    first, middle, last = accesses(events, result)
    assert [(len(t.writes), len(t.reads)) for t in (first, middle, last)] == [(1, 1), (1, 1), (1, 1)]
    assert middle.life == (result.start[1], result.end[2])
    assert middle.size == 2048
    counts = cells([(0.0, 10.0), (5.0, 20.0)], 100.0)
    assert (counts[0], counts[15], counts[30], counts[41]) == (1, 2, 1, 0)
    root = ElementTree.fromstring(draw_accesses(events, result, "sbuf"))
    titles = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}title")]
    rows = [title for title in titles if "partitions 0 to 127" in title]
    assert len(rows) == 3
    assert all(", 1 writes, 1 reads (simulated)" in title for title in rows)
    assert draw_accesses(events, result, "psum") == ""
    many = [replace(e, writes=tuple(replace(x, tensor=x.tensor + 100 * i) for x in e.writes))
            for i in range(40) for e in events]  # fmt: skip
    assert "the 48 largest of " in draw_accesses(many, schedule(many, band=False), "sbuf")


def test_tiny_neighbours_are_one_bar() -> None:
    tape = EventBuilder()
    a, b = tape.tile("sbuf", 4), tape.tile("sbuf", 4)
    for _ in range(50):
        tape.add("vector", "tensor_copy", (a,), (b,), elements=4)
    result = schedule(tape.events, band=False)
    assert sum(bar.count for bar in bars(tape.events, result, 0, 1e-4)) == 50
    assert len(bars(tape.events, result, 0, 1e-4)) == 1
    assert len(bars(tape.events, result, 0, 1.0)) == 50


def many() -> list[Event]:
    """Transfers in flight together, and instructions of two cores that overlap."""
    tape = EventBuilder()
    for core in (0, 1):
        for _ in range(4):
            tile = tape.tile("sbuf", 512)
            tape.transfer(tape.tile("hbm", 512), tile, "hwdge", core)
            tape.add("vector", "tensor_copy", (tile,), (tape.tile("sbuf", 512),), elements=512, core=core)
    return tape.events


def traced(events: list[Event], folder: Path) -> dict[str, Any]:
    save(folder / "r.json", events)
    assert main(["trace", str(folder / "r.json"), "--out", str(folder / "t.json")]) == 0
    trace: dict[str, Any] = json.loads((folder / "t.json").read_text())
    return trace


def test_trace_has_one_complete_event_per_instruction(tmp_path: Path) -> None:
    events = small()
    trace = traced(events, tmp_path)
    complete = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    assert sorted(row["args"]["op"] for row in complete) == sorted(event.op for event in events)
    assert trace["otherData"]["source"] == "simulated"
    names = [row["args"]["name"] for row in trace["traceEvents"] if row["name"] == "process_name"]
    assert names == ["core 0 (trn2, simulated)"]


# the fields of the Trace Event Format that Perfetto's importer reads, by phase
FIELDS = {
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": (int, float), "dur": (int, float), "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
}


def test_trace_is_what_perfetto_reads(tmp_path: Path) -> None:
    """Typed fields, threads that are named, numbered from 1 and in one process, slices of a thread that never cross."""
    trace = traced(many(), tmp_path)
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    for row in trace["traceEvents"]:
        fields = FIELDS[row["ph"]]
        assert set(row) == {"ph", *fields}
        assert all(isinstance(row[key], kind) for key, kind in fields.items())
        assert row["pid"] > 0
        assert row["tid"] > 0
    slices: dict[int, list[dict[str, Any]]] = {}
    for row in trace["traceEvents"]:
        if row["ph"] == "X":
            slices.setdefault(row["tid"], []).append(row)
    named = {row["tid"] for row in trace["traceEvents"] if row["name"] == "thread_name"}
    assert named == set(slices)
    for rows in slices.values():
        # Perfetto cuts times to integer nanoseconds, each for itself
        assert all(round(row[key] * 1000, 6).is_integer() for row in rows for key in ("ts", "dur"))
        assert len({row["pid"] for row in rows}) == 1
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-9 for a, b in pairwise(rows))
    assert {row["pid"] for rows in slices.values() for row in rows} == {1, 2}
    # loads in flight together have threads of their own
    loads = {row["tid"] for rows in slices.values() for row in rows if row["pid"] == 1 and row["cat"].startswith("dma")}
    assert len(loads) > 1


def test_clock_and_axis() -> None:
    assert [clock(x) for x in (12.0, 1500.0, 2e7)] == ["12 ns", "1.50 us", "20.00 ms"]
    assert [nice_step(x) for x in (8.0, 100.0, 24000.0)] == [1, 20, 5000]
