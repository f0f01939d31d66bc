"""Progress on stderr: a bar on a terminal; otherwise lines, the first one after 2 s."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress

T = TypeVar("T")
# seconds until the first line, and the longest interval; intervals double
FIRST_S, LONGEST_S = 2.0, 60.0


class Task:
    """A running task with a description and an amount done; bytes are shown as GB."""

    def __init__(self, bars: Progress, what: str, total: int, unit: str) -> None:
        self._bars, self._unit, self._next_s = bars, unit, FIRST_S
        self._row = bars.add_task(what, total=total or None)

    def advance(self, count: int = 1, **changes: Any) -> None:
        """Adds `count` to the amount done; `changes` may set `description` or `total`."""
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
    """Shows a task until the block ends. `unit` is that of `total`; a total of 0 is unknown."""
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bars:
        yield Task(bars, what, total, unit)


def each(items: Iterable[T], what: str) -> Iterator[T]:
    """Yields the items and shows progress while the caller works on them."""
    counted = list(items)
    with progress(what, len(counted)) as task:
        for item in counted:
            yield item
            task.advance()
