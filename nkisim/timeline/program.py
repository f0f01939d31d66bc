"""Events prepared for scheduling: lanes, edges and costs, computed once for all cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nkisim.event import Event
from nkisim.timeline.chip import CASES, Chip
from nkisim.timeline.cost_table import law_of
from nkisim.timeline.costs import Cost, MatmulCost
from nkisim.timeline.costs_dma import DmaCost, dma_cost, is_store, issuer_of
from nkisim.timeline.dependence import READ, RESULT, Dependence, Edges

AnyCost = Cost | MatmulCost | DmaCost
# (core, name): an in-order stream of instructions
Lane = tuple[int, str]
# (producer, whether its end of reading is enough, which signal says so)
Link = tuple[int, bool, int]
# no signal, one between cores, one of a transfer, one between engines
SAME, CORE, DMA, ENGINE = 0, 1, 2, 3


@dataclass(slots=True)
class Program:
    """Parallel lists, one entry per event, plus the lanes in program order."""

    events: Sequence[Event]
    lanes: list[Lane] = field(default_factory=list)
    lane_of: list[int] = field(default_factory=list)
    queues: list[list[int]] = field(default_factory=list)
    # edges as (producer, kind) pairs; `weights` are those of a matmul's stationary operand
    edges: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    weights: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    # the same edges as the scheduler walks them
    links: list[tuple[Link, ...]] = field(default_factory=list)
    weight_links: dict[int, tuple[Link, ...]] = field(default_factory=dict)
    # the latest producer in program order, which as a rule is done last; -1 without one
    latest: list[int] = field(default_factory=list)
    costs: dict[str, list[AnyCost]] = field(default_factory=dict)


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


def _cost_key(event: Event) -> tuple[object, ...]:
    """What the cost laws can see of an event."""
    key: list[object] = [event.engine, event.op, len(event.reads)]
    for x in event.reads + event.writes:
        low, high = x.span
        key += (x.space, x.dtype, x.elements, x.partitions, x.row_bytes, high - low)
    key += event.work.items()
    return tuple(key)


def _in_order(program: Program, edges: Edges, lane: int) -> tuple[tuple[int, int], ...]:
    """Drop edges that an in-order engine keeps by itself.

    Later reads and writes on one engine follow earlier ones, and the tensor engine
    accumulates into PSUM without waiting for its own results.
    """
    tensor, known = program.lanes[lane][1] == "tensor", program.lane_of
    count = len(known)
    return tuple(
        [
            pair
            for pair in edges.items()
            if pair[0] >= count or known[pair[0]] != lane or (pair[1] == RESULT and not tensor)
        ]
    )


def _join_meetings(program: Program) -> None:
    """Let every side of a barrier or exchange wait for what the other side waits for."""
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
            edges = {other: kind for other, kind in union.items() if other not in members}
            program.edges[position] = tuple(edges.items())


def prepare(events: Sequence[Event], chip: Chip, cases: tuple[str, ...] = CASES) -> Program:
    """Build lanes, edges and costs.

    Raises:
        NotSimulated: an event's operation has no cost law.
    """
    program = Program(events, costs={case: [] for case in cases})
    numbers = {case: chip.at(case) for case in cases}
    dependence = Dependence()
    lanes: dict[Lane, int] = {}
    known: dict[tuple[object, ...], list[AnyCost]] = {}
    seen: dict[tuple[object, ...], list[AnyCost]] = {}
    for position, event in enumerate(events):
        name = lane_of(event)
        lane = lanes.get(name)
        if lane is None:
            lane = lanes[name] = len(lanes)
            program.lanes.append(name)
            program.queues.append([])
        first, rest = dependence.edges(position, lane, event)
        if event.engine == "tensor":
            program.weights[position] = _in_order(program, first, lane)
        else:
            first.update(rest)
            rest = first
        program.edges.append(_in_order(program, rest, lane) if rest else ())
        program.lane_of.append(lane)
        program.queues[lane].append(position)
        # the same views and work as before, or views that look the same
        views = (event.op, id(event.work), *map(id, event.reads), *map(id, event.writes))
        costs = seen.get(views)
        if costs is None:
            key = _cost_key(event)
            costs = known.get(key)
            if costs is None:
                law = dma_cost if event.engine == "dma" else law_of(event.engine, event.op)
                costs = known[key] = [law(event, numbers[case]) for case in cases]
            seen[views] = costs
        for case, cost in zip(cases, costs, strict=True):
            program.costs[case].append(cost)
    _join_meetings(program)
    signals = _signals(program)
    program.links = [_links(signals, at, edges) for at, edges in enumerate(program.edges)]
    program.weight_links = {at: _links(signals, at, e) for at, e in program.weights.items()}
    program.latest = [max(edges)[0] if edges else -1 for edges in program.edges]
    for at, edges in program.weights.items():
        if edges:
            program.latest[at] = max(program.latest[at], max(edges)[0])
    return program


# per event: its lane and whether it is a transfer; per pair of lanes: the signal between them
Signals = tuple[list[int], list[bool], list[list[int]]]


def _signals(program: Program) -> Signals:
    """How an event of one lane learns of one of another; a transfer always signals."""
    lanes = range(len(program.lanes))
    cores = [core for core, _ in program.lanes]
    between = [[SAME if a == b else (ENGINE if cores[a] == cores[b] else CORE) for b in lanes] for a in lanes]
    return program.lane_of, [event.engine == "dma" for event in program.events], between


def _links(signals: Signals, consumer: int, edges: tuple[tuple[int, int], ...]) -> tuple[Link, ...]:
    """The edges with their signals; an engine that only read frees its operand early."""
    if not edges:
        return ()
    lane_of, transfer, between = signals
    to = between[lane_of[consumer]]
    links: list[Link] = []
    for producer, kind in edges:
        signal, moves = to[lane_of[producer]], transfer[producer]
        links.append((producer, kind == READ and not moves, DMA if moves and signal != CORE else signal))
    return tuple(links)
