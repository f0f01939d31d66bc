"""nkisim run, time, report and trace: the output and the files of each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nkisim.cli import times
from nkisim.cli.launches import Launch, add_options, launches
from nkisim.command import Parser
from nkisim.event import Event
from nkisim.host_io import flat
from nkisim.report import page
from nkisim.timeline.compiler_model import ORDERS, CompilerModel
from nkisim.timeline.drawing import draw
from nkisim.timeline.recording_file import read, save
from nkisim.timeline.schedule import schedule
from nkisim.timeline.trace_viewer import trace


def run(arguments: Sequence[str]) -> int:
    """Run a kernel and say what comes out; every law of the machine is checked."""
    parser = Parser(prog="nkisim run", description=run.__doc__)
    add_options(parser)
    parser.add_argument("--out", type=Path, metavar="FILE.npz", help="write the outputs")
    parser.add_argument("--recording", type=Path, metavar="FILE.json", help="write the events, for report and trace")
    parser.add_argument("--json", action="store_true", help="one JSON object, errors too")
    options = parser.parse_args(arguments)
    launch = _one(launches(options), "run")
    result = launch.run(recording=options.recording is not None)
    arrays = dict(flat(result.outputs))
    rows = [_summary(name, array) for name, array in arrays.items()]
    if options.out:
        np.savez(options.out, **arrays)
    if options.recording:
        save(options.recording, result.recording.events, {"kernel": launch.name})
    if options.json:
        print(json.dumps({"kernel": launch.name, "outputs": rows}))
    else:
        print("\n".join("{name}  {dtype} {shape}  {values}  sha256 {sha256:.12}".format(**r) for r in rows))
    return 0


def time(arguments: Sequence[str]) -> int:
    """Say how long kernels would take on trn2, with the band that uncertain constants leave."""
    parser = Parser(prog="nkisim time", description=time.__doc__)
    add_options(parser)
    parser.add_argument(
        "--no-numerics", action="store_true", help="the same times without arithmetic, for large shapes"
    )
    parser.add_argument("--json", action="store_true", help="a file of times, for nkisim report --against; errors too")
    parser.add_argument(
        "--order", choices=ORDERS, default="lesser", help="the order that the latency is of (default: the faster one)"
    )
    options = parser.parse_args(arguments)
    compiler = CompilerModel(order=options.order)
    rows = [times.row(launch, not options.no_numerics, compiler) for launch in launches(options)]
    print(json.dumps(times.to_json(rows), indent=1) if options.json else times.text(rows))
    return 0


def report(arguments: Sequence[str]) -> int:
    """Write a timeline as a page or a picture, or compare times with those of an earlier version."""
    parser = Parser(prog="nkisim report", description=report.__doc__)
    add_options(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the timeline: .html, or .svg for the picture only")
    parser.add_argument("--against", type=Path, metavar="BASE.json", help="times to compare with (nkisim time --json)")
    parser.add_argument("--format", choices=("markdown", "text", "json"), default="text", help="of the comparison")
    parser.add_argument("--json", action="store_true", help="errors as JSON; with --against the comparison too")
    options = parser.parse_args(arguments)
    if options.against:
        print(_compared(options))
        return 0
    if not options.out or options.out.suffix not in (".html", ".svg"):
        raise ValueError("report writes --out FILE.html or FILE.svg, or compares --against BASE.json; give one of them")
    name, events = _events(options)
    result = schedule(events)
    written = page(events, result, {"kernel": name}) if options.out.suffix == ".html" else draw(events, result)
    options.out.write_text(written, encoding="utf-8")
    print(options.out)
    return 0


def trace_(arguments: Sequence[str]) -> int:
    """Write a timeline for Perfetto (ui.perfetto.dev), as JSON of its trace events."""
    parser = Parser(prog="nkisim trace", description=trace_.__doc__)
    add_options(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="the trace")
    parser.add_argument("--json", action="store_true", help="errors as JSON")
    options = parser.parse_args(arguments)
    _, events = _events(options)
    options.out.write_text(json.dumps(trace(events, schedule(events))), encoding="utf-8")
    print(options.out)
    return 0


def _one(listed: list[Launch], command: str) -> Launch:
    if len(listed) > 1:
        raise ValueError(f"nkisim {command} takes one launch, and the file names {len(listed)}; name one")
    return listed[0]


def _events(options: Any) -> tuple[str, list[Event]]:
    """The events of a recording file, or of a launch."""
    first, *rest = options.launch
    if first.endswith(".json") and not rest:
        recording = read(Path(first))
        return str(recording.about.get("kernel", first)), recording.events
    launch = _one(launches(options), "report and nkisim trace")
    return launch.name, launch.run(recording=True).recording.events


def _compared(options: Any) -> str:
    """The difference of times between a file and launches, or a second file."""
    first, *rest = options.launch
    if first.endswith(".json") and not rest:
        head = times.read(Path(first))
    else:
        head = [times.row(launch) for launch in launches(options)]
    rows = times.difference(times.read(options.against), head)
    if options.json or options.format == "json":
        return json.dumps({"against": str(options.against), "differences": rows}, indent=1)
    return times.difference_markdown(rows) if options.format == "markdown" else times.difference_text(rows)


def _summary(name: str, array: Any) -> dict[str, Any]:
    """An array in one line."""
    numbers = array.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    words = [f"{finite.min():.4g} to {finite.max():.4g}, mean {finite.mean():.4g}"] if finite.size else ["no number"]
    words += [f"{count} {what}" for count, what in
              ((int(np.isnan(numbers).sum()), "NaN"), (int(np.isinf(numbers).sum()), "infinite")) if count]  # fmt: skip
    words += ["all zero"] * (not numbers.any())
    shape, dtype = "x".join(map(str, array.shape)), array.dtype.name
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return {"name": name, "dtype": dtype, "shape": shape, "values": ", ".join(words), "sha256": digest}
