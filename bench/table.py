"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells as text."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)])
