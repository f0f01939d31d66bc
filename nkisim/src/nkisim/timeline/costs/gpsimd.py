"""EngineCost laws of the GpSimd engine, of register operations and of barriers.

The manual gives figures for topk and rsqrt only; the others are inferred and carry wide bands.
"""

from __future__ import annotations

from nkisim.dtypes import INFO
from nkisim.event import Event
from nkisim.timeline.chip import ResolvedSpec
from nkisim.timeline.costs.engines import EngineCost, Law, elements, number, per_partition


def gpsimd_cycles(cycles_name: str, scaled_by_width: bool = False) -> Law:
    """A GpSimd law with a number of cycles per element, named by its constant."""

    def law(event: Event, n: ResolvedSpec) -> EngineCost:
        cycles = getattr(n, cycles_name)
        if scaled_by_width and event.writes:
            cycles *= max(INFO[x.dtype].itemsize for x in event.writes) / 4
        return _gpsimd_cost(elements(event) * cycles / n.gpsimd_ghz, n)

    return law


def _gpsimd_cost(stream: float, n: ResolvedSpec) -> EngineCost:
    return EngineCost(stream + n.gpsimd_gap_ns, stream + n.gpsimd_latency_ns, stream)


_gpsimd_plain = gpsimd_cycles("gpsimd_cycles", scaled_by_width=True)


def gpsimd(event: Event, n: ResolvedSpec) -> EngineCost:
    """Element-wise work; rsqrt is four times slower."""
    if event.work.get("function") == "rsqrt":
        return _gpsimd_cost(elements(event) * n.gpsimd_rsqrt_cycles / n.gpsimd_ghz, n)
    cost = _gpsimd_plain(event, n)
    assert isinstance(cost, EngineCost)
    return cost


def gather(event: Event, n: ResolvedSpec) -> EngineCost:
    """One instruction group per 512 gathered elements; the size of the table that they come from does not matter."""
    count = max((per_partition(x) for x in event.writes), default=1)
    groups = -(-count // 512)
    stream = count * n.gpsimd_search_cycles / n.gpsimd_ghz + groups * n.gpsimd_gather_group_ns
    return _gpsimd_cost(stream, n)


def topk(event: Event, n: ResolvedSpec) -> EngineCost:
    """The manual's figure: 4 n + K cycles."""
    results = max((per_partition(x) for x in event.writes), default=0)
    count, remaining = number(event, "n", elements(event)), number(event, "k", float(results))
    cycles = n.gpsimd_topk_cycles * count + remaining
    return _gpsimd_cost(cycles / n.gpsimd_ghz, n)


def barrier(_event: Event, n: ResolvedSpec) -> EngineCost:
    """Announce arrival to the other core and wait for its arrival."""
    return EngineCost(n.core_barrier_ns, n.core_barrier_ns, 0.0)


def register(event: Event, n: ResolvedSpec) -> EngineCost:
    """A register operation of a sequencer; loads and stores reach memory."""
    reaches = event.op.endswith(("_load", "_store"))
    time = n.register_memory_ns if reaches else n.register_ns
    return EngineCost(time, time, 0.0)
