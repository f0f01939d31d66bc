"""A pipelining compiler's order of a program: its lanes in the order of a list schedule.

Program order is one end: each engine runs its instructions as the kernel writes them. A compiler overlaps the
iterations of loops; here every engine takes, among the next few hundred instructions of its core, the first one
whose operands are there, and copies that the kernel gives to no engine go to the less loaded of two. Barriers,
exchanges, registers and explicit edges keep their place.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush

from nkisim.timeline.chip import ResolvedSpec
from nkisim.timeline.costs.dma import DmaCost
from nkisim.timeline.costs.engines import EngineCost
from nkisim.timeline.dependence import RESULT
from nkisim.timeline.program import AnyCost, Program
from nkisim.timeline.schedule_state import NO_EVENT, UNSCHEDULED

_FIXED = frozenset({"core_barrier", "sendrecv", "sendrecv_compute"})


def pipelined(program: Program, n: ResolvedSpec) -> Program:
    """The events with lanes in the order of a list schedule; the given program if nothing moves."""
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
        return max(cost.trigger, cost.interval, cost.ring_interval, busy), cost.interval + cost.lead + busy + cost.tail
    stream = cost.stream * cost.passes
    return stream, stream + drain


class _ListSchedule:
    """The state of the pass: the events that each lane may take next, and when."""

    def __init__(self, program: Program, n: ResolvedSpec) -> None:
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
        self.due = [UNSCHEDULED] * len(program.queues)
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
        self.oldest = dict.fromkeys(self.members, NO_EVENT)
        self.hidden = dict.fromkeys(self.members, 0)

    def run(self) -> None:
        """Place every event."""
        for core in self.members:
            self._advance(core)
        while self.heap:
            time, lane = heappop(self.heap)
            if time != self.due[lane]:
                continue
            self.due[lane] = UNSCHEDULED
            # the first instruction in program order of those that are ready, which one is by now
            ready, future = self.ready[lane], self.future[lane]
            while future and future[0][0] <= time:
                position = heappop(future)[1]
                heappush(ready, (self.place[position], position))
            position = heappop(ready)[1]
            pitch, latency = self.takes[position]
            start = max(self.at[position], self.free[lane])
            self.free[lane] = start + pitch
            self.load[lane] -= pitch
            self.done[position] = 1
            self.queues[lane].append(position)
            self._release(position, lane, start + latency)
            if position == self.oldest[self.core_of[lane]]:
                self._advance(self.core_of[lane])
            # look at the lane again when it can take its candidates
            if ready or future:
                self._wake(lane, self.free[lane] if ready else max(self.free[lane], future[0][0]))
        if not all(self.done):
            # a circle of edges: the scheduler names its events
            self.queues = [queue[:] for queue in self.program.queues]
            self.lane_of, self.moved = self.program.lane_of[:], []

    def _wake(self, lane: int, time: float) -> None:
        """Take the next event of a lane at this time, or earlier."""
        if time < self.due[lane]:
            self.due[lane] = time
            heappush(self.heap, (time, lane))

    def _release(self, position: int, lane: int, end: float) -> None:
        """Report an event's end to its consumers; those that miss nothing more become candidates."""
        transfer = self.transfer[position]
        signalled = end + (self.dma_semaphore if transfer else self.semaphore)
        for consumer in self.consumers[position]:
            home = self.lane_of[consumer]
            self.at[consumer] = max(self.at[consumer], end if home == lane and not transfer else signalled)
            self.missing[consumer] -= 1
            if not self.missing[consumer] and consumer < self.hidden[self.core_of[home]]:
                self._offer(consumer)

    def _offer(self, position: int) -> None:
        """Give an event to its lane, as a candidate from the time at which its operands are there."""
        lane = self.lane_of[position]
        if position in self.program.choices:
            lane = self._choose(position, lane)
        self.load[lane] += self.takes[position][0]
        heappush(self.future[lane], (self.at[position], position))
        self._wake(lane, max(self.at[position], self.free[lane]))

    def _choose(self, position: int, vector: int) -> int:
        """The engine on which a copy would end first, given the work that waits there."""
        core = self.core_of[vector]
        scalar = self.scalar_lane.get(core, NO_EVENT)
        if scalar == NO_EVENT:
            scalar = self.scalar_lane[core] = self.program.lane((core, "scalar"))
        if scalar == len(self.free):
            self.free.append(0.0)
            self.load.append(0.0)
            self.queues.append([])
            self.due.append(UNSCHEDULED)
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

    def _advance(self, core: int) -> None:
        """Move a core's window past placed events, up to the next one that keeps its place."""
        members, fixed, (oldest, hidden) = self.members[core], self.fixed[core], self.window[core]
        stop = len(members)
        while oldest < stop and self.done[members[oldest]]:
            oldest += 1
        limit = oldest + self.reach
        while fixed and fixed[0] < oldest:
            del fixed[0]
        if fixed:
            limit = min(limit, oldest + 1 if fixed[0] == oldest else fixed[0])
        shown = members[hidden:limit]
        self.window[core] = oldest, hidden + len(shown)
        self.oldest[core] = members[oldest] if oldest < stop else NO_EVENT
        self.hidden[core] = members[limit] if limit < stop else len(self.done)
        for position in shown:
            if not self.missing[position]:
                self._offer(position)
