"""Files of results, which begin with their header (source, commit, machine, date)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model.errors import UserError
from model.provenance import header

__all__ = ["header", "read_result", "said", "write_result"]


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
