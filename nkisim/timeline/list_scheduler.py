"""The list scheduler: runs prepared events through in-order engines and shared resources.

An event starts when it is at the head of its lane and its producers are done. Instructions are placed as soon as
that is known; transfers, which alone share what they use with other lanes, are placed in order of time.
A transfer is issued by its lane and later moves its data: one queue serves its transfers in
order, and queues that compete for an engine alternate.
"""

from __future__ import annotations

from heapq import heappop, heappush

from nkisim.timeline.chip import Chip
from nkisim.timeline.costs.dma import DmaCost
from nkisim.timeline.costs.engines import EngineCost, MatmulCost
from nkisim.timeline.program import Program
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
        # transfers to issue, and as ~event those whose data can move
        self.heap: list[tuple[float, int]] = []
        # what was placed when, a transfer's data as ~event
        self.order: list[int] = []
        # whether only ends are of interest
        self.replaying = False
        self.tables: dict[int, list[str]] = {}
        self.clocks = {lane: TensorClock(n) for lane, (_, name) in enumerate(program.lanes) if name == "tensor"}
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
        heap, lane_of = self.heap, self.program.lane_of
        self._advance(list(range(len(self.heads))))
        while heap:
            time, event = heappop(heap)
            self.order.append(event)
            lane = lane_of[event if event >= 0 else ~event]
            if event >= 0:
                self._issue(event, time, self.costs[event])  # type: ignore[arg-type]
                queue = self.queues[lane]
                if len(queue.pending) == 1:
                    heappush(heap, (self._movable(queue), ~event))
                self.lane_free[lane] = self.times.free[event]
                self.heads[lane] += 1
                self._advance([lane])
                continue
            self._move(~event, time)
            queue = self.queues[lane]
            if queue.pending:
                heappush(heap, (self._movable(queue), ~queue.pending[0][0]))
            self.done[~event] = 1
            if ~event in self.waiting:
                self._advance(self.waiting.pop(~event))
        if not all(self.done):
            stuck = [self.program.events[i] for i, done in enumerate(self.done) if not done][:4]
            names = ", ".join(f"{e.op} on core {e.core} ({e.line[0]}:{e.line[1]})" for e in stuck)
            raise StuckSchedule(f"these events wait for each other: {names}; remove one `after` edge")
        return self.times

    def _advance(self, lanes: list[int]) -> None:
        """Place what can run in these lanes and in those that wait for it; offer the transfers at their heads."""
        program, times, done, waiting, delays = self.program, self.times, self.done, self.waiting, self.delays
        links, weights, latest, costs, order = (
            program.links,
            program.weight_links,
            program.latest,
            self.costs,
            self.order,
        )
        start, free, end, blocker_of = times.start, times.free, times.end, times.blocker
        while lanes:
            lane = lanes.pop()
            queue, at, lane_free = program.queues[lane], self.heads[lane], self.lane_free[lane]
            stop = len(queue)
            while at < stop:
                event = queue[at]
                missing = latest[event]
                if missing < 0 or done[missing]:
                    ready, blocker, missing = 0.0, NOBODY, NOBODY
                    for other, early, signal in links[event]:
                        if not done[other]:
                            missing = other
                            break
                        time = (free if early else end)[other] + delays[signal]
                        if time > ready:
                            ready, blocker = time, other
                    if event in weights and missing < 0:
                        missing = next((other for other, _, _ in weights[event] if not done[other]), NOBODY)
                if missing >= 0:
                    waiting.setdefault(missing, []).append(lane)
                    break
                if ready > lane_free:
                    blocker_of[event], times.reason[event] = blocker, DATA
                else:
                    ready = lane_free
                    blocker_of[event] = queue[at - 1] if at else NOBODY
                cost = costs[event]
                if cost.__class__ is EngineCost:
                    start[event] = ready
                    lane_free = self._instruction(event, lane, ready, cost)  # type: ignore[arg-type]
                elif cost.__class__ is MatmulCost:
                    lane_free = self._multiply(event, ready, lane_free, cost)  # type: ignore[arg-type]
                else:
                    heappush(self.heap, (ready, event))
                    break
                order.append(event)
                done[event] = 1
                at += 1
                if event in waiting:
                    lanes += waiting.pop(event)
            self.heads[lane], self.lane_free[lane] = at, lane_free

    def replay(self, order: list[int]) -> float:
        """The latest end if every event is placed as in an earlier run, in its order, with different numbers."""
        program, times, lane_free, costs = self.program, self.times, self.lane_free, self.costs
        lane_of, free, end, links, delays = program.lane_of, times.free, times.end, program.links, self.delays
        self.replaying = True
        for event in order:
            if event < 0:
                self._move(~event, self._movable(self.queues[lane_of[~event]]))
                continue
            lane = lane_of[event]
            ready = since = lane_free[lane]
            # the producers are all placed
            for other, early, signal in links[event]:
                time = (free if early else end)[other] + delays[signal]
                if time > ready:
                    ready = time
            cost = costs[event]
            if cost.__class__ is EngineCost:
                lane_free[lane] = self._instruction(event, lane, ready, cost)  # type: ignore[arg-type]
            elif cost.__class__ is MatmulCost:
                lane_free[lane] = self._multiply(event, ready, since, cost)  # type: ignore[arg-type]
            else:
                self._issue(event, ready, cost)  # type: ignore[arg-type]
                lane_free[lane] = free[event]
        return max(end, default=0.0)

    def _instruction(self, event: int, lane: int, ready: float, cost: EngineCost) -> float:
        """Run one instruction; when its engine is free again."""
        times = self.times
        if cost.table:
            tables = self.tables.setdefault(lane, [])
            if cost.table in tables:
                tables.remove(cost.table)
            else:
                ready += self.n.scalar_table_load_ns
                times.table_loads.add(event)
            tables.append(cost.table)
            del tables[: -max(1, int(self.n.scalar_tables_resident))]
        times.stream[event] = cost.stream
        times.end[event] = ready + cost.latency
        times.free[event] = free = ready + cost.pitch
        return free

    def _multiply(self, event: int, ready: float, lane_free: float, cost: MatmulCost) -> float:
        """Load weights behind the running multiply if they are there in time, then multiply; when the engine is free."""
        n, times, clock = self.n, self.times, self.clocks[self.program.lane_of[event]]
        free, end, delays = times.free, times.end, self.delays
        weights_ready, producer = 0.0, NOBODY
        for other, early, signal in self.program.weight_links[event]:
            time = (free if early else end)[other] + delays[signal]
            if time > weights_ready:
                weights_ready, producer = time, other
        # the load hides behind the running product; weights that come later are loaded in the open
        load = weights_ready if weights_ready > clock.multiply_start else clock.multiply_start
        exposed = n.tensor_load_exposed_ns if weights_ready >= lane_free else 0.0
        loaded = load + cost.load + exposed
        begin = loaded if loaded > ready else ready
        stream = cost.stream * clock.slowdown(begin) * cost.passes
        if weights_ready > ready:
            times.blocker[event], times.reason[event] = producer, DATA
        # a load that did not fit behind the previous multiply belongs to this event
        times.start[event] = max(ready, load) if begin > ready else begin
        times.stream[event] = stream
        free[event] = done = begin + stream
        end[event] = done + n.tensor_drain_ns
        clock.multiply(begin, done, cost.rows_share)
        return done

    def _issue(self, event: int, ready: float, cost: DmaCost) -> None:
        """Trigger a transfer and generate its descriptors."""
        program, times, triggered = self.program, self.times, ready + cost.trigger
        generator = (program.events[event].core, cost.generator)
        begin = max(triggered, self.generators.get(generator, 0.0))
        self.generators[generator] = begin + cost.interval
        # a full generator holds the sequencer back
        behind = begin - self.n.dma_generator_depth * cost.interval
        times.start[event], times.free[event] = ready, max(triggered, behind)
        lane = program.lane_of[event]
        queue = self.queues.get(lane)
        if queue is None:
            # negative indices: the gpsimd engine's own dma and the links between chips
            queue = self.queues[lane] = Queue([0.0] * (int(self.n.dma_engines) + 2))
        queue.pending.append((event, begin, begin + cost.lead))

    def _movable(self, queue: Queue) -> float:
        """When one of its engines can take the queue's first transfer."""
        event, _, data = queue.pending[0]
        own = queue.free
        if queue.latest <= data:
            return data
        cost: DmaCost = self.costs[event]  # type: ignore[assignment]
        first, stop, _ = cost.block
        free = min(own[first:stop]) if stop else min([own[engine] for engine, _ in cost.shares])
        return free if free > data else data

    def _move(self, event: int, now: float) -> None:
        """Move the data of one transfer through its engines and HBM."""
        cost: DmaCost = self.costs[event]  # type: ignore[assignment]
        core, times = self.program.events[event].core, self.times
        queue = self.queues[self.program.lane_of[event]]
        _, begin, data = queue.pending.popleft()
        if core not in self.engines:
            self.engines[core] = [0.0] * len(queue.free)
        end, busy = self._through_engines(cost, core, queue, now)
        if end > queue.latest:
            queue.latest = end
        shared = 0.0
        if cost.hbm:
            stack = core // int(self.n.cores_per_hbm_stack)
            served = max(self.hbm_free.get(stack, 0.0), now) + cost.hbm
            self.hbm_free[stack] = served
            if served > end:
                shared, end = served - end, served
        times.end[event] = end + cost.tail
        if self.replaying:
            return
        times.stream[event] = busy
        fixed = cost.trigger + cost.lead + cost.tail
        waited = begin - times.start[event] - cost.trigger
        engine_wait = end - data - busy - shared
        moving = end - shared - busy
        times.transfer[event] = Transfer(waited, engine_wait, fixed, busy, shared, moving)

    def _through_engines(self, cost: DmaCost, core: int, queue: Queue, now: float) -> tuple[float, float]:
        """Occupy the engines that serve a transfer: when the last of them is done, and how long its data took it."""
        engines, own, end, busy = self.engines[core], queue.free, now, 0.0
        first, stop, time = cost.block
        if stop:
            held = engines[first:stop]
            latest = max(held)
            if latest <= now:
                latest = now + time
                ends = [latest] * (stop - first)
            else:
                ends = [(free if free > now else now) + time for free in held]
                latest += time
            engines[first:stop] = own[first:stop] = ends
            return (latest, time) if latest > now else (end, busy)
        # descriptors may come faster than an engine takes transfers from its ring
        ring = self.rings.setdefault(core, [0.0] * len(engines)) if cost.pace else None
        for engine, time in cost.shares:
            free = engines[engine]
            start = free if free > now else now
            if ring:
                start = max(start, ring[engine])
                ring[engine] = start + cost.pace
            engines[engine] = own[engine] = done = start + time
            if done > end:
                end, busy = done, time
        return end, busy
