"""Progress on stderr for work of more than two seconds: a bar on a terminal, else a line from time to time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Task as Row
from rich.text import Text

T = TypeVar("T")
# the first line where stderr is a file, and the time between two: it doubles up to the longest
FIRST_S, LONGEST_S = 2.0, 60.0


class Task:
    """A running task: its name, the amount done, and the total; any thread may report."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self.what, self.done, self.total, self.unit = what, 0, total, unit
        self._lock = threading.Lock()

    def advance(self, count: int = 1) -> None:
        """Add to the amount done."""
        with self._lock:
            self.done += count

    def at(self, what: str) -> None:
        """Name the work that runs now."""
        self.what = what

    def amount(self) -> str:
        """The amount done, for people."""
        scale, unit = (1e9, "GB") if self.unit == "bytes" else (1, self.unit)
        digits = 2 if self.unit == "bytes" else 0
        of = f" of {self.total / scale:.{digits}f}" if self.total else ""
        return f"{self.done / scale:.{digits}f}{of} {unit}".strip() if self.done or self.total else ""


@contextmanager
def progress(what: str, total: int = 0, unit: str = "") -> Iterator[Task]:
    """Show a task until the end of the block: a bar on a terminal, else a line after 2 s and then ever more rarely.

    `unit` names what `total` counts; "bytes" are shown as GB. A total of 0 is unknown.
    """
    task, over = Task(what, total, unit), threading.Event()
    show = _bar if sys.stderr.isatty() else _lines
    teller = threading.Thread(target=show, args=(task, over), daemon=True)
    teller.start()
    try:
        yield task
    finally:
        over.set()
        teller.join()


def each(items: Iterable[T], what: str) -> Iterator[T]:
    """The items; progress is shown while the caller works on them."""
    counted = list(items)
    with progress(what, len(counted)) as task:
        for item in counted:
            yield item
            task.advance()


def _lines(task: Task, over: threading.Event) -> None:
    begin, pause = time.monotonic(), FIRST_S
    while not over.wait(pause):
        seconds, amount = time.monotonic() - begin, task.amount()
        print(f"{task.what}: {amount + ', ' if amount else ''}{seconds:.0f} s", file=sys.stderr, flush=True)
        pause = min(2 * pause, LONGEST_S)


class _Amount(ProgressColumn):
    def render(self, task: Row) -> Text:
        return Text(str(task.fields["amount"]))


def _bar(task: Task, over: threading.Event) -> None:
    if over.wait(FIRST_S / 4):
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), _Amount(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        row = bars.add_task(task.what, total=task.total or None, amount="")
        while not over.wait(0.2):
            bars.update(row, description=task.what, completed=task.done, amount=task.amount())
