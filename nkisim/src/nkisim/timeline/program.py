"""Events prepared for scheduling: lanes, edges and costs, computed once for all cases and both orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from nkisim.event import Event
from nkisim.timeline.chip import CASES, Chip, ResolvedSpec
from nkisim.timeline.costs.dma import DmaCost, dma_cost, is_store, issuer_of
from nkisim.timeline.costs.engines import EngineCost, MatmulCost
from nkisim.timeline.costs.table import law_of
from nkisim.timeline.dependence import KINDS_OF_EDGES, READ, RESULT, Dependence, Edges, Operand

AnyCost = EngineCost | MatmulCost | DmaCost
# (core, name): an in-order stream of instructions
Lane = tuple[int, str]
# (producer, which signal says that it is done) pairs
Links = list[tuple[int, int]]
# no signal, one between cores, one of a transfer, one between engines
SAME, CORE, DMA, ENGINE = 0, 1, 2, 3
# added to a signal where the producer's end of reading is enough
EARLY = 4


@dataclass(slots=True, eq=False)
class Program:
    """Parallel lists, one entry per event, plus the lanes in the order in which they issue."""

    events: Sequence[Event]
    lanes: list[Lane] = field(default_factory=list)
    lane_of: list[int] = field(default_factory=list)
    queues: list[list[int]] = field(default_factory=list)
    # whom an event waits for; `weights` are the edges of a matmul's stationary operand
    edges: list[Edges] = field(default_factory=list)
    weights: dict[int, Edges] = field(default_factory=dict)
    # the same edges as the scheduler walks them, without those that the order of a lane keeps
    links: list[Links] = field(default_factory=list)
    weight_links: dict[int, Links] = field(default_factory=dict)
    costs: dict[str, list[AnyCost]] = field(default_factory=dict)
    # how many DMA engines there are, one for all that every transfer uses alike
    dma_engines: int = 0
    # copies whose engine the compiler chooses: position to the costs on the other engine, by case
    choices: dict[int, list[AnyCost]] = field(default_factory=dict)

    def connect(self) -> None:
        """Turn edges into links for the lanes as they are now."""
        # an event's kind: its lane, and whether it is a transfer
        kinds = [2 * lane + (event.engine == "dma") for lane, event in zip(self.lane_of, self.events, strict=True)]
        signals = _signals(self.lanes)

        def linked(at: int, edges: Edges) -> Links:
            waits = [(other, signals[kinds[at]][KINDS_OF_EDGES * kinds[other] + kind]) for other, kind in edges.items()]
            return [(other, signal) for other, signal in waits if signal is not None]

        self.links = [linked(at, edges) for at, edges in enumerate(self.edges)]
        self.weight_links = {at: linked(at, edges) for at, edges in self.weights.items()}

    def lane(self, name: Lane) -> int:
        """The number of a lane, which is opened at its first use."""
        if name not in self.lanes:
            self.lanes.append(name)
            self.queues.append([])
        return self.lanes.index(name)


def lane_of(event: Event) -> Lane:
    """The in-order stream that issues the event.

    The sync engine only triggers transfers, and a compiler moves loads ahead of stores that
    wait; its loads and its stores are therefore two streams.
    """
    if event.engine != "dma":
        return event.core, event.engine
    issuer = issuer_of(event)
    if issuer == "sync":
        return event.core, "sync store" if is_store(event) else "sync load"
    return event.core, issuer


def _cost_key(event: Event, full_tile: bool) -> tuple[object, ...]:
    """The facts of an event that the cost laws can see."""
    key: list[object] = [event.engine, event.op, len(event.reads), full_tile]
    for x in event.reads + event.writes:
        low, high = x.span
        key += (x.space, x.dtype, x.elements, x.partitions, x.row_bytes, high - low)
    key += event.work.items()
    return tuple(key)


class EventFacts(NamedTuple):
    """The common facts of events on one core with the same work and the same operands."""

    lane: int
    costs: list[AnyCost]
    # the costs on the other engine, where the compiler chooses
    choice: list[AnyCost] | None
    operands: list[Operand]


class _Laws:
    """The costs of events in all cases; events of equal work and operands are costed once."""

    def __init__(self, events: Sequence[Event], numbers: list[ResolvedSpec]) -> None:
        self.numbers = numbers
        self.tiles = _tile_bounds(events)
        self.by_key: dict[tuple[object, ...], list[AnyCost]] = {}
        # by the identity of the costs on the engine that the event is recorded on
        self.other: dict[int, list[AnyCost]] = {}

    def costs(self, event: Event) -> list[AnyCost]:
        """The cost of one event, a value for each case."""
        full_tile = event.engine == "dma" and self._fills_a_tile(event)
        key = _cost_key(event, full_tile)
        costs = self.by_key.get(key)
        if costs is None:
            costs = self.by_key[key] = [self._cost(event, n, full_tile) for n in self.numbers]
        return costs

    def _cost(self, event: Event, n: ResolvedSpec, full_tile: bool) -> AnyCost:
        if event.engine == "dma":
            return dma_cost(event, n, full_tile)
        return law_of(event.engine, event.op)(event, n)

    def _fills_a_tile(self, event: Event) -> bool:
        if not event.writes or event.writes[0].space == "hbm":
            return False
        tile = event.writes[0]
        return self.tiles[tile.tensor, event.core] == (*tile.partitions, *tile.span)

    def on_scalar(self, event: Event, costs: list[AnyCost]) -> list[AnyCost]:
        """The costs on the Scalar Engine of a copy that the kernel gave to no engine; `costs` are its own."""
        other = self.other.get(id(costs))
        if other is None:
            other = self.other[id(costs)] = [law_of("scalar", event.op)(event, n) for n in self.numbers]
        return other


def _merge_engines(costs: list[list[AnyCost]]) -> int:
    """Let one DMA engine serve for all that every transfer uses alike, as they are never apart; return their number."""
    transfers = [(column, at, cost) for column in costs for at, cost in enumerate(column) if isinstance(cost, DmaCost)]
    uses: dict[int, list[tuple[int, float]]] = {}
    for number, (_, _, cost) in enumerate(transfers):
        for engine, time in cost.shares:
            uses.setdefault(engine, []).append((number, time))
    first: dict[tuple[tuple[int, float], ...], int] = {}
    for engine, use in uses.items():
        first.setdefault(tuple(use), engine)
    merged = {engine: number for number, engine in enumerate(first.values())}
    for column, at, cost in transfers:
        shares = tuple([(merged[engine], time) for engine, time in cost.shares if engine in merged])
        column[at] = replace(cost, shares=shares)
    return len(merged)


def _tile_bounds(events: Sequence[Event]) -> dict[tuple[int, int], tuple[int, int, int, int]]:
    """The partitions and bytes of each tensor on chip that transfers touch."""
    # a loop's transfers name the same operands again and again
    written = {(event.core, id(x)): x for event in events if event.engine == "dma" for x in event.writes}
    bounds: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    for (core, _), x in written.items():
        key = x.tensor, core
        a, b, c, d = bounds.get(key, (*x.partitions, *x.span))
        (first, last), (low, high) = x.partitions, x.span
        bounds[key] = min(a, first), max(b, last), min(c, low), max(d, high)
    return bounds


def _join_meetings(program: Program) -> None:
    """Let every side of a barrier or exchange wait for the events that the other side waits for."""
    groups: dict[tuple[str, int], list[int]] = {}
    counts: dict[tuple[int, str], int] = {}
    for position, event in enumerate(program.events):
        key = event.work.get("meets")
        if key is not None:
            name = str(key)
            number = counts[event.core, name] = counts.get((event.core, name), -1) + 1
            groups.setdefault((name, number), []).append(position)
    for members in groups.values():
        union: Edges = {}
        for position in members:
            union.update(program.edges[position])
        for position in members:
            program.edges[position] = {other: kind for other, kind in union.items() if other not in members}


def prepare(events: Sequence[Event], chip: Chip, cases: tuple[str, ...] = CASES) -> Program:
    """Build lanes, edges and costs, in program order.

    Raises:
        NotSimulated: an event's operation has no cost law.
    """
    program = Program(events)
    laws, dependence = _Laws(events, [chip.at(case) for case in cases]), Dependence()
    known: dict[tuple[str, str, int, int, int, int], EventFacts] = {}
    costs: list[list[AnyCost]] = []
    edges, lanes, queues = program.edges, program.lane_of, program.queues
    for position, event in enumerate(events):
        # a loop's instructions name the same objects again and again
        key = event.op, event.engine, event.core, id(event.work), id(event.reads), id(event.writes)
        facts = known.get(key)
        if facts is None:
            facts = known[key] = _facts_of(program, laws, event)
        lane, cost, choice, operands = facts
        first, rest = dependence.edges(position, lane, event, operands)
        if first is not rest:
            program.weights[position] = first
        edges.append(rest)
        lanes.append(lane)
        queues[lane].append(position)
        costs.append(cost)
        if choice is not None:
            program.choices[position] = choice
    program.dma_engines = _merge_engines(list(laws.by_key.values()))
    program.costs = {case: [cost[i] for cost in costs] for i, case in enumerate(cases)}
    _join_meetings(program)
    program.connect()
    return program


def _facts_of(program: Program, laws: _Laws, event: Event) -> EventFacts:
    """The facts that an event shares with those that name the same work and operands."""
    costs = laws.costs(event)
    chosen = event.op == "tensor_copy" and event.engine == "vector" and event.work.get("engine") == "unknown"
    return EventFacts(program.lane(lane_of(event)), costs, laws.on_scalar(event, costs) if chosen else None, [])


# by kind of producer, and for each by kind of edge: the signal that a consumer waits for, if it has to
Signals = list[int | None]


def _signals(lanes: list[Lane]) -> list[Signals]:
    """The way in which an event of each kind learns of an earlier one.

    An in-order engine orders its own writes after its earlier reads and writes without a wait, and the tensor
    engine accumulates into PSUM without waiting for its own results. Transfers of one lane overlap, so they wait, and
    always signal. An engine that only read frees its operand early.
    """

    def signal(consumer: int, producer: int, edge: int) -> int | None:
        (lane, moves_too), (source, moves) = divmod(consumer, 2), divmod(producer, 2)
        if source == lane and not moves_too and (edge != RESULT or lanes[lane][1] == "tensor"):
            return None
        early = EARLY if edge == READ and not moves else 0
        if lanes[source][0] != lanes[lane][0]:
            return CORE + early
        return (DMA if moves else SAME if source == lane else ENGINE) + early

    kinds, edges = range(2 * len(lanes)), range(KINDS_OF_EDGES)
    return [[signal(a, b, edge) for b in kinds for edge in edges] for a in kinds]
