"""A few threads for work that releases the interpreter's lock: the work of one lane runs in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

# bytes of work that may wait for a thread, and that memory must hold
AHEAD_BYTES = 128 << 20
THREADS = min(4, os.cpu_count() or 1)


class Lanes:
    """Work on blocks of memory. `give` waits while too much is queued; `give` and `drain` raise the work's errors."""

    def __init__(self) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(THREADS)]
        self._waiting = deque[tuple[Future[object], int]]()
        self._bytes = 0

    def give(self, lane: int, size: int, work: Callable[[], object]) -> None:
        """Queue work on `size` bytes behind the lane's earlier work."""
        self._waiting.append((self._threads[lane % len(self._threads)].submit(work), size))
        self._bytes += size
        while self._bytes > AHEAD_BYTES:
            self._wait()

    def drain(self) -> None:
        """Wait until all is done."""
        while self._waiting:
            self._wait()

    def _wait(self) -> None:
        done, size = self._waiting.popleft()
        done.result()
        self._bytes -= size

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)
