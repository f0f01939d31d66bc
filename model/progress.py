"""Progress of long work on stderr: a bar on a terminal, else a line where it takes more than two seconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress import TaskID as Row

T = TypeVar("T")
_LINE_AFTER_S = 2.0


class Task:
    """A running task; any thread may report."""

    def __init__(self, bars: Progress, row: Row) -> None:
        self.bars, self.row = bars, row

    def advance(self, count: int = 1) -> None:
        """Add to the amount done."""
        self.bars.advance(self.row, count)

    @property
    def total(self) -> float | None:
        """The amount of the whole task, if it is known."""
        return self.bars.tasks[self.row].total

    @total.setter
    def total(self, total: int) -> None:
        self.bars.update(self.row, total=total)

    def at(self, what: str) -> None:
        """Name the work that runs now."""
        self.bars.update(self.row, description=what)


@contextmanager
def progress(what: str, total: int = 0, unit: str = "") -> Iterator[Task]:
    """Show a task until the end of the block. `unit` names what `total` counts; 0 is unknown."""
    console, count = Console(stderr=True), DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), count, TimeRemainingColumn())
    line = f"{what}: {total} {unit}" if total and unit != "bytes" else what
    timer = threading.Timer(_LINE_AFTER_S, print, [line], {"file": sys.stderr, "flush": True})
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        try:
            if not console.is_terminal:
                timer.daemon = True
                timer.start()
            yield Task(bars, bars.add_task(what, total=total or None))
        finally:
            timer.cancel()


def each(items: Iterable[T], what: str) -> Iterator[T]:
    """The items; progress is shown while the caller works on them."""
    listed = list(items)
    with progress(what, len(listed)) as task:
        for item in listed:
            yield item
            task.advance()
