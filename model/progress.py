"""Progress on stderr for work of more than two seconds: a bar on a terminal, else a line from time to time."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress

T = TypeVar("T")
# the first line where stderr is a file; the time to the next one doubles
FIRST_S, LONGEST_S = 2.0, 60.0


class Task:
    """A running task: what runs now, and how much of a total is done; bytes are shown as GB."""

    def __init__(self, bars: Progress, what: str, total: int, unit: str) -> None:
        self._bars, self._unit, self._next_s = bars, unit, FIRST_S
        self._row = bars.add_task(what, total=total or None)

    def advance(self, count: int = 1, **changes: Any) -> None:
        """Add to the amount done; `changes` are a new `description` or `total`."""
        self._bars.update(self._row, advance=count, **changes)
        task = self._bars.tasks[self._row]
        seconds, total = task.elapsed or 0.0, task.total
        if self._bars.disable and seconds >= self._next_s:
            self._next_s = seconds + min(seconds, LONGEST_S)
            scale, unit = (1e9, "GB") if self._unit == "bytes" else (1, self._unit)
            amount = f"{task.completed / scale:.3g} of {total / scale:.3g} {unit}".strip() + ", " if total else ""
            print(f"{task.description}: {amount}{seconds:.0f} s", file=sys.stderr, flush=True)


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
