"""The end of a process that another process started."""

from __future__ import annotations

import time
from pathlib import Path


def runs(process: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    return "State:\tZ" not in status


def check_end(process: int, seconds: float) -> None:
    """AssertionError unless the process ends within so many seconds."""
    limit = time.monotonic() + seconds
    while runs(process):
        assert time.monotonic() < limit, f"process {process} outlived the one that started it"
        time.sleep(0.05)
