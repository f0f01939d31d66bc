"""Speculative steps as JSON lines in a file: what bench.tune reads acceptance from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from model.errors import UserError
from model.serving.engine import SpecStep


def recorder(file: Path, draft: str) -> Callable[[SpecStep], None]:
    """Appends speculative steps to a file of JSON lines; its prompts are numbered on from the last one there.

    UserError if the file holds something else or cannot be written.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        first = max((json.loads(line)["prompt"] for line in lines), default=-1) + 1
        file.touch()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot take a record of steps ({error}); give a new file") from error

    def record(step: SpecStep) -> None:
        row = {
            "prompt": first + step.request,
            "draft": draft,
            "drafted": step.drafted,
            "accepted": step.accepted,
            "position": step.position,
        }
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")

    return record
