"""Every finished request as a JSON row, written at once: an interrupted run keeps what it measured."""

from __future__ import annotations

import json
from typing import IO

from bench.serving.run import Shown
from bench.serving.sample import Sample


class RowLog:
    """Passes on what it is told, after it has written it down; `stage` tells the load from what came before it."""

    def __init__(self, file: IO[str], shown: Shown) -> None:
        self._file, self._shown = file, shown
        self._stage = ""

    def begin(self, stage: str, totals: dict[str, int]) -> None:
        self._stage = stage
        self._shown.begin(stage, totals)

    def seen(self, sample: Sample) -> None:
        self._file.write(json.dumps({"stage": self._stage} | sample.row(), ensure_ascii=False) + "\n")
        self._file.flush()
        self._shown.seen(sample)
