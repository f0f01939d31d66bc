"""A pipelining compiler's order of a program: its lanes in the order of a list schedule.

Program order is one end: each engine runs its instructions as the kernel writes them. A compiler overlaps the
iterations of loops; here every engine takes, among the next few hundred instructions of its core, the first one
whose operands are there, and copies that the kernel gives to no engine go to the less loaded of two. Barriers,
exchanges, registers and explicit edges keep their place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush

from nkisim.timeline.chip import Numbers
from nkisim.timeline.costs.dma import DmaCost
from nkisim.timeline.costs.engines import EngineCost
from nkisim.timeline.dependence import RESULT
from nkisim.timeline.program import AnyCost, Program
from nkisim.timeline.schedule_state import NEVER, NOBODY

Offer = Callable[[int], None]
_FIXED = frozenset({"core_barrier", "sendrecv", "sendrecv_compute"})


def pipelined(program: Program, n: Numbers) -> Program:
    """The same events with lanes in the order of a list schedule; the program itself if nothing moves."""
    order = _ListSchedule(program, n)
    order.run()
    if order.queues == program.queues:
        return program
    cases = list(program.costs)
    costs = {case: column[:] for case, column in program.costs.items()}
    for position in order.moved:
        for case, cost in zip(cases, program.choices[position], strict=True):
            costs[case][position] = cost
    better = replace(program, lane_of=order.lane_of, queues=order.queues, costs=costs)
    better.connect()
    return better


def _estimate(cost: AnyCost, drain: float) -> tuple[float, float]:
    """How long an instruction keeps its lane, and when its result is there: without waits for shared engines."""
    if isinstance(cost, EngineCost):
        return cost.pitch, cost.latency
    if isinstance(cost, DmaCost):
        busy = max([time for _, time in cost.shares])
        return max(cost.trigger, cost.interval, cost.pace, busy), cost.interval + cost.lead + busy + cost.tail
    stream = cost.stream * cost.passes
    return stream, stream + drain


class _ListSchedule:
    """The state of the pass: the events that each lane may take next, and when."""

    def __init__(self, program: Program, n: Numbers) -> None:
        count = len(program.events)
        self.program, self.reach = program, int(n.compiler_window)
        self.semaphore, self.dma_semaphore = n.semaphore_ns, n.dma_semaphore_ns
        # how long each event keeps its lane, and when its result is there
        self.known: dict[int, tuple[float, float]] = {}
        # where the nominal cost is in a list of costs by case
        self.case = list(program.costs).index("nominal")
        costs = program.costs["nominal"]
        for cost in {id(c): c for c in costs}.values():
            self.known[id(cost)] = _estimate(cost, n.tensor_drain_ns)
        self.takes = [self.known[id(cost)] for cost in costs]
        self.transfer = [event.engine == "dma" for event in program.events]
        for choice in program.choices.values():
            self.known[id(choice[self.case])] = _estimate(choice[self.case], n.tensor_drain_ns)
        self.lane_of = program.lane_of[:]
        self.queues: list[list[int]] = [[] for _ in program.queues]
        self.moved: list[int] = []
        self.free = [0.0] * len(program.queues)
        # work that waits in a lane, for the choice between two
        self.load = [0.0] * len(program.queues)
        self.done = bytearray(count)
        self.ready: list[list[tuple[int, int]]] = [[] for _ in program.queues]
        self.future: list[list[tuple[float, int]]] = [[] for _ in program.queues]
        self.heap: list[tuple[float, int]] = []
        self.scalar_lane: dict[int, int] = {}
        # when each lane is looked at next
        self.due = [NEVER] * len(program.queues)
        self._graph(count)
        self._windows()

    def _graph(self, count: int) -> None:
        """Count the producers of each event and list its consumers."""
        self.missing = [0] * count
        self.consumers: list[list[int]] = [[] for _ in range(count)]
        self.at = [0.0] * count
        # loads go in the order in which their data are used first
        self.place = list(range(count))
        transfer, place, missing, consumers = self.transfer, self.place, self.missing, self.consumers
        weights = self.program.weights
        for position, edges in enumerate(self.program.edges):
            pairs = [*edges.items(), *weights[position].items()] if position in weights else edges.items()
            missing[position] = len(pairs)
            for producer, kind in pairs:
                consumers[producer].append(position)
                if kind == RESULT and transfer[producer] and place[producer] == producer:
                    place[producer] = position

    def _windows(self) -> None:
        """Per core: its events in program order, those that keep their place, and the window."""
        self.core_of = [core for core, _ in self.program.lanes]
        self.members: dict[int, list[int]] = {core: [] for core in self.core_of}
        for position, lane in enumerate(self.lane_of):
            self.members[self.core_of[lane]].append(position)
        ops = {event.op for event in self.program.events}
        still = {op for op in ops if op in _FIXED or op.startswith(("register", "scalar_load", "scalar_store"))}
        fixed = {at for at, event in enumerate(self.program.events) if event.after or event.op in still}
        self.fixed = {core: [i for i, at in enumerate(all_) if at in fixed] for core, all_ in self.members.items()}
        # the visible events, as places among the members: from the oldest unplaced one to the first hidden one
        self.window = dict.fromkeys(self.members, (0, 0))
        # the same two as positions
        self.oldest = dict.fromkeys(self.members, NOBODY)
        self.hidden = dict.fromkeys(self.members, 0)

    def run(self) -> None:
        """Place every event."""
        heap, free, due, at, done, place = self.heap, self.free, self.due, self.at, self.done, self.place
        takes, load, queues, core_of, choices = self.takes, self.load, self.queues, self.core_of, self.program.choices
        lanes_ready, lanes_future, consumers, oldest = self.ready, self.future, self.consumers, self.oldest
        offer = self._offerer()
        release, advance = self._releaser(offer), self._advancer(offer)
        for core in self.members:
            advance(core)
        while heap:
            time, lane = heappop(heap)
            if time != due[lane]:
                continue
            due[lane] = NEVER
            # the first instruction in program order of those that are ready, which one is by now
            ready, future = lanes_ready[lane], lanes_future[lane]
            while future and future[0][0] <= time:
                position = heappop(future)[1]
                heappush(ready, (place[position], position))
            position = heappop(ready)[1]
            pitch, latency = takes[position]
            known, start = at[position], free[lane]
            start = known if known > start else start
            free[lane] = start + pitch
            if choices:
                load[lane] -= pitch
            done[position] = 1
            queues[lane].append(position)
            if consumers[position]:
                release(position, lane, start + latency)
            if position == oldest[core_of[lane]]:
                advance(core_of[lane])
            # look at the lane again when it can take its candidates
            if ready or future:
                start = free[lane]
                if not ready and future[0][0] > start:
                    start = future[0][0]
                if start < due[lane]:
                    due[lane] = start
                    heappush(heap, (start, lane))
        if not all(self.done):
            # a circle of edges: the scheduler names its events
            self.queues = [queue[:] for queue in self.program.queues]
            self.lane_of, self.moved = self.program.lane_of[:], []

    def _releaser(self, offer: Offer) -> Callable[[int, int, float], None]:
        """A function that reports an event's end to its consumers; those that miss nothing more become candidates."""
        transfers, consumers, at, missing = self.transfer, self.consumers, self.at, self.missing
        lane_of, core_of, hidden = self.lane_of, self.core_of, self.hidden
        semaphore, dma_semaphore = self.semaphore, self.dma_semaphore

        def release(position: int, lane: int, end: float) -> None:
            transfer = transfers[position]
            signalled = end + (dma_semaphore if transfer else semaphore)
            for consumer in consumers[position]:
                home = lane_of[consumer]
                time = end if home == lane and not transfer else signalled
                known = at[consumer]
                at[consumer] = time if time > known else known
                left = missing[consumer] = missing[consumer] - 1
                if not left and consumer < hidden[core_of[home]]:
                    offer(consumer)

        return release

    def _offerer(self) -> Offer:
        """A function that gives an event to its lane, as a candidate from the time at which its operands are there."""
        lane_of, choices, load, takes, heap = self.lane_of, self.program.choices, self.load, self.takes, self.heap
        at, free, future, due = self.at, self.free, self.future, self.due

        def offer(position: int) -> None:
            lane = lane_of[position]
            if choices:
                lane = self._choose(position, lane) if position in choices else lane
                load[lane] += takes[position][0]
            time = at[position]
            heappush(future[lane], (time, position))
            time = time if time > free[lane] else free[lane]
            if time < due[lane]:
                due[lane] = time
                heappush(heap, (time, lane))

        return offer

    def _choose(self, position: int, vector: int) -> int:
        """The engine on which a copy would end first, given the work that waits there."""
        core = self.core_of[vector]
        scalar = self.scalar_lane.get(core, NOBODY)
        if scalar == NOBODY:
            scalar = self.scalar_lane[core] = self.program.lane((core, "scalar"))
        if scalar == len(self.free):
            self.free.append(0.0)
            self.load.append(0.0)
            self.queues.append([])
            self.due.append(NEVER)
            self.ready.append([])
            self.future.append([])
            self.core_of.append(core)
        at, there = self.at[position], self.known[id(self.program.choices[position][self.case])]
        here = max(at, self.free[vector] + self.load[vector]) + self.takes[position][1]
        if here <= max(at, self.free[scalar] + self.load[scalar]) + there[1]:
            return vector
        self.lane_of[position], self.takes[position] = scalar, there
        self.moved.append(position)
        return scalar

    def _advancer(self, offer: Offer) -> Callable[[int], None]:
        """A function that moves a core's window past placed events, up to the next one that keeps its place."""
        done, missing, window, reach, count = self.done, self.missing, self.window, self.reach, len(self.done)

        def advance(core: int) -> None:
            members, fixed, (oldest, hidden) = self.members[core], self.fixed[core], window[core]
            stop = len(members)
            while oldest < stop and done[members[oldest]]:
                oldest += 1
            limit = oldest + reach
            if fixed:
                while fixed and fixed[0] < oldest:
                    del fixed[0]
                if fixed:
                    limit = min(limit, oldest + 1 if fixed[0] == oldest else fixed[0])
            shown = members[hidden:limit]
            window[core] = oldest, hidden + len(shown)
            self.oldest[core] = members[oldest] if oldest < stop else NOBODY
            self.hidden[core] = members[limit] if limit < stop else count
            for position in shown:
                if not missing[position]:
                    offer(position)

        return advance
