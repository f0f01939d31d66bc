"""Files of results; each begins with a header: source (simulated or wall), commit, machine, date."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

from compile.build import commit

_CPUINFO = Path("/proc/cpuinfo")
HEADER = ("source", "commit", "machine", "date")


def header(source: str) -> dict[str, Any]:
    """The header of a file of results; `source` is simulated or wall."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.is_file() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processor = named[0] if named else platform.processor() or "unknown processor"
    system = f"{platform.system()} {platform.machine()}"
    machine = f"{system}, {processor}, {os.cpu_count()} threads, Python {platform.python_version()}"
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"source": source, "commit": commit(), "machine": machine, "date": date}


def sentence(result: dict[str, Any]) -> str:
    """The header of a result as text."""
    return f"source {result['source']}, commit {result['commit']}, {result['machine']}, {result['date']}"


def write_result(file: Path, value: dict[str, Any]) -> None:
    """Write a JSON object with one line per row of a list of rows, so that a diff shows the changed rows."""
    parts = []
    for name, part in value.items():
        rows = isinstance(part, list) and part and isinstance(part[0], dict)
        shown = "[\n" + ",\n".join(json.dumps(r) for r in part) + "\n]" if rows else json.dumps(part)
        parts.append(f"{json.dumps(name)}: {shown}")
    file.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")
