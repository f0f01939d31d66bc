"""A recording as a JSON file: how events are written and read back.

The file holds one table of extents and a list of events that refer to it by position, because
most instructions repeat operands. `format` names the layout; a reader refuses a different one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nkisim.command import read_json
from nkisim.event import Event, Extent

FORMAT = "nkisim-recording-1"


@dataclass(frozen=True, slots=True)
class RecordingFile:
    """The content of a recording file: the events and facts about the run (kernel, arguments, chip)."""

    events: list[Event]
    about: Mapping[str, Any] = field(default_factory=dict)


class BadRecording(ValueError):
    """The file is not a recording of this format."""


def _plain(value: object) -> object:
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def to_json(events: Sequence[Event], about: Mapping[str, Any]) -> dict[str, Any]:
    """Turn events into plain lists; `about` goes into the file as it is."""
    table: dict[Extent, int] = {}
    files: dict[str, int] = {}
    rows: list[list[Any]] = []
    for event in events:
        reads = [table.setdefault(extent, len(table)) for extent in event.reads]
        writes = [table.setdefault(extent, len(table)) for extent in event.writes]
        file = files.setdefault(event.line[0], len(files))
        work = {key: _plain(value) for key, value in event.work.items()}
        rows.append(
            [event.index, event.core, event.engine, event.op, reads, writes, work,
             file, event.line[1], event.name, list(event.after)]
        )  # fmt: skip
    extents = [
        [x.space, x.tensor, x.name, x.core, list(x.partitions), list(x.span), x.elements, x.dtype,
         x.row_bytes]
        for x in table
    ]  # fmt: skip
    return {"format": FORMAT, "about": dict(about), "files": list(files), "extents": extents, "events": rows}


def from_json(data: Mapping[str, Any]) -> RecordingFile:
    """Rebuild the events.

    Raises:
        BadRecording: the format is missing or different.
    """
    if data.get("format") != FORMAT:
        raise BadRecording(f"the file says format {data.get('format')!r}; this reader knows {FORMAT!r}")
    extents = [
        Extent(space, tensor, name, core, (p[0], p[1]), (s[0], s[1]), count, dtype, row)
        for space, tensor, name, core, p, s, count, dtype, row in data["extents"]
    ]
    files = data["files"]
    events = [
        Event(
            index, core, engine, op,
            tuple(extents[i] for i in reads), tuple(extents[i] for i in writes),
            work, (files[file], line), name, tuple(after),
        )
        for index, core, engine, op, reads, writes, work, file, line, name, after in data["events"]
    ]  # fmt: skip
    return RecordingFile(events, data.get("about", {}))


def save(path: Path, events: Sequence[Event], about: Mapping[str, Any] | None = None) -> None:
    """Write a recording file."""
    path.write_text(json.dumps(to_json(events, about or {})), encoding="utf-8")


def read(path: Path) -> RecordingFile:
    """Read a recording file.

    Raises:
        BadRecording: the file is not a recording of this format.
    """
    try:
        data = read_json(path, "write a recording with nkisim run ... --recording")
    except ValueError as error:
        raise BadRecording(str(error)) from None
    if not isinstance(data, dict):
        raise BadRecording(f"{path} holds a {type(data).__name__}, not a recording")
    return from_json(data)
