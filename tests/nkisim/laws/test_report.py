"""Recording files, the HTML report and the trace: read back, labelled, and well formed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nkisim import report
from nkisim.event import Event
from nkisim.timeline import trace_viewer
from nkisim.timeline.calibration import Tape
from nkisim.timeline.drawing import bars, clock, draw, nice_step
from nkisim.timeline.recording_file import BadRecording, from_json, read, save, to_json
from nkisim.timeline.schedule import schedule


def small() -> list[Event]:
    tape = Tape()
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


class Sources(HTMLParser):
    """Collects everything that a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [tag for name, _ in attrs if name in ("src", "href")]


def test_report_is_one_labelled_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "r.json", small(), {"kernel": "soft<max>", "dims": "B1"})
    assert report.main([str(tmp_path / "r.json"), "--out", str(tmp_path / "r.html")]) == 0
    assert capsys.readouterr().out.strip().endswith("r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    sources = Sources()
    sources.feed(text)
    assert sources.fetched == []
    assert "soft&lt;max&gt;: simulated timeline" in text
    assert "Simulated by nkisim, not measured." in text
    assert "share of the roofline" in text


def test_drawing_is_svg_and_every_bar_says_simulated() -> None:
    events = small()
    root = ElementTree.fromstring(draw(events, schedule(events)))
    titles = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) > len(events)
    assert all("simulated" in title or title == "critical path" for title in titles)


def test_tiny_neighbours_are_drawn_as_one_bar() -> None:
    tape = Tape()
    a, b = tape.tile("sbuf", 4), tape.tile("sbuf", 4)
    for _ in range(50):
        tape.add("vector", "tensor_copy", (a,), (b,), elements=4)
    result = schedule(tape.events, band=False)
    assert sum(bar.count for bar in bars(tape.events, result, 0, 1e-4)) == 50
    assert len(bars(tape.events, result, 0, 1e-4)) == 1
    assert len(bars(tape.events, result, 0, 1.0)) == 50


def test_trace_has_one_complete_event_per_instruction(tmp_path: Path) -> None:
    events = small()
    save(tmp_path / "r.json", events)
    out = tmp_path / "t.json"
    assert trace_viewer.main([str(tmp_path / "r.json"), "--out", str(out)]) == 0
    trace = json.loads(out.read_text())
    complete = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    assert [row["args"]["op"] for row in complete] == [event.op for event in events]
    assert all(row["dur"] > 0 for row in complete)
    assert trace["otherData"]["source"] == "simulated"
    names = [row["args"]["name"] for row in trace["traceEvents"] if row["name"] == "process_name"]
    assert names == ["core 0 (trn2, simulated)"]


def test_clock_and_axis() -> None:
    assert [clock(x) for x in (12.0, 1500.0, 2e7)] == ["12 ns", "1.50 us", "20.00 ms"]
    assert [nice_step(x) for x in (8.0, 100.0, 24000.0)] == [1, 20, 5000]


@pytest.mark.parametrize("module", ["nkisim.report", "nkisim.timeline.trace_viewer"])
def test_a_missing_or_wrong_recording_is_one_sentence(module: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[]", encoding="utf-8")
    for file, sentence in ((tmp_path / "none.json", "cannot be used"), (wrong, "holds a list")):
        command = [sys.executable, "-m", module, str(file), "--out", str(tmp_path / "x")]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 2
        assert sentence in done.stderr
        assert len(done.stderr.splitlines()) == 1
