"""Progress on stderr for work of more than two seconds: a bar on a terminal, else a line from time to time."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

T = TypeVar("T")
# the first line where stderr is a file; the time to the next one doubles
FIRST_S, LONGEST_S = 2.0, 60.0


class Task:
    """A running task: what runs now, how much of the total is done; bytes are shown as GB."""

    def __init__(self, bars: Progress, what: str, total: int, unit: str) -> None:
        self.what, self.done, self.total, self.unit = what, 0, total, unit
        self._bars, self._row = bars, bars.add_task(what, total=total or None)
        self._begin, self._pause = time.monotonic(), FIRST_S

    def advance(self, count: int = 1) -> None:
        """Add to the amount done."""
        self.done += count
        self.at(self.what)

    def at(self, what: str) -> None:
        """Name the work that runs now."""
        self.what, seconds = what, time.monotonic() - self._begin
        self._bars.update(self._row, description=what, completed=self.done, total=self.total or None)
        if self._bars.disable and seconds >= self._pause:
            self._pause = seconds + min(seconds, LONGEST_S)
            scale, unit = (1e9, "GB") if self.unit == "bytes" else (1, self.unit)
            amount = f"{self.done / scale:.3g} of {self.total / scale:.3g} {unit}".strip() + ", " if self.total else ""
            print(f"{what}: {amount}{seconds:.0f} s", file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, total: int = 0, unit: str = "") -> Iterator[Task]:
    """Show a task until the end of the block; `unit` names what `total` counts, a total of 0 is unknown."""
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bars:
        yield Task(bars, what, total, unit)


def each(items: Iterable[T], what: str) -> Iterator[T]:
    """The items; progress is shown while the caller works on them."""
    counted = list(items)
    with progress(what, len(counted)) as task:
        for item in counted:
            yield item
            task.advance()
