"""The header of every file of results (source, commit, machine, date), and the files themselves."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from model.errors import UserError

_CPUINFO = Path("/proc/cpuinfo")


def commit() -> str | None:
    """This checkout's commit, marked when it has changes; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        return None


def machine() -> str:
    """System, processor, its threads, and Python."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processor = named[0] if named else platform.processor() or "unknown processor"
    system = f"{platform.system()} {platform.machine()}"
    return f"{system}, {processor}, {os.cpu_count()} threads, Python {platform.python_version()}"


def header(source: str) -> dict[str, Any]:
    """The beginning of every file of results; `source` is simulated or wall."""
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"source": source, "commit": commit(), "machine": machine(), "date": date}


def said(made: dict[str, Any]) -> str:
    """A header in words."""
    return f"source {made['source']}, commit {made['commit']}, {made['machine']}, {made['date']}"


def write_result(file: Path, value: dict[str, Any]) -> None:
    """A JSON object with a line for each row of a list of rows, so that a difference shows a changed result."""
    parts = []
    for name, part in value.items():
        rows = isinstance(part, list) and part and isinstance(part[0], dict)
        shown = "[\n" + ",\n".join(json.dumps(r) for r in part) + "\n]" if rows else json.dumps(part)
        parts.append(f"{json.dumps(name)}: {shown}")
    file.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")


def read_result(file: Path, *parts: str) -> dict[str, Any]:
    """A file of results with its header and these parts; UserError if it lacks one."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({type(error).__name__}); give a file that --out wrote") from error
    needed = ("source", "commit", "machine", "date", *parts)
    missing = [name for name in needed if not isinstance(value, dict) or name not in value]
    if missing:
        raise UserError(f"{file} is not a file of results: it lacks {', '.join(missing)}; give a file that --out wrote")
    found: dict[str, Any] = value
    return found
