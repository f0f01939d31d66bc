"""The list scheduler: runs prepared events through in-order engines and shared resources.

An event starts when it is at the head of its lane and its producers are done. Instructions are placed as soon as
that is known; transfers, which alone share resources with other lanes, are placed in order of time.
A transfer is issued by its lane and later moves its data: one queue serves its transfers in
order, and queues that compete for an engine alternate.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from nkisim.timeline.chip import Chip
from nkisim.timeline.costs.dma import DmaCost
from nkisim.timeline.costs.engines import EngineCost, MatmulCost
from nkisim.timeline.program import Links, Program
from nkisim.timeline.schedule_state import NEVER, NOBODY, Core, Moved, Queue, TensorClock, Times

# when the weights of a product are there, and who wrote them last
Weights = tuple[float, int]
NO_WEIGHTS = (0.0, NOBODY)


class StuckSchedule(ValueError):
    """The events wait for each other in a circle."""


class Machine:
    """The state of all engines of a launch while its events are placed in time."""

    def __init__(self, program: Program, chip: Chip, case: str) -> None:
        count, lanes = len(program.events), len(program.queues)
        self.program, self.n = program, chip.at(case)
        self.costs = program.costs[case]
        never = [NEVER] * count
        self.times = Times(never[:], never[:], never[:], [NOBODY] * count, [False] * count)
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
        # the part of the array that the last product kept busy, by lane
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
        heap, lane_of, queues, waiting = self.heap, self.program.lane_of, self.queues, self.waiting
        moved, order, costs = self.times.moved, self.order, self.costs
        advance = self._advancer()
        advance(list(range(len(queues))))
        while heap:
            time, event = heappop(heap)
            order.append(event)
            if event >= 0:
                lane = lane_of[event]
                queue = queues[lane]
                cost: DmaCost = costs[event]  # type: ignore[assignment]
                self.lane_free[lane] = self._issue(event, cost, queue, time)
                if len(queue.pending) == 1:
                    heappush(heap, (_movable(queue), ~event))
                self.heads[lane] += 1
                advance([lane])
                continue
            event = ~event
            queue = queues[lane_of[event]]
            moved[event] = self._move(queue, time)
            if queue.pending:
                heappush(heap, (_movable(queue), ~queue.pending[0][0]))
            if event in waiting:
                advance(waiting.pop(event))
        if NEVER in self.times.end:
            stuck = [event for event, end in zip(self.program.events, self.times.end, strict=True) if end == NEVER][:4]
            names = ", ".join(f"{e.op} on core {e.core} ({e.line[0]}:{e.line[1]})" for e in stuck)
            raise StuckSchedule(f"these events wait for each other: {names}; remove one `after` edge")
        return self.times

    def _advancer(self) -> Callable[[list[int]], None]:
        """A function that places ready events of some lanes and of those that wait for them, and offers transfers."""
        program, times, waiting, delays, ends = self.program, self.times, self.waiting, self.delays, self.ends
        links, weight_links, latest = program.links, program.weight_links, program.latest
        start, free, end, blockers, held = times.start, times.free, times.end, times.blocker, times.held
        heads, lane_free, heap, placed = self.heads, self.lane_free, self.heap, self.order.append
        queues, costs = program.queues, self.costs

        def advance(lanes: list[int]) -> None:
            while lanes:
                lane = lanes.pop()
                queue, at = queues[lane], heads[lane]
                stop = len(queue)
                while at < stop:
                    event = queue[at]
                    cost, missing = costs[event], latest[event]
                    ready, blocker = 0.0, NOBODY
                    # the latest producer in program order is usually the last one; an unplaced event never ends
                    if missing >= 0 and end[missing] == NEVER:
                        ready, blocker = NEVER, missing
                    else:
                        for other, signal in links[event]:
                            time = ends[signal][other] + delays[signal]
                            if time > ready:
                                ready, blocker = time, other
                    weights = (
                        self._weights(weight_links[event]) if type(cost) is MatmulCost and ready < NEVER else NO_WEIGHTS
                    )
                    if ready == NEVER or weights[0] == NEVER:
                        waiting.setdefault(blocker if ready == NEVER else weights[1], []).append(lane)
                        break
                    late = ready > lane_free[lane]
                    held[event] = late
                    blockers[event] = blocker if late else queue[at - 1] if at else NOBODY
                    start[event] = ready = ready if late else lane_free[lane]
                    if type(cost) is EngineCost:
                        if cost.table:
                            ready += self._table(event, lane, cost.table)
                        end[event] = ready + cost.latency
                        free[event] = lane_free[lane] = ready + cost.pitch
                    elif type(cost) is DmaCost:
                        heappush(heap, (ready, event))
                        break
                    else:
                        lane_free[lane] = self._multiply(event, lane, ready, weights)
                    placed(event)
                    at += 1
                    lanes += waiting.pop(event, ())
                heads[lane] = at

        return advance

    def replay(self, order: list[int]) -> float:
        """The latest end if every event is placed as in an earlier run, in its order, with different numbers."""
        program, costs, queues = self.program, self.costs, self.queues
        lane_of, links, weight_links = program.lane_of, program.links, program.weight_links
        free, end, lane_free, delays, ends = self.times.free, self.times.end, self.lane_free, self.delays, self.ends
        for event in order:
            if event < 0:
                queue = queues[lane_of[~event]]
                self._move(queue, _movable(queue))
                continue
            lane = lane_of[event]
            ready = lane_free[lane]
            # the producers are all placed
            for other, signal in links[event]:
                time = ends[signal][other] + delays[signal]
                ready = time if time > ready else ready
            cost = costs[event]
            if type(cost) is EngineCost:
                if cost.table:
                    ready += self._table(event, lane, cost.table)
                end[event] = ready + cost.latency
                free[event] = lane_free[lane] = ready + cost.pitch
            elif type(cost) is DmaCost:
                lane_free[lane] = self._issue(event, cost, queues[lane], ready)
            else:
                lane_free[lane] = self._multiply(event, lane, ready, self._weights(weight_links[event]))
        return max(end, default=0.0)

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

    def _weights(self, links: Links) -> Weights:
        """The weights of a product, by the links to those who write them."""
        ready, producer, ends, delays = 0.0, NOBODY, self.ends, self.delays
        for other, signal in links:
            time = ends[signal][other] + delays[signal]
            if time > ready:
                ready, producer = time, other
        return ready, producer

    def _multiply(self, event: int, lane: int, ready: float, weights: Weights) -> float:
        """Load weights behind the running multiply if they are there in time, then multiply."""
        n, times, clock = self.n, self.times, self.clocks[lane]
        cost: MatmulCost = self.costs[event]  # type: ignore[assignment]
        weights_ready, producer = weights
        # the load hides behind the running product; weights that come later are loaded in the open
        load = weights_ready if weights_ready > clock.multiply_start else clock.multiply_start
        exposed = n.tensor_load_exposed_ns if weights_ready >= self.lane_free[lane] else 0.0
        loaded = load + cost.load + exposed
        begin = loaded if loaded > ready else ready
        if weights_ready > ready:
            times.blocker[event], times.held[event] = producer, True
        # a load that did not fit behind the previous multiply belongs to this event
        times.start[event] = (load if load > ready else ready) if begin > ready else begin
        stream = cost.stream * cost.passes
        if cost.group >= 0:
            # products in different columns of the array overlap
            stream /= n.tensor_tiled_rate if cost.group == self.groups.get(lane) else n.tensor_rotated_rate
        self.groups[lane] = cost.group
        times.stream[event] = stream = clock.multiply(begin, stream, cost.rows_share)
        times.free[event] = done = begin + stream
        times.end[event] = done + n.tensor_drain_ns
        return done

    def _issue(self, event: int, cost: DmaCost, queue: Queue, ready: float) -> float:
        """Trigger a transfer and generate its descriptors; when its lane is free again."""
        triggered, generators = ready + cost.trigger, queue.core.generators
        due = generators.get(cost.generator, 0.0)
        begin = triggered if triggered > due - cost.ahead else due - cost.ahead
        generators[cost.generator] = (triggered if triggered > due else due) + cost.interval
        # a full generator holds the sequencer back
        behind = begin - self.n.dma_generator_depth * cost.interval
        self.times.free[event] = free = behind if behind > triggered else triggered
        queue.pending.append((event, cost, begin, begin + cost.lead))
        return free

    def _move(self, queue: Queue, now: float) -> Moved:
        """Move the data of a queue's first transfer through DMA engines and HBM."""
        event, cost, begin, data = queue.pending.popleft()
        core, own, end, busy = queue.core, queue.free, now, 0.0
        # descriptors may come faster than an engine takes transfers from its ring
        engines, ring = core.engines, core.rings if cost.pace else None
        for engine, time in cost.shares:
            free = engines[engine]
            start = free if free > now else now
            if ring:
                start = max(start, ring[engine])
                ring[engine] = start + cost.pace
            engines[engine] = own[engine] = done = start + time
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
        return begin, data, busy, shared, end


def _movable(queue: Queue) -> float:
    """When one of its engines can take the queue's first transfer."""
    _, cost, _, data = queue.pending[0]
    if queue.latest <= data:
        return data
    own = queue.free
    free = min([own[engine] for engine, _ in cost.shares])
    return free if free > data else data
