"""The list scheduler: runs prepared events through in-order engines and shared resources.

An event starts when it is at the head of its lane and its producers are done. Instructions are placed as soon as
that is known; transfers, which alone share what they use with other lanes, are placed in order of time.
A transfer is issued by its lane and later moves its data: one queue serves its transfers in
order, and queues that compete for an engine alternate.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from nkisim.timeline.chip import Chip
from nkisim.timeline.costs.dma import DmaCost
from nkisim.timeline.costs.engines import EngineCost, MatmulCost
from nkisim.timeline.program import AnyCost, Program
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
        # negative indices: the gpsimd engine's own dma and the links between chips
        engines = [0.0] * (int(n.dma_engines) + 2)
        self.cores = [core for core, _ in program.lanes]
        self.queues = [Queue(engines[:]) for _ in range(lanes)]
        # when each engine takes the next transfer from the ring that software fills, by core
        self.rings = {core: list(engines) for core in self.cores}
        self.engines = {core: list(engines) for core in self.cores}
        # when the last of a core's engines is done
        self.latest = dict.fromkeys(self.cores, 0.0)
        self.stacks = {core: core // int(n.cores_per_hbm_stack) for core in self.cores}
        self.hbm_free = dict.fromkeys(self.stacks.values(), 0.0)

    def run(self) -> Times:
        """Place every event.

        Raises:
            StuckSchedule: explicit edges form a circle.
        """
        heap, lane_of = self.heap, self.program.lane_of
        advance = self._advancer()
        advance(list(range(len(self.heads))))
        while heap:
            time, event = heappop(heap)
            self.order.append(event)
            lane = lane_of[event if event >= 0 else ~event]
            if event >= 0:
                self.lane_free[lane] = self._place(event, lane, time, self.costs[event])
                queue = self.queues[lane]
                if len(queue.pending) == 1:
                    heappush(heap, (self._movable(queue), ~event))
                self.heads[lane] += 1
                advance([lane])
                continue
            self._move(~event, time)
            queue = self.queues[lane]
            if queue.pending:
                heappush(heap, (self._movable(queue), ~queue.pending[0][0]))
            self.done[~event] = 1
            if ~event in self.waiting:
                advance(self.waiting.pop(~event))
        if not all(self.done):
            stuck = [self.program.events[i] for i, done in enumerate(self.done) if not done][:4]
            names = ", ".join(f"{e.op} on core {e.core} ({e.line[0]}:{e.line[1]})" for e in stuck)
            raise StuckSchedule(f"these events wait for each other: {names}; remove one `after` edge")
        return self.times

    def _advancer(self) -> Callable[[list[int]], None]:
        """A function that places what can run in some lanes and in those that wait for it, and offers transfers."""
        program, times, done, waiting, delays = self.program, self.times, self.done, self.waiting, self.delays
        links, weights, latest, queues = program.links, program.weight_links, program.latest, program.queues
        free, end, blockers, costs, order = times.free, times.end, times.blocker, self.costs, self.order
        heads, lane_free, place = self.heads, self.lane_free, self._place

        def advance(lanes: list[int]) -> None:
            while lanes:
                lane = lanes.pop()
                queue, at = queues[lane], heads[lane]
                stop = len(queue)
                while at < stop:
                    event = queue[at]
                    # the latest producer in program order is as a rule the last one
                    missing = latest[event]
                    if missing < 0 or done[missing]:
                        ready, blocker, missing = 0.0, NOBODY, NOBODY
                        for other, early, signal in links[event]:
                            if not done[other]:
                                missing = other
                            time = (free if early else end)[other] + delays[signal]
                            if time > ready:
                                ready, blocker = time, other
                        if event in weights:
                            missing = next((other for other, _, _ in weights[event] if not done[other]), missing)
                    if missing >= 0:
                        waiting.setdefault(missing, []).append(lane)
                        break
                    if ready > lane_free[lane]:
                        blockers[event], times.reason[event] = blocker, DATA
                    else:
                        ready = lane_free[lane]
                        blockers[event] = queue[at - 1] if at else NOBODY
                    if costs[event].__class__ is DmaCost:
                        heappush(self.heap, (ready, event))
                        break
                    lane_free[lane] = place(event, lane, ready, costs[event])
                    order.append(event)
                    done[event] = 1
                    at += 1
                    if event in waiting:
                        lanes += waiting.pop(event)
                heads[lane] = at

        return advance

    def replay(self, order: list[int]) -> float:
        """The latest end if every event is placed as in an earlier run, in its order, with different numbers."""
        program, times, lane_free, costs, place = self.program, self.times, self.lane_free, self.costs, self._place
        lane_of, free, end, links, delays = program.lane_of, times.free, times.end, program.links, self.delays
        self.replaying = True
        for event in order:
            if event < 0:
                self._move(~event, self._movable(self.queues[lane_of[~event]]))
                continue
            lane = lane_of[event]
            ready = lane_free[lane]
            # the producers are all placed
            for other, early, signal in links[event]:
                time = (free if early else end)[other] + delays[signal]
                ready = time if time > ready else ready
            lane_free[lane] = place(event, lane, ready, costs[event])
        return max(end, default=0.0)

    def _place(self, event: int, lane: int, ready: float, cost: AnyCost) -> float:
        """Start an instruction, or issue a transfer; when its lane is free again."""
        times = self.times
        if cost.__class__ is EngineCost:
            times.start[event] = ready
            if cost.table:  # type: ignore[union-attr]
                ready += self._table(event, lane, cost.table)  # type: ignore[union-attr]
            times.stream[event] = cost.stream  # type: ignore[union-attr]
            times.end[event] = ready + cost.latency  # type: ignore[union-attr]
            times.free[event] = free = ready + cost.pitch  # type: ignore[union-attr]
            return free
        if cost.__class__ is MatmulCost:
            return self._multiply(event, lane, ready, cost)  # type: ignore[arg-type]
        return self._issue(event, lane, ready, cost)  # type: ignore[arg-type]

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

    def _multiply(self, event: int, lane: int, ready: float, cost: MatmulCost) -> float:
        """Load weights behind the running multiply if they are there in time, then multiply."""
        n, times, clock = self.n, self.times, self.clocks[lane]
        free, end, delays = times.free, times.end, self.delays
        weights_ready, producer = 0.0, NOBODY
        for other, early, signal in self.program.weight_links[event]:
            time = (free if early else end)[other] + delays[signal]
            if time > weights_ready:
                weights_ready, producer = time, other
        # the load hides behind the running product; weights that come later are loaded in the open
        load = weights_ready if weights_ready > clock.multiply_start else clock.multiply_start
        exposed = n.tensor_load_exposed_ns if weights_ready >= self.lane_free[lane] else 0.0
        loaded = load + cost.load + exposed
        begin = loaded if loaded > ready else ready
        if weights_ready > ready:
            times.blocker[event], times.reason[event] = producer, DATA
        # a load that did not fit behind the previous multiply belongs to this event
        times.start[event] = max(ready, load) if begin > ready else begin
        times.stream[event] = stream = clock.multiply(begin, cost.stream * cost.passes, cost.rows_share)
        free[event] = done = begin + stream
        end[event] = done + n.tensor_drain_ns
        return done

    def _issue(self, event: int, lane: int, ready: float, cost: DmaCost) -> float:
        """Trigger a transfer and generate its descriptors."""
        times, triggered = self.times, ready + cost.trigger
        generator = (self.cores[lane], cost.generator)
        begin = self.generators.get(generator, 0.0)
        begin = max(begin, triggered)
        self.generators[generator] = begin + cost.interval
        # a full generator holds the sequencer back
        behind = begin - self.n.dma_generator_depth * cost.interval
        times.start[event] = ready
        times.free[event] = free = behind if behind > triggered else triggered
        self.queues[lane].pending.append((event, begin, begin + cost.lead))
        return free

    def _movable(self, queue: Queue) -> float:
        """When one of its engines can take the queue's first transfer."""
        event, _, data = queue.pending[0]
        if queue.latest <= data:
            return data
        own = queue.free
        cost: DmaCost = self.costs[event]  # type: ignore[assignment]
        first, stop, _ = cost.block
        free = min(own[first:stop]) if stop else min([own[engine] for engine, _ in cost.shares])
        return free if free > data else data

    def _move(self, event: int, now: float) -> None:
        """Move the data of one transfer through its engines and HBM."""
        cost: DmaCost = self.costs[event]  # type: ignore[assignment]
        lane, times = self.program.lane_of[event], self.times
        core, queue = self.cores[lane], self.queues[lane]
        _, begin, data = queue.pending.popleft()
        end, busy = self._through_engines(cost, core, queue, now)
        if end > queue.latest:
            queue.latest = end
            self.latest[core] = max(self.latest[core], end)
        shared = 0.0
        if cost.hbm:
            stack = self.stacks[core]
            served = max(self.hbm_free[stack], now) + cost.hbm
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
            if self.latest[core] <= now or (latest := max(engines[first:stop])) <= now:
                latest = now + time
                ends = [latest] * (stop - first)
            else:
                ends = [(free if free > now else now) + time for free in engines[first:stop]]
                latest += time
            engines[first:stop] = own[first:stop] = ends
            return (latest, time) if latest > now else (end, busy)
        # descriptors may come faster than an engine takes transfers from its ring
        ring = self.rings[core] if cost.pace else None
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
