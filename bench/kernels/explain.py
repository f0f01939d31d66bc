"""A kernel's simulated time: its critical path by stage, and for attention a bound from the chip's constants.

Verification: the bound is the longer of two paths. Values: the first transfer starts, the DMA engines move the cache
and the rows without a pause, and after the last byte one product of the least width, one pass of the Vector Engine over
a row's D numbers and one store remain. Keys: all of them travel first, and after the last one a product, a maximum, an
exponential and a second product follow each other, one column each. All other work counts as hidden, and the Tensor
Engine runs at full clock. Two cores halve the sequences and share the stack's bandwidth.

Prompts: the Vector Engine alone takes maxima, of one number a cycle and partition; every score passes it once.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from bench.table import markdown
from nki_kernels.roofline import AttentionDims, prompt_attention, verify_attention
from nkisim.event import Event
from nkisim.timeline.costs.dma import COLLECTIVES, dma_cost, is_store
from nkisim.timeline.schedule import Schedule, schedule
from nkisim.timeline.trn2 import TRN2

# partitions that a transfer fills at most: keys have D of them, values one for every run of slots
PARTITIONS = 128


@cache
def _functions(path: str) -> tuple[tuple[int, int, str], ...]:
    """First line, last line and name of each function of a file."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return tuple((node.lineno, node.end_lineno or node.lineno, node.name) for node in nodes)


def stage(event: Event) -> str:
    """The kernel's function and the engine of an event; transfers are loads, stores, exchanges or collectives."""
    if event.op == "sendrecv" or event.op in COLLECTIVES:
        return event.op
    if event.engine == "dma":
        return "store" if is_store(event) else "load"
    path, line = event.line
    return f"{next(name for first, last, name in _functions(path) if first <= line <= last)}, {event.engine}"


def path_us(events: Sequence[Event], timed: Schedule) -> dict[str, tuple[float, float]]:
    """Microseconds of the critical path by stage, and how many of them move or compute data, in the path's order."""
    stages: dict[str, tuple[float, float]] = {}
    for event, parts in timed.critical:
        name = stage(events[event])
        whole, data = stages.get(name, (0.0, 0.0))
        whole += sum(ns for _, ns in parts) / 1e3
        data += sum(ns for cause, ns in parts if cause.endswith("data")) / 1e3
        stages[name] = whole, data
    return stages


def explained(events: Sequence[Event]) -> str:
    """The critical path as a table: fixed costs are instructions that wait for each other."""
    path = path_us(events, schedule(events, band=False))
    total = tuple(sum(column) for column in zip(*path.values(), strict=True))
    lines = [[name, f"{whole:.2f}", f"{data:.2f}"] for name, (whole, data) in (*path.items(), ("all", total))]
    return markdown(["stage of the critical path", "us (simulated)", "of them data"], lines)


def sums_ns(events: Sequence[Event]) -> float:
    """Nanoseconds that no schedule with these all-reduces can beat, each of which needs the one before it.

    The stores of the last product, the cores' barrier, the collective and the loads of the sum, and no work between.
    """
    n, cores = TRN2.at("nominal"), len({event.core for event in events})
    fixed = 2 * (n.dma_trigger_ns + n.dma_tail_ns + n.dma_semaphore_ns) + n.dma_store_lead_ns + n.dma_load_lead_ns
    fixed += (n.core_semaphore_ns + n.core_barrier_ns) * (cores > 1)
    sums = [dma_cost(event, n) for event in events if event.op == "all_reduce" and event.core == events[0].core]
    return sum(fixed + cost.lead + cost.shares[0][1] for cost in sums)


def _bytes_ns(d: AttentionDims, cores: int) -> float:
    """The cache's bytes at the roofline's rate."""
    n = TRN2.at("nominal")
    return verify_attention(d).hbm_bytes / min(cores * n.dma_engines * n.dma_bytes_per_ns, n.hbm_bytes_per_ns)


def _arrival_ns(d: AttentionDims, cores: int, share: float) -> float:
    """Until the last byte of a share of the cache is on chip, each core with its sequences."""
    n, cache_ns = TRN2.at("nominal"), _bytes_ns(d, cores)
    d = replace(d, batch=d.batch // cores)
    # a descriptor moves a range that is contiguous on both sides: a key dimension's slots, a partition's values
    descriptors = share * d.batch * d.kv_heads * (d.dim + min(PARTITIONS, d.slots)) * n.dma_descriptor_ns
    rows = d.batch * (d.heads + 2 * d.kv_heads) * d.candidates
    small = rows * (n.dma_descriptor_ns + d.dim * d.itemsize / n.dma_bytes_per_ns)
    first, last = n.dma_trigger_ns + n.dma_load_lead_ns, n.dma_tail_ns + n.dma_semaphore_ns
    return float(first + share * cache_ns + (descriptors + small) / n.dma_engines + last)


def _product_ns() -> float:
    n = TRN2.at("nominal")
    return float((n.tensor_min_cycles + n.tensor_issue_cycles) / n.tensor_ghz + n.tensor_drain_ns + n.semaphore_ns)


def _result_ns(d: AttentionDims) -> float:
    """After the last product: the division of D columns and the store of one row."""
    n = TRN2.at("nominal")
    division = d.dim / n.vector_ghz + n.vector_latency_ns + n.vector_pointer_ns
    store = n.semaphore_ns + n.dma_trigger_ns + n.dma_store_lead_ns + n.dma_descriptor_ns + n.dma_tail_ns
    return float(division + store + d.dim * d.itemsize / n.dma_bytes_per_ns)


def bound_ns(d: AttentionDims, cores: int = 1) -> float:
    """Nanoseconds that no order of verification attention can beat: the longer of both paths."""
    n = TRN2.at("nominal")
    softmax = 1 / n.vector_ghz + n.vector_latency_ns + 1 / n.scalar_ghz + n.scalar_latency_ns + 2 * n.semaphore_ns
    values = _arrival_ns(d, cores, 1.0) + _product_ns()
    keys = _arrival_ns(d, cores, 0.5) + 2 * _product_ns() + softmax
    return max(values, keys) + _result_ns(d)


def prompt_bound_ns(d: AttentionDims, cores: int = 1) -> float:
    """Nanoseconds that no order of prompt attention with exact maxima can beat: one pass over all visible scores."""
    scores = prompt_attention(d).flops / (4 * d.dim)
    return scores / (cores * PARTITIONS * TRN2.at("nominal").vector_ghz)


def best_share(d: AttentionDims, cores: int = 1) -> float:
    """The share of the HBM roofline that a kernel on the bound would reach."""
    return _bytes_ns(d, cores) / bound_ns(d, cores)
