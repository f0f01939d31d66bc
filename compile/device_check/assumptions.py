"""The rows of docs/device_checks.md, each with what the steps that it names say of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[2] / "docs/device_checks.md"
HELD, FAILED, NOT_REACHED = "held", "FAILED", "not reached"


class Assumption(NamedTuple):
    """A row of the page: whose it is, its question, how to check it, what was chosen."""

    part: str
    question: str
    how: str
    chosen: str

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps that the row names: each of that name, or of a name that begins with it."""
        return tuple(re.findall(r"steps? `([^`]*)`", self.how))


def assumptions(page: Path = PAGE) -> list[Assumption]:
    """The page's rows; none where the page is not beside the package."""
    if not page.is_file():
        return []
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return [Assumption(*row) for row in rows[1:]]


def named(step: str, states: Mapping[str, str]) -> list[str]:
    """The states of the steps that a name of the page means."""
    return [state for name, state in states.items() if name == step or name.startswith((f"{step} ", f"{step},"))]


def verdict(row: Assumption, states: Mapping[str, str]) -> str:
    """Held if all of its steps held, failed if one failed; a row that names no step is for somebody's hands."""
    if not row.steps:
        return f"{NOT_REACHED}: by hand"
    reached = [state for step in row.steps for state in named(step, states)]
    if FAILED in reached:
        return FAILED
    return HELD if reached and set(reached) == {HELD} else NOT_REACHED


def table(states: Mapping[str, str]) -> list[str]:
    """Lines of Markdown: every assumption and what became of it."""
    rows = [f"| {a.part} | {a.question} | {verdict(a, states)} | {a.how} |" for a in assumptions()]
    return ["| part | assumption | answer | how |", "|---|---|---|---|", *rows] if rows else []
