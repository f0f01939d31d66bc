"""The timeline: when each recorded instruction runs, and the events that the critical path waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nkisim.event import Event
from nkisim.timeline.chip import CASES, Chip, ResolvedSpec
from nkisim.timeline.compiler_model import COMPILER, CompilerModel
from nkisim.timeline.costs.dma import COLLECTIVES, DmaCost, hbm_bytes
from nkisim.timeline.costs.engines import MatmulCost
from nkisim.timeline.critical_path import PathEvent, critical_path, waits_by_cause
from nkisim.timeline.list_scheduler import Machine
from nkisim.timeline.pipelining import pipelined
from nkisim.timeline.program import Program, prepare
from nkisim.timeline.schedule_state import Times
from nkisim.timeline.trn2 import TRN2


@dataclass(frozen=True, slots=True)
class Schedule:
    """Simulated times. Start, end and free are nanoseconds per event, in the events' order."""

    chip: str
    start: list[float]
    free: list[float]
    end: list[float]
    # first instruction to last result; the launch is not in it
    latency_ns: float
    # the pipelined order with all uncertain constants at their fast ends, program order with all at their slow
    # ends, and on both sides the costs that the model leaves out
    low_ns: float
    high_ns: float
    # the order that the latency is of: "program", or "reordered" by a pipelining compiler
    order: str
    # nominal constants: in program order, and in the order of a pipelining compiler
    program_order_ns: float
    pipelined_ns: float
    # eight of ten measured kernels are between these two, which are within the possible ends
    likely_low_ns: float
    likely_high_ns: float
    # none of these is in a latency: a launch of a graph, paid once by all of its kernels; one of a kernel that is
    # profiled by itself; and the host's dispatch of a graph
    launch_ns: float
    profiled_launch_ns: float
    host_dispatch_ns: float
    # when the last share of a transfer's data starts to move
    moving: dict[int, float]
    lanes: tuple[str, ...]
    lane_of: list[int]
    # share of the latency during which the engine took instructions or a queue moved data
    busy_share: dict[str, float]
    hbm_bytes: int
    flops: float
    # time that the memory or the tensor engine needs at its peak, and its share of the latency
    roofline_ns: float
    roofline_share: float
    # which of the two it is: "hbm" or "tensor engine"
    bound: str
    hbm_bytes_per_ns: float
    critical: tuple[PathEvent, ...]
    waits_ns: dict[str, float]


def schedule(
    events: Sequence[Event], chip: Chip = TRN2, band: bool = True, compiler: CompilerModel = COMPILER
) -> Schedule:
    """Schedule a launch's events.

    Args:
        events: in launch-wide order; per core that is program order.
        band: also schedule with the low and the high constants; without it the band is a point.
        compiler: what the compiler is taken to do, such as the order that the latency is of.

    Raises:
        NotSimulated: an operation has no cost law.
        StuckSchedule: explicit edges form a circle.
    """
    written = prepare(events, chip, CASES if band else ("nominal",))
    n = chip.at("nominal")
    if not compiler.spread_copies:
        written.choices.clear()
    machines = [Machine(order, chip, "nominal") for order in dict.fromkeys((written, pipelined(written, n)))]
    for machine in machines:
        machine.run()
    ends = [max(machine.times.end, default=0.0) for machine in machines]
    # a compiler keeps the order of the program where its own is not faster
    place = {"program": 0, "reordered": len(ends) - 1}.get(compiler.order, ends.index(min(ends)))
    best = machines[place]
    program, times, latency = best.program, best.times, max(best.times.end, default=0.0)
    low, high = _band(best, machines[0], chip) if band else (latency, latency)
    low, high = min(low, latency), max(high, latency)
    path = critical_path(program, times, n)
    # a collective is in progress from its start: its latency is work of others
    transfers = {i: t for i, t in times.moved.items() if events[i].op not in COLLECTIVES}
    moving = {event: end - shared - stream for event, (_, _, stream, shared, end) in transfers.items()}
    flops, compute_ns = _compute(program)
    moved = sum(hbm_bytes(event) for event in events if event.engine == "dma")
    memory_ns = _memory(program, moved, n)
    roofline = max(memory_ns, compute_ns)
    return Schedule(
        chip=chip.name,
        start=times.start,
        free=times.free,
        end=times.end,
        latency_ns=latency,
        low_ns=low,
        high_ns=high,
        order="program" if place == 0 else "reordered",
        program_order_ns=ends[0],
        pipelined_ns=ends[-1],
        likely_low_ns=max(low, latency / n.residual_share),
        likely_high_ns=min(high, latency * n.residual_share),
        launch_ns=n.launch_ns,
        profiled_launch_ns=n.profiled_launch_ns,
        host_dispatch_ns=n.host_dispatch_ns,
        moving=moving,
        lanes=tuple(f"core {core} {name}" for core, name in program.lanes),
        lane_of=program.lane_of,
        busy_share=_busy(program, times, moving, latency),
        hbm_bytes=moved,
        flops=flops,
        roofline_ns=roofline,
        roofline_share=roofline / latency if latency else 0.0,
        bound="hbm" if memory_ns >= compute_ns else "tensor engine",
        hbm_bytes_per_ns=moved / latency if latency else 0.0,
        critical=path,
        waits_ns=waits_by_cause(path),
    )


