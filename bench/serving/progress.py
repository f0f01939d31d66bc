"""Live progress on stderr: how far each endpoint is, and its median figures so far."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from bench.serving.sample import Sample


class Live:
    """A bar for each endpoint and stage; the figures are medians of this stage's requests."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}
        self._samples: dict[str, list[Sample]] = {}

    def begin(self, stage: str, totals: dict[str, int]) -> None:
        """Start a stage of so many requests per endpoint."""
        self._samples = {variant: [] for variant in totals}
        self._tasks = {
            variant: self._progress.add_task(f"{stage:8} {variant}", total=total, figures="")
            for variant, total in totals.items()
            if total
        }

    def seen(self, sample: Sample) -> None:
        """Count a request and show the figures with it."""
        self._samples[sample.variant].append(sample)
        self._progress.update(self._tasks[sample.variant], advance=1, figures=figures(self._samples[sample.variant]))


def figures(samples: list[Sample]) -> str:
    """Medians in milliseconds, and the errors if there are any."""
    good = [s for s in samples if not s.error]
    itl = [s.itl_s for s in good if s.itl_s is not None]
    shown = []
    if good:
        shown.append(f"TTFT {1e3 * statistics.median(s.ttft_s for s in good):.0f} ms")
    if itl:
        shown.append(f"ITL {1e3 * statistics.median(itl):.2f} ms")
    if len(good) < len(samples):
        shown.append(f"[red]{len(samples) - len(good)} errors[/red]")
    return ", ".join(shown)


@contextmanager
def live() -> Iterator[Live]:
    """The bars, drawn while the context is open."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield Live(progress)
