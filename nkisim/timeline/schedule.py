"""The timeline: when each recorded instruction runs, and what the critical path waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nkisim.event import Event
from nkisim.timeline.chip import CASES, Chip
from nkisim.timeline.costs.dma import hbm_bytes
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
    latency_ns: float
    # latency with all uncertain constants at their fast ends and at their slow ends
    low_ns: float
    high_ns: float
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


def schedule(events: Sequence[Event], chip: Chip = TRN2, band: bool = True) -> Schedule:
    """Schedule a launch's events.

    Args:
        events: in launch-wide order; per core that is program order.
        band: also schedule with the low and the high constants; without it the band is a point.

    Raises:
        NotSimulated: an operation has no cost law.
        StuckSchedule: explicit edges form a circle.
    """
    written = prepare(events, chip, CASES if band else ("nominal",))
    program, times = _faster(written, chip)
    latency = max(times.end, default=0.0)
    low = high = latency
    if band:
        low = max(Machine(program, chip, "low").run().end, default=0.0)
        high = max(Machine(written, chip, "high").run().end, default=0.0)
    path = critical_path(program, times, chip.at("nominal"))
    moved = sum(hbm_bytes(event) for event in events if event.engine == "dma")
    flops, compute_ns = _compute(program)
    memory_ns = moved / hbm_peak(events, chip)
    roofline = max(memory_ns, compute_ns)
    return Schedule(
        chip=chip.name,
        start=times.start,
        free=times.free,
        end=times.end,
        latency_ns=latency,
        low_ns=min(low, latency),
        high_ns=max(high, latency),
        moving={i: transfer.moving for i, transfer in times.transfer.items()},
        lanes=tuple(f"core {core} {name}" for core, name in program.lanes),
        lane_of=program.lane_of,
        busy_share=_busy(program, times, latency),
        hbm_bytes=moved,
        flops=flops,
        roofline_ns=roofline,
        roofline_share=roofline / latency if latency else 0.0,
        bound="hbm" if memory_ns >= compute_ns else "tensor engine",
        hbm_bytes_per_ns=moved / latency if latency else 0.0,
        critical=path,
        waits_ns=waits_by_cause(path),
    )


def _faster(written: Program, chip: Chip) -> tuple[Program, Times]:
    """The program as a pipelining compiler orders it, or as written where that is not slower."""
    orders = pipelined(written, chip.at("nominal")), written
    runs = [(order, Machine(order, chip, "nominal").run()) for order in orders]
    return min(runs, key=lambda run: max(run[1].end, default=0.0))


def hbm_peak(events: Sequence[Event], chip: Chip) -> float:
    """Bytes per nanosecond that the cores of this launch can draw from their HBM stack."""
    cores = len({event.core for event in events}) or 1
    engines = chip.dma_engines.value * chip.dma_bytes_per_ns.value
    return min(cores * engines, chip.hbm_bytes_per_ns.value)


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


def _busy(program: Program, times: Times, latency: float) -> dict[str, float]:
    """Busy share per lane; a transfer counts on its queue as the union of its data phases."""
    shares: dict[str, float] = {}
    for (core, name), queue in zip(program.lanes, program.queues, strict=True):
        compute = [(times.start[i], times.free[i]) for i in queue if i not in times.transfer]
        moving = [(times.transfer[i].moving, times.end[i]) for i in queue if i in times.transfer]
        for label, part in ((f"core {core} {name}", compute), (f"core {core} dma {name}", moving)):
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
