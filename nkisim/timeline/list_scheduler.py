"""The list scheduler: runs prepared events through in-order engines and shared resources.

An event starts when it is at the head of its lane and its producers are done. Lanes advance in
order of time, so that the DMA engines and HBM see transfers in the order in which they start.
A transfer is issued by its lane and later moves its data: one queue serves its transfers in
order, and queues that compete for an engine alternate.
"""

from __future__ import annotations

from heapq import heappop, heappush

from nkisim.timeline.chip import Chip
from nkisim.timeline.costs.dma import DmaCost
from nkisim.timeline.costs.engines import EngineCost, MatmulCost
from nkisim.timeline.program import Link, Program
from nkisim.timeline.schedule_state import DATA, IN_ORDER, NOBODY, Queue, TensorClock, Times, Transfer


class StuckSchedule(ValueError):
    """The events wait for each other in a circle."""


class Machine:
    """The state of all engines of a launch while its events are placed in time."""

    def __init__(self, program: Program, chip: Chip, case: str) -> None:
        count = len(program.events)
        self.program, self.n = program, chip.at(case)
        self.costs = program.costs[case]
        zeros = [0.0] * count
        self.times = Times(zeros[:], zeros[:], zeros[:], zeros[:], [NOBODY] * count, [IN_ORDER] * count, {}, set())
        self.done = bytearray(count)
        lanes = len(program.queues)
        self.heads = [0] * lanes
        self.lane_free = [0.0] * lanes
        # by signal: none, between cores, of a transfer, between engines
        n = self.n
        self.delays = (0.0, n.core_semaphore_ns, n.dma_semaphore_ns, n.semaphore_ns)
        self.waiting: dict[int, list[int]] = {}
        self.heap: list[tuple[float, int]] = []
        # what was placed when, a transfer's data as ~event
        self.order: list[int] = []
        self.tables: dict[int, list[str]] = {}
        self.pe: dict[int, TensorClock] = {}
        self.generators: dict[tuple[int, str], float] = {}
        self.queues: dict[int, Queue] = {}
        # when each engine takes the next transfer from the ring that software fills, by core
        self.rings: dict[int, list[float]] = {}
        self.engines: dict[int, list[float]] = {}
        self.hbm_free: dict[int, float] = {}

    def run(self) -> Times:
        """Place every event.

        Raises:
            StuckSchedule: explicit edges form a circle.
        """
        for lane in range(len(self.heads)):
            self._offer(lane)
        heap, lane_of, free = self.heap, self.program.lane_of, self.times.free
        while heap:
            time, event = heappop(heap)
            self.order.append(event)
            if event < 0:
                self._move(~event, time)
                queue = self.queues[lane_of[~event]]
                if queue.pending:
                    heappush(heap, (self._movable(queue), ~queue.pending[0][0]))
                self._finish(~event)
                continue
            if self._place(event, time):
                self._finish(event)
            else:
                queue = self.queues[lane_of[event]]
                if len(queue.pending) == 1:
                    heappush(heap, (self._movable(queue), ~event))
            lane = lane_of[event]
            self.lane_free[lane] = free[event]
            self.heads[lane] += 1
            self._offer(lane)
        if not all(self.done):
            stuck = [self.program.events[i] for i, done in enumerate(self.done) if not done][:4]
            names = ", ".join(f"{e.op} on core {e.core} ({e.line[0]}:{e.line[1]})" for e in stuck)
            raise StuckSchedule(f"these events wait for each other: {names}; remove one `after` edge")
        return self.times

    def replay(self, order: list[int]) -> Times:
        """Place every event as an earlier run did, in its order: the same program with different numbers."""
        program, times, lane_free = self.program, self.times, self.lane_free
        lane_of, free, end, links, delays = program.lane_of, times.free, times.end, program.links, self.delays
        self.done = bytearray(b"\x01") * len(lane_of)
        for event in order:
            if event < 0:
                self._move(~event, self._movable(self.queues[lane_of[~event]]))
                continue
            lane = lane_of[event]
            ready = lane_free[lane]
            # the producers are all placed
            for other, early, signal in links[event]:
                time = (free[other] if early else end[other]) + delays[signal]
                ready = time if time > ready else ready
            self._place(event, ready)
            lane_free[lane] = free[event]
        return times

    def _place(self, event: int, ready: float) -> bool:
        """Start one event; False for a transfer, whose end is known when its data have moved."""
        cost = self.costs[event]
        kind = cost.__class__
        if kind is EngineCost:
            self._place_instruction(event, ready, cost)  # type: ignore[arg-type]
        elif kind is MatmulCost:
            self._place_matmul(event, ready, cost)  # type: ignore[arg-type]
        else:
            self._issue(event, ready, cost)  # type: ignore[arg-type]
            return False
        return True

    def _finish(self, event: int) -> None:
        """The event's end is known: look again at the lanes that wait for it."""
        self.done[event] = 1
        for blocked in self.waiting.pop(event, ()):
            self._offer(blocked)

    def _offer(self, lane: int) -> None:
        """Put the lane's head on the heap, or note whom it waits for."""
        queue, at = self.program.queues[lane], self.heads[lane]
        if at >= len(queue):
            return
        event = queue[at]
        latest = self.program.latest[event]
        if latest >= 0 and not self.done[latest]:
            self.waiting.setdefault(latest, []).append(lane)
            return
        free = self.lane_free[lane]
        ready, blocker = self._ready(self.program.links[event])
        if blocker != NOBODY and ready < 0:
            self.waiting.setdefault(blocker, []).append(lane)
            return
        weights = self.program.weight_links.get(event)
        if weights:
            known, other = self._ready(weights)
            if other != NOBODY and known < 0:
                self.waiting.setdefault(other, []).append(lane)
                return
        times = self.times
        if ready > free:
            times.blocker[event], times.reason[event] = blocker, DATA
        else:
            ready = free
            times.blocker[event] = queue[at - 1] if at else NOBODY
        heappush(self.heap, (ready, event))

    def _ready(self, links: tuple[Link, ...]) -> tuple[float, int]:
        """When the producers allow a start, and the last one; (-1, producer) if one has no end."""
        ready, blocker = 0.0, NOBODY
        done, free, end, delays = self.done, self.times.free, self.times.end, self.delays
        for other, early, signal in links:
            if not done[other]:
                return -1.0, other
            time = (free if early else end)[other] + delays[signal]
            if time > ready:
                ready, blocker = time, other
        return ready, blocker

    def _place_instruction(self, event: int, ready: float, cost: EngineCost) -> None:
        times = self.times
        times.start[event], times.stream[event] = ready, cost.stream
        if cost.table:
            tables = self.tables.setdefault(self.program.lane_of[event], [])
            if cost.table in tables:
                tables.remove(cost.table)
            else:
                ready += self.n.scalar_table_load_ns
                times.table_loads.add(event)
            tables.append(cost.table)
            del tables[: -max(1, int(self.n.scalar_tables_resident))]
        times.free[event] = ready + cost.pitch
        times.end[event] = ready + cost.latency

    def _place_matmul(self, event: int, ready: float, cost: MatmulCost) -> None:
        """Load weights behind the previous multiply if they are there in time, then multiply."""
        lane, n, times = self.program.lane_of[event], self.n, self.times
        clock = self.pe.get(lane)
        if clock is None:
            clock = self.pe[lane] = TensorClock(n)
        weights = self.program.weight_links[event]
        weights_ready, producer = self._ready(weights) if weights else (0.0, NOBODY)
        # the load hides behind the running product; weights that come later are loaded in the open
        load = max(weights_ready, clock.multiply_start)
        exposed = n.tensor_load_exposed_ns if weights_ready >= self.lane_free[lane] else 0.0
        begin = max(ready, load + cost.load + exposed)
        slowdown = clock.slowdown(begin)
        stream = cost.stream * slowdown * cost.passes
        if weights_ready > ready:
            times.blocker[event], times.reason[event] = producer, DATA
        # a load that did not fit behind the previous multiply belongs to this event
        times.start[event] = max(ready, load) if begin > ready else begin
        times.stream[event] = stream
        times.free[event] = begin + stream
        times.end[event] = begin + stream + n.tensor_drain_ns
        clock.multiply(begin, begin + stream, cost.rows_share)

    def _issue(self, event: int, ready: float, cost: DmaCost) -> None:
        """Trigger a transfer and generate its descriptors."""
        source, times = self.program.events[event], self.times
        generator = (source.core, cost.generator)
        begin = max(ready + cost.trigger, self.generators.get(generator, 0.0))
        self.generators[generator] = begin + cost.interval
        # a full generator holds the sequencer back
        behind = begin - self.n.dma_generator_depth * cost.interval
        times.start[event], times.free[event] = ready, max(ready + cost.trigger, behind)
        lane = self.program.lane_of[event]
        queue = self.queues.get(lane)
        if queue is None:
            # negative indices: the gpsimd engine's own dma and the links between chips
            queue = self.queues[lane] = Queue([0.0] * (int(self.n.dma_engines) + 2))
        queue.pending.append((event, begin, begin + cost.lead))

    def _movable(self, queue: Queue) -> float:
        """When one of its engines can take the queue's first transfer."""
        event, _, data = queue.pending[0]
        own = queue.free
        cost: DmaCost = self.costs[event]  # type: ignore[assignment]
        first, stop, _ = cost.block
        free = min(own[first:stop]) if stop else min([own[engine] for engine, _ in cost.shares])
        return free if free > data else data

    def _move(self, event: int, now: float) -> None:
        """Move the data of one transfer through its engines and HBM."""
        cost, source, times, n = self.costs[event], self.program.events[event], self.times, self.n
        assert isinstance(cost, DmaCost)
        queue = self.queues[self.program.lane_of[event]]
        _, begin, data = queue.pending.popleft()
        engines = self.engines.get(source.core)
        if engines is None:
            engines = self.engines[source.core] = [0.0] * len(queue.free)
        end, busy, own = now, 0.0, queue.free
        first, stop, time = cost.block
        if cost.pace:
            end, busy = self._move_paced(cost, source.core, queue, now)
        elif stop:
            held = engines[first:stop]
            latest = max(held)
            if latest <= now:
                latest = now + time
                ends = [latest] * (stop - first)
            else:
                ends = [(free if free > now else now) + time for free in held]
                latest += time
            engines[first:stop] = own[first:stop] = ends
            if latest > now:
                end, busy = latest, time
        else:
            for engine, time in cost.shares:
                free = engines[engine]
                done = (free if free > now else now) + time
                engines[engine] = own[engine] = done
                if done > end:
                    end, busy = done, time
        shared = 0.0
        if cost.hbm:
            stack = source.core // int(n.cores_per_hbm_stack)
            served = max(self.hbm_free.get(stack, 0.0), now) + cost.hbm
            self.hbm_free[stack] = served
            if served > end:
                shared, end = served - end, served
        times.stream[event], times.end[event] = busy, end + cost.tail
        fixed = cost.trigger + cost.lead + cost.tail
        waited = begin - times.start[event] - cost.trigger
        engine_wait = end - data - busy - shared
        moving = end - shared - busy
        times.transfer[event] = Transfer(waited, engine_wait, fixed, busy, shared, moving)

    def _move_paced(self, cost: DmaCost, core: int, queue: Queue, now: float) -> tuple[float, float]:
        """Move data whose descriptors come faster than an engine takes transfers from its ring: end, and data phase."""
        engines, end, busy = self.engines[core], now, 0.0
        ring = self.rings.setdefault(core, [0.0] * len(engines))
        for engine, time in cost.shares:
            start = max(engines[engine], ring[engine], now)
            ring[engine] = start + cost.pace
            engines[engine] = queue.free[engine] = start + time
            if start + time > end:
                end, busy = start + time, time
        return end, busy