def _band(best: Machine, written: Machine, chip: Chip) -> tuple[float, float]:
    """The low and the high latency: both orders as they ran, with the constants at their ends."""
    ends = []
    for machine, case in ((best, "low"), (written, "high")):
        end = Machine(machine.program, chip, case).replay(machine.order)
        ends.append(end * chip.at(case).unmodelled_share)
    return ends[0], ends[1]


def hbm_peak(events: Sequence[Event], chip: Chip) -> float:
    """Bytes per nanosecond that the cores of this launch can read from their HBM stack."""
    cores = len({event.core for event in events}) or 1
    engines = chip.dma_engines.value * chip.dma_bytes_per_ns.value
    return min(cores * engines, chip.hbm_bytes_per_ns.value)


def _memory(program: Program, hbm_moved: float, n: ResolvedSpec) -> float:
    """The least time for the transfers: each core's bytes over its engines, and all over the HBM stack."""
    through: dict[int, float] = {}
    for event, cost in zip(program.events, program.costs["nominal"], strict=True):
        if isinstance(cost, DmaCost):
            through[event.core] = through.get(event.core, 0.0) + cost.moved
    engines = max(through.values(), default=0.0) / (n.dma_engines * n.dma_bytes_per_ns)
    return max(engines, hbm_moved / (n.hbm_bytes_per_ns * _stacks(program, n)))


def _stacks(program: Program, n: ResolvedSpec) -> int:
    """HBM stacks that the launch's cores read from."""
    return len({core // int(n.cores_per_hbm_stack) for core, _ in program.lanes}) or 1


def _compute(program: Program) -> tuple[float, float]:
    """Operations of all matmuls, and the time of the busiest core at the engine's peak."""
    flops = 0.0
    peak_ns: dict[int, float] = {}
    for event, cost in zip(program.events, program.costs["nominal"], strict=True):
        if isinstance(cost, MatmulCost):
            flops += cost.flops
            core = event.core
            peak_ns[core] = peak_ns.get(core, 0.0) + cost.flops / (cost.peak_tflops * 1e3)
    return flops, max(peak_ns.values(), default=0.0)


def _busy(program: Program, times: Times, moving: dict[int, float], latency: float) -> dict[str, float]:
    """Busy share per lane; a transfer counts on its queue as the union of its data phases."""
    shares: dict[str, float] = {}
    start, free, end = times.start, times.free, times.end
    for (core, name), queue in zip(program.lanes, program.queues, strict=True):
        compute = [(start[i], free[i]) for i in queue if i not in moving]
        data = [(moving[i], end[i]) for i in queue if i in moving]
        for label, part in ((f"core {core} {name}", compute), (f"core {core} dma {name}", data)):
            if part:
                shares[label.replace("dma sync", "dma")] = union(part) / latency if latency else 0.0
    return shares


def union(spans: Sequence[tuple[float, float]]) -> float:
    """Total length covered by intervals."""
    total, reached = 0.0, 0.0
    for start, stop in sorted(spans):
        if stop > reached:
            total += stop - max(start, reached)
            reached = stop
    return total
