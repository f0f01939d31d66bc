"""The list scheduler: runs prepared events through in-order engines and shared resources.

An event starts when it is at the head of its lane and its producers are done. Instructions are placed as soon as
that is known; transfers, the only events that share resources with other lanes, are placed in order of time.
A transfer is issued by its lane and later moves its data: one queue serves its transfers in
order, and queues that compete for an engine alternate.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from nkisim.timeline.chip import Chip
from nkisim.timeline.costs.dma import DmaCost
from nkisim.timeline.costs.engines import EngineCost, MatmulCost
from nkisim.timeline.program import Program
from nkisim.timeline.schedule_state import NO_EVENT, UNSCHEDULED, Core, Queue, TensorClock, Times


class StuckSchedule(ValueError):
    """The events wait for each other in a circle."""


class Machine:
    """The state of all engines of a launch while its events are placed in time."""

    def __init__(self, program: Program, chip: Chip, case: str) -> None:
        count, lanes = len(program.events), len(program.queues)
        self.program, self.n = program, chip.at(case)
        self.costs = program.costs[case]
        never = [UNSCHEDULED] * count
        self.times = Times(never[:], never[:], never[:], [NO_EVENT] * count, [False] * count)
        self.heads = [0] * lanes
        self.lane_free = [0.0] * lanes
        n = self.n
        # by signal: none, between cores, of a transfer, between engines; then the same at the end of reading
        self.delays = (0.0, n.core_semaphore_ns, n.dma_semaphore_ns, n.semaphore_ns) * 2
        self.ends = (self.times.end,) * 4 + (self.times.free,) * 4
        self.waiting: dict[int, list[int]] = {}
        # transfers to issue, and as ~event those whose data can move
        self.heap: list[tuple[float, int]] = []
        # the placed events and their times, a transfer's data as ~event
        self.order: list[int] = []
        self.tables: dict[int, list[str]] = {}
        # the part of the array that the last product used, by lane
        self.groups: dict[int, int] = {}
        self.clocks = {lane: TensorClock(n) for lane, (_, name) in enumerate(program.lanes) if name == "tensor"}
        stacks: dict[int, list[float]] = {}
        cores: dict[int, Core] = {}
        for core, _ in program.lanes:
            stack = stacks.setdefault(core // int(n.cores_per_hbm_stack), [0.0])
            cores.setdefault(core, Core(program.dma_engines, stack))
        self.queues = [Queue(cores[core]) for core, _ in program.lanes]

    def run(self) -> Times:
        """Place every event.

        Raises:
            StuckSchedule: explicit edges form a circle.
        """
        self._advance(list(range(len(self.queues))))
        while self.heap:
            time, event = heappop(self.heap)
            self.order.append(event)
            lane = self.program.lane_of[event if event >= 0 else ~event]
            queue, waits = self.queues[lane], len(self.queues[lane].pending)
            if event >= 0:
                self._execute(event, lane, time)
                self.heads[lane] += 1
            else:
                self._move(queue, time)
            # the first transfer that waits in the queue is new
            if queue.pending and (event < 0 or not waits):
                heappush(self.heap, (_movable(queue), ~queue.pending[0][0]))
            self._advance([lane] if event >= 0 else self.waiting.pop(~event, []))
        if UNSCHEDULED in self.times.end:
            stuck = [
                event for event, end in zip(self.program.events, self.times.end, strict=True) if end == UNSCHEDULED
            ][:4]
            names = ", ".join(f"{e.op} on core {e.core} ({e.line[0]}:{e.line[1]})" for e in stuck)
            raise StuckSchedule(f"these events wait for each other: {names}; remove one `after` edge")
        return self.times

    def _advance(self, lanes: list[int]) -> None:
        """Place ready instructions of these lanes and of the lanes that wait for them; offer transfers to the heap."""
        program, times = self.program, self.times
        while lanes:
            lane = lanes.pop()
            queue, at = program.queues[lane], self.heads[lane]
            while at < len(queue):
                event = queue[at]
                ready, blocker = self._last(program.links[event])
                weights, writer = self._last(program.weight_links.get(event, ()))
                if UNSCHEDULED in (ready, weights):
                    self.waiting.setdefault(blocker if ready == UNSCHEDULED else writer, []).append(lane)
                    break
                free = self.lane_free[lane]
                late = times.waited[event] = ready > free
                times.blocker[event] = blocker if late else queue[at - 1] if at else NO_EVENT
                times.start[event] = ready = max(ready, free)
                if isinstance(self.costs[event], DmaCost):
                    heappush(self.heap, (ready, event))
                    break
                self._execute(event, lane, ready)
                self.order.append(event)
                at += 1
                lanes += self.waiting.pop(event, ())
            self.heads[lane] = at

    def replay(self, order: list[int]) -> float:
        """The latest end if every event is placed as in an earlier run, in its order, with different numbers."""
        for event in order:
            if event < 0:
                queue = self.queues[self.program.lane_of[~event]]
                self._move(queue, _movable(queue))
            else:
                lane = self.program.lane_of[event]
                self._execute(event, lane, max(self.lane_free[lane], self._last(self.program.links[event])[0]))
        return max(self.times.end, default=0.0)

    def _last(self, links: Iterable[tuple[int, int]]) -> tuple[float, int]:
        """When the last of these producers is done, and which it is; an unplaced one never is."""
        ready, producer, ends, delays = 0.0, NO_EVENT, self.ends, self.delays
        for other, signal in links:
            time = ends[signal][other] + delays[signal]
            if time > ready:
                ready, producer = time, other
        return ready, producer

    def _execute(self, event: int, lane: int, ready: float) -> None:
        """Place an event whose operands and lane are ready: an instruction to its end, a transfer to its issue."""
        cost, times = self.costs[event], self.times
        if isinstance(cost, EngineCost):
            if cost.table:
                ready += self._table(event, lane, cost.table)
            times.end[event] = ready + cost.latency
            times.free[event] = ready + cost.pitch
        elif isinstance(cost, DmaCost):
            self._issue(event, cost, self.queues[lane], ready)
        else:
            self._multiply(event, cost, lane, ready)
        self.lane_free[lane] = times.free[event]

    def _table(self, event: int, lane: int, name: str) -> float:
        """The time to load a function's table, which is none if it is resident."""
        tables, load = self.tables.setdefault(lane, []), 0.0
        if name in tables:
            tables.remove(name)
        else:
            load = self.n.scalar_table_load_ns
            self.times.table_loads.add(event)
        tables.append(name)
        del tables[: -max(1, int(self.n.scalar_tables_resident))]
        return load

    def _multiply(self, event: int, cost: MatmulCost, lane: int, ready: float) -> None:
        """Load weights during the running multiply if they are there in time, then multiply."""
        n, times, clock = self.n, self.times, self.clocks[lane]
        weights_ready, producer = self._last(self.program.weight_links[event])
        # the load overlaps the running product; weights that come later are loaded in the open
        load = weights_ready if weights_ready > clock.multiply_start else clock.multiply_start
        exposed = n.tensor_load_exposed_ns if weights_ready >= self.lane_free[lane] else 0.0
        loaded = load + cost.load + exposed
        begin = loaded if loaded > ready else ready
        if weights_ready > ready:
            times.blocker[event], times.waited[event] = producer, True
        # a load that did not fit into the previous multiply belongs to this event
        times.start[event] = (load if load > ready else ready) if begin > ready else begin
        stream = cost.stream * cost.passes
        if cost.group >= 0:
            # products in different columns of the array overlap
            stream /= n.tensor_tiled_rate if cost.group == self.groups.get(lane) else n.tensor_rotated_rate
        self.groups[lane] = cost.group
        times.stream[event] = stream = clock.multiply(begin, stream, cost.rows_share)
        times.free[event] = done = begin + stream
        times.end[event] = done + n.tensor_drain_ns

    def _issue(self, event: int, cost: DmaCost, queue: Queue, ready: float) -> None:
        """Trigger a transfer and generate its descriptors; then its lane is free again."""
        triggered, generators = ready + cost.trigger, queue.core.generators
        due = generators.get(cost.generator, 0.0)
        begin = triggered if triggered > due - cost.ahead else due - cost.ahead
        generators[cost.generator] = (triggered if triggered > due else due) + cost.interval
        # a full generator holds the sequencer back
        earliest = begin - self.n.dma_generator_depth * cost.interval
        self.times.free[event] = max(earliest, triggered)
        queue.pending.append((event, cost, begin, begin + cost.lead))

    def _move(self, queue: Queue, now: float) -> None:
        """Move the data of a queue's first transfer through DMA engines and HBM."""
        event, cost, begin, data = queue.pending.popleft()
        core, queue_free, end, busy = queue.core, queue.free, now, 0.0
        # descriptors may come faster than an engine takes transfers from its ring
        engines, ring = core.engines, core.rings if cost.ring_interval else None
        for engine, time in cost.shares:
            free = engines[engine]
            start = free if free > now else now
            if ring:
                start = max(start, ring[engine])
                ring[engine] = start + cost.ring_interval
            engines[engine] = queue_free[engine] = done = start + time
            if done > end:
                end, busy = done, time
        queue.latest = end if end > queue.latest else queue.latest
        shared = 0.0
        if cost.hbm:
            free = core.stack[0]
            core.stack[0] = served = (free if free > now else now) + cost.hbm
            if served > end:
                shared, end = served - end, served
        self.times.end[event] = end + cost.tail
        self.times.moved[event] = begin, data, busy, shared, end


def _movable(queue: Queue) -> float:
    """When one of its engines can take the queue's first transfer."""
    _, cost, _, data = queue.pending[0]
    if queue.latest <= data:
        return data
    queue_free = queue.free
    free = min([queue_free[engine] for engine, _ in cost.shares])
    return free if free > data else data
