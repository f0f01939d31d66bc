"""Cost laws of data movement: DMA transfers over queues and engines, and collectives.

A transfer passes a trigger, descriptor generation, a fixed lead, the data phase on the engines
that serve its partitions, and a tail with the completion. Rows pay a fixed cost each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nkisim.dtypes import INFO
from nkisim.errors import NotSimulated
from nkisim.event import Event, Extent
from nkisim.timeline.chip import ResolvedSpec
from nkisim.timeline.costs.engines import number, words

# physical cores; a rank has one or two
CORES_PER_CHIP = 8
TRANSFERS = frozenset({"dma_copy", "dma_transpose", "dma_compute", "sendrecv", "sendrecv_compute"})
COLLECTIVES = words(
    "all_reduce all_gather all_gather_v reduce_scatter all_to_all all_to_all_v collective_permute "
    "collective_permute_implicit collective_permute_implicit_reduce rank_id "
    "collective_permute_implicit_current_processing_rank_id"
)


@dataclass(frozen=True, slots=True)
class DmaCost:
    """Nanoseconds of one transfer; `shares` are (engine, ns of data phase) pairs."""

    trigger: float
    # how long the transfer keeps its generator of descriptors, and which one that is
    interval: float
    generator: str
    lead: float
    tail: float
    shares: tuple[tuple[int, float], ...]
    hbm: float
    # bytes that pass through the DMA engines, once each
    moved: float = 0.0
    # the least time from one transfer to the next on each engine's ring, where descriptors come faster than that
    ring_interval: float = 0.0
    # how far its generator may run ahead: a queue of static descriptors holds some that are fetched already
    ahead: float = 0.0


def extent_bytes(extent: Extent) -> int:
    """Bytes that one operand addresses."""
    return extent.elements * INFO[extent.dtype].itemsize


def hbm_bytes(event: Event) -> int:
    """Bytes that the event reads from and writes to HBM."""
    return sum(extent_bytes(x) for x in (*event.reads, *event.writes) if x.space == "hbm")


def is_store(event: Event) -> bool:
    """Whether the transfer ends in HBM and not in an on-chip memory."""
    return bool(event.writes) and event.writes[0].space == "hbm"


def is_gather(event: Event) -> bool:
    """Whether software reads the rows to load from a tile; scatters wait for each other, which takes as long."""
    sources = 2 if event.op == "dma_compute" else 1
    return event.work.get("dge") == "swdge" and len(event.reads) > sources and not is_store(event)


def issuer_of(event: Event) -> str:
    """The sequencer that triggers the transfer; descriptors made in software come from GpSimd."""
    if event.work.get("dge") == "swdge":
        return "gpsimd"
    return str(event.work.get("issuer") or "sync")


def _engine_shares(event: Event, n: ResolvedSpec) -> list[tuple[int, float]]:
    """Each DMA engine that takes part and its share: an engine serves eight partitions."""
    on_chip = [x for x in (*event.writes, *event.reads) if x.space != "hbm"]
    engines, width = int(n.dma_engines), int(n.dma_partitions_per_engine)
    if not on_chip:
        return [(e, 1.0 / engines) for e in range(engines)]
    start, stop = on_chip[0].partitions
    partitions = max(1, stop - start)
    # several rows a partition are dealt out like rows of several partitions, eight to an engine, but for tiny ones
    rows = number(event, "rows")
    if rows > partitions and number(event, "row_bytes", n.dma_dealt_row_bytes) >= n.dma_dealt_row_bytes:
        stop = start + min(int(rows), width * engines)
    total = stop - start
    shares = []
    for engine in range(start // width, -(-stop // width)):
        low, high = max(start, engine * width), min(stop, (engine + 1) * width)
        shares.append((engine % engines, (high - low) / total))
    return shares


def _rate(event: Event, n: ResolvedSpec) -> float:
    """Bytes per nanosecond of one DMA engine."""
    rate: float = n.dma_bytes_per_ns
    if event.work.get("transpose"):
        from_hbm = any(x.space == "hbm" for x in event.reads)
        rate *= n.dma_transpose_hbm_share if from_hbm else n.dma_transpose_sbuf_share
    return rate


def generation(event: Event, n: ResolvedSpec, engines: int, full_tile: bool) -> tuple[float, float, str]:
    """Trigger, interval and name of the generator that makes a transfer's descriptors.

    The hardware's two generators take a fixed time per transfer. Software takes a start and a time for every
    DMA engine that it feeds, less where loads fill full tiles and need no order among them, and more where HBM has
    to acknowledge stored data. A choice left to the compiler (`unknown`) runs as software does, without
    keeping the GpSimd engine from its work.
    """
    dge = event.work.get("dge")
    if dge == "none":
        return n.dma_trigger_ns, n.dma_static_interval_ns, f"static queue of {'stores' if is_store(event) else 'loads'}"
    if dge == "hwdge":
        return n.dma_trigger_ns, n.dma_hwdge_interval_ns, f"hwdge {event.work.get('issuer')}"
    interval = n.dma_swdge_start_ns + engines * n.dma_swdge_engine_ns
    if full_tile:
        interval *= n.dma_swdge_full_tile_share
    elif is_store(event):
        interval *= n.dma_swdge_store_share
    return (interval if dge == "swdge" else n.dma_trigger_ns), interval, "swdge"


def transfer(event: Event, n: ResolvedSpec, full_tile: bool = False) -> DmaCost:
    """The law of dma_copy, dma_transpose, dma_compute and both sendrecv; `full` if it fills a tile on chip."""
    size = number(event, "bytes") or float(sum(extent_bytes(x) for x in event.writes))
    rows = number(event, "rows") or max(1.0, size / max(1.0, number(event, "row_bytes", size)))
    hbm = hbm_bytes(event) / n.hbm_bytes_per_ns
    if event.work.get("dma_engine") == "gpsimd_dma":
        data = size / n.gpsimd_dma_bytes_per_ns
        return DmaCost(n.dma_trigger_ns, 0.0, "gpsimd", n.gpsimd_dma_latency_ns, 0.0, ((-1, data),), hbm)
    busy = rows * n.dma_descriptor_ns + size / _rate(event, n)
    shares = tuple((engine, busy * share) for engine, share in _engine_shares(event, n))
    lead = n.dma_store_lead_ns if is_store(event) else n.dma_load_lead_ns
    lead += n.dma_index_ns * is_gather(event)
    trigger, interval, generator = generation(event, n, len(shares), full_tile)
    ring_interval = n.dma_ring_ns if generator == "swdge" and interval < n.dma_ring_ns else 0.0
    ahead = n.dma_generator_depth * interval if generator.startswith("static") else 0.0
    return DmaCost(trigger, interval, generator, lead, n.dma_tail_ns, shares, hbm, size, ring_interval, ahead)


def hops(ranks: int, lnc: int, n: ResolvedSpec) -> float:
    """Steps between chips that a reduction and the broadcast of its result take, on a ring or a torus of chips."""
    chips = -(-ranks * lnc // CORES_PER_CHIP)
    side = max(d for d in range(1, math.isqrt(chips) + 1) if chips % d == 0)
    torus, ring = side - 1 + chips // side - 1, chips - 1
    return 2 * (torus + n.collective_ring_share * (ring - torus))


def collective_ns(size_bytes: float, ranks: int, lnc: int, n: ResolvedSpec, gathers: bool = False) -> float:
    """One collective among a number of ranks of `lnc` cores: a start, its hops, waiting, and the bytes over the links.

    Ranks of different chips wait for the slowest one; on one chip no waiting was measured.
    """
    between = hops(ranks, lnc, n)
    start = n.collective_gather_start_ns if gathers else n.collective_start_ns
    fixed = start + between * n.collective_hop_ns + n.collective_wait_ns * (between > 0)
    return fixed + size_bytes / n.collective_bytes_per_ns


def collective(event: Event, n: ResolvedSpec) -> DmaCost:
    """A latency by the cores that take part and a share of the links; the least certain law here."""
    size, cores = float(sum(extent_bytes(x) for x in event.writes)), int(number(event, "cores", 1.0))
    lead = collective_ns(0.0, cores, 1, n, event.op.startswith("all_gather")) if size else n.register_ns
    data = size / n.collective_bytes_per_ns
    return DmaCost(n.dma_trigger_ns, 0.0, "links", lead, 0.0, ((-2, data),), hbm_bytes(event) / n.hbm_bytes_per_ns)


def dma_cost(event: Event, n: ResolvedSpec, full_tile: bool = False) -> DmaCost:
    """The law of one data movement.

    Raises:
        NotSimulated: the operation is not a data movement that has a law.
    """
    if event.op in TRANSFERS:
        return transfer(event, n, full_tile)
    if event.op in COLLECTIVES:
        return collective(event, n)
    raise NotSimulated(event.op, "time", "no cost law for it on the dma engines")
