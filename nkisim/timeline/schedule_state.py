"""The state that scheduling keeps: times per event, DMA queues, and the tensor engine's clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from nkisim.timeline.chip import Numbers

NOBODY = -1
# who made an event wait: nobody or its lane's previous event, or a producer
IN_ORDER, DATA = 0, 1


class Transfer(NamedTuple):
    """Where the nanoseconds of one transfer go, and when its last share of data starts to move."""

    generator: float
    engines: float
    fixed: float
    data: float
    shared: float
    moving: float


@dataclass(slots=True)
class Times:
    """Nanoseconds per event, and who held each event back."""

    start: list[float]
    # the engine can take its next instruction
    free: list[float]
    end: list[float]
    stream: list[float]
    blocker: list[int]
    reason: list[int]
    transfer: dict[int, Transfer]
    table_loads: set[int]


class Queue:
    """A DMA queue: issued transfers in order, and when each engine is done with the last one."""

    __slots__ = ("free", "latest", "pending")

    def __init__(self, free: list[float]) -> None:
        # (event, start of descriptor generation, earliest start of data)
        self.pending: deque[tuple[int, float, float]] = deque()
        self.free = free
        # when the last of them is done
        self.latest = 0.0


class TensorClock:
    """The tensor engine's power throttle: slow until half of the last window's rows were busy."""

    __slots__ = ("multiply_start", "needed", "share", "spans", "window", "work")

    def __init__(self, n: Numbers) -> None:
        # (start, stop, share of the rows)
        self.spans: deque[tuple[float, float, float]] = deque()
        self.work = 0.0
        self.multiply_start = 0.0
        self.window: float = n.tensor_throttle_window_ns
        self.share: float = n.tensor_throttle_share
        # more than the half, so that 64 rows without a pause stay slow
        self.needed: float = n.tensor_throttle_work * n.tensor_throttle_window_ns * (1 + 1e-9)

    def multiply(self, start: float, stream: float, rows: float) -> float:
        """How long a multiply streams that starts now, needs `stream` at full clock and keeps a share of rows busy."""
        spans = self.spans
        if self.share < 1.0:
            since = start - self.window
            while spans and spans[0][1] <= since:
                first, last, busy = spans.popleft()
                self.work -= (last - first) * busy
            work = self.work
            if spans and spans[0][0] < since:
                work -= (since - spans[0][0]) * spans[0][2]
            if work < self.needed:
                stream *= 1.0 / self.share
        stop = start + stream
        spans.append((start, stop, rows))
        self.work += (stop - start) * rows
        self.multiply_start = start
        return stream
