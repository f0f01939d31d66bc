"""The state that scheduling keeps: times per event, DMA queues, and the tensor engine's clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

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

    __slots__ = ("free", "pending")

    def __init__(self, free: list[float]) -> None:
        # (event, start of descriptor generation, earliest start of data)
        self.pending: deque[tuple[int, float, float]] = deque()
        self.free = free


class TensorClock:
    """The tensor engine's power throttle: slow until it was busy for half of the last window."""

    __slots__ = ("busy", "multiply_start", "share", "spans", "utilisation", "window")

    def __init__(self, n: SimpleNamespace) -> None:
        self.spans: deque[tuple[float, float]] = deque()
        self.busy = 0.0
        self.multiply_start = 0.0
        self.window: float = n.tensor_throttle_window_ns
        self.share: float = n.tensor_throttle_share
        self.utilisation: float = n.tensor_throttle_utilisation

    def slowdown(self, now: float) -> float:
        """How many times longer a multiply takes that starts now."""
        if self.share >= 1.0:
            return 1.0
        since = now - self.window
        spans = self.spans
        while spans and spans[0][1] <= since:
            start, stop = spans.popleft()
            self.busy -= stop - start
        partial = max(0.0, since - spans[0][0]) if spans else 0.0
        return 1.0 if self.busy - partial >= self.utilisation * self.window else 1.0 / self.share

    def multiply(self, start: float, stop: float) -> None:
        """Record one multiply."""
        self.spans.append((start, stop))
        self.busy += stop - start
        self.multiply_start = start
