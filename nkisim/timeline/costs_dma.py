"""Cost law of data movement: DMA transfers over queues and engines, and collectives.

A transfer passes a trigger, descriptor generation, a fixed lead, the data phase on the engines
that serve its partitions, and a tail with the completion. Rows pay a fixed cost each.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from nkisim.dtypes import INFO
from nkisim.errors import NotSimulated
from nkisim.event import Event, Extent
from nkisim.timeline.costs import number, words

TRANSFERS = frozenset({"dma_copy", "dma_transpose", "dma_compute", "sendrecv"})
COLLECTIVES = words(
    "all_reduce all_gather all_gather_v reduce_scatter all_to_all all_to_all_v collective_permute "
    "collective_permute_implicit collective_permute_implicit_reduce rank_id "
    "collective_permute_implicit_current_processing_rank_id"
)


@dataclass(frozen=True, slots=True)
class DmaCost:
    """Nanoseconds of one transfer; `shares` are (engine, ns of data phase) pairs."""

    trigger: float
    interval: float
    lead: float
    tail: float
    shares: tuple[tuple[int, float], ...]
    hbm: float


def extent_bytes(extent: Extent) -> int:
    """Bytes that one operand addresses."""
    return extent.elements * INFO[extent.dtype].itemsize


def hbm_bytes(event: Event) -> int:
    """Bytes that the event reads from and writes to HBM."""
    return sum(extent_bytes(x) for x in (*event.reads, *event.writes) if x.space == "hbm")


def is_store(event: Event) -> bool:
    """Whether the transfer ends in HBM and not in an on-chip memory."""
    return bool(event.writes) and event.writes[0].space == "hbm"


def issuer_of(event: Event) -> str:
    """The sequencer that triggers the transfer; descriptors made in software come from GpSimd."""
    if event.work.get("dge") == "swdge":
        return "gpsimd"
    return str(event.work.get("issuer") or "sync")


def _engine_shares(event: Event, n: SimpleNamespace) -> list[tuple[int, float]]:
    """Each DMA engine that takes part and its share: an engine serves eight partitions."""
    on_chip = [x for x in (*event.writes, *event.reads) if x.space != "hbm"]
    engines, width = int(n.dma_engines), int(n.dma_partitions_per_engine)
    if not on_chip:
        return [(e, 1.0 / engines) for e in range(engines)]
    start, stop = on_chip[0].partitions
    total = max(1, stop - start)
    shares = []
    for engine in range(start // width, -(-stop // width)):
        low, high = max(start, engine * width), min(stop, (engine + 1) * width)
        shares.append((engine % engines, (high - low) / total))
    return shares


def _rate(event: Event, n: SimpleNamespace) -> float:
    """Bytes per nanosecond of one DMA engine."""
    rate: float = n.dma_bytes_per_ns
    if event.work.get("transpose"):
        from_hbm = any(x.space == "hbm" for x in event.reads)
        rate *= n.dma_transpose_hbm_share if from_hbm else n.dma_transpose_sbuf_share
    return rate


def transfer(event: Event, n: SimpleNamespace) -> DmaCost:
    """The law of dma_copy, dma_transpose, dma_compute and sendrecv."""
    size = number(event, "bytes") or float(sum(extent_bytes(x) for x in event.writes))
    rows = number(event, "rows") or max(1.0, size / max(1.0, number(event, "row_bytes", size)))
    dge = event.work.get("dge")
    hbm = hbm_bytes(event) / n.hbm_bytes_per_ns
    if event.work.get("dma_engine") == "gpsimd_dma":
        data = size / n.gpsimd_dma_bytes_per_ns
        return DmaCost(n.dma_swdge_engine_ns, 0.0, n.gpsimd_dma_latency_ns, 0.0, ((-1, data),), hbm)
    whole = rows * n.dma_descriptor_ns + size / _rate(event, n)
    shares = tuple((engine, whole * share) for engine, share in _engine_shares(event, n))
    lead = n.dma_store_lead_ns if is_store(event) else n.dma_load_lead_ns
    trigger, interval = n.dma_trigger_ns, n.dma_hwdge_interval_ns
    if dge == "swdge":
        trigger = n.dma_swdge_engine_ns + rows * n.dma_swdge_descriptor_ns
        interval = n.dma_swdge_interval_ns
    elif dge == "none":
        interval = n.dma_trigger_ns
    return DmaCost(trigger, interval, lead, n.dma_tail_ns, shares, hbm)


def collective(event: Event, n: SimpleNamespace) -> DmaCost:
    """A latency and a share of the links; the least certain law here."""
    size = float(sum(extent_bytes(x) for x in event.writes))
    data = size / n.collective_bytes_per_ns
    lead = n.collective_latency_ns if size else n.register_ns
    return DmaCost(n.dma_trigger_ns, 0.0, lead, 0.0, ((-2, data),), hbm_bytes(event) / n.hbm_bytes_per_ns)


def dma_cost(event: Event, n: SimpleNamespace) -> DmaCost:
    """The law of one data movement.

    Raises:
        NotSimulated: the operation is not a data movement that has a law.
    """
    if event.op in TRANSFERS:
        return transfer(event, n)
    if event.op in COLLECTIVES:
        return collective(event, n)
    raise NotSimulated(event.op, "time", "no cost law for it on the dma engines")
