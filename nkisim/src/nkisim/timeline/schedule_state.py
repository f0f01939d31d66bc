"""The state that scheduling keeps: times per event, cores, DMA queues, and the tensor engine's clock."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from nkisim.timeline.chip import ResolvedSpec
from nkisim.timeline.costs.dma import DmaCost

NO_EVENT = -1
# the end of an event that has none yet
UNSCHEDULED = math.inf

# of a transfer: when its descriptors start, when its data may move at the earliest, how long they stream on the last
# engine, how long that waits for HBM, and when all is moved
Moved = tuple[float, float, float, float, float]


@dataclass(slots=True)
class Times:
    """Nanoseconds per event, and what delayed each event."""

    start: list[float]
    # the engine can take its next instruction
    free: list[float]
    end: list[float]
    # its lane's previous event, or a producer if that delayed it longer
    blocker: list[int]
    waited: list[bool]
    # how long a product streams, which its engine's clock decides
    stream: dict[int, float] = field(default_factory=dict)
    moved: dict[int, Moved] = field(default_factory=dict)
    table_loads: set[int] = field(default_factory=set)


class Core:
    """The shared resources of one core's queues: generators of descriptors, DMA engines, and the HBM stack."""

    __slots__ = ("engines", "generators", "rings", "stack")

    def __init__(self, engines: int, stack: list[float]) -> None:
        # when each generator is free, by name
        self.generators: dict[str, float] = {}
        # when each DMA engine is free
        self.engines = [0.0] * engines
        # when each engine takes the next transfer from the ring that software fills
        self.rings = self.engines[:]
        # when the stack is free: one number, which all its cores hold
        self.stack = stack


class Queue:
    """A DMA queue: issued transfers in order, and when each engine is done with the last one."""

    __slots__ = ("core", "free", "latest", "pending")

    def __init__(self, core: Core) -> None:
        self.core = core
        # (event, its cost, start of descriptor generation, earliest start of data)
        self.pending: deque[tuple[int, DmaCost, float, float]] = deque()
        self.free = [0.0] * len(core.engines)
        # when the last of them is done
        self.latest = 0.0


class TensorClock:
    """The tensor engine's power throttle: full clock once most of a window's rows were busy, until few of them are."""

    __slots__ = ("cool", "lift", "multiply_start", "slowdown", "spans", "warm", "window", "work")

    def __init__(self, n: ResolvedSpec) -> None:
        # (start, stop, share of the rows)
        self.spans: deque[tuple[float, float, float]] = deque()
        self.work = 0.0
        self.multiply_start = 0.0
        self.window: float = n.tensor_throttle_window_ns
        self.slowdown = 1.0 / n.tensor_throttle_share
        self.warm = False
        # the work in a window that lifts the limit, and that below which it is back
        self.lift: float = n.tensor_lift_work * n.tensor_throttle_window_ns
        self.cool: float = n.tensor_throttle_work * n.tensor_throttle_window_ns

    def multiply(self, start: float, stream: float, rows: float) -> float:
        """How long a multiply streams that starts now, needs `stream` at full clock and keeps a share of rows busy."""
        spans, work = self.spans, self.work
        if self.slowdown > 1.0:
            since = start - self.window
            while spans and spans[0][1] <= since:
                first, last, busy = spans.popleft()
                work -= (last - first) * busy
            seen = work
            if spans and spans[0][0] < since:
                seen -= (since - spans[0][0]) * spans[0][2]
            self.warm = seen >= (self.cool if self.warm else self.lift)
            if not self.warm:
                stream *= self.slowdown
        stop = start + stream
        spans.append((start, stop, rows))
        self.work = work + (stop - start) * rows
        self.multiply_start = start
        return stream
