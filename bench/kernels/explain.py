"""A kernel's simulated time: its critical path by stage, and lower bounds from the chip's constants.

Prompt attention: only the Vector Engine computes maxima, one element per cycle and partition, and it reads every score.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from bench.table import markdown
from nki_kernels.roofline import AttentionDims, prompt_attention
from nkisim.event import Event
from nkisim.timeline.costs.dma import COLLECTIVES, dma_cost, is_store
from nkisim.timeline.schedule import Schedule, schedule
from nkisim.timeline.trn2 import TRN2

PARTITIONS = 128


@cache
def _functions(path: str) -> tuple[tuple[int, int, str], ...]:
    """First line, last line and name of each function of a file."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return tuple((node.lineno, node.end_lineno or node.lineno, node.name) for node in nodes)


def stage(event: Event) -> str:
    """The function and the engine of an event; a transfer is a load, a store, an exchange or a collective."""
    if event.op == "sendrecv" or event.op in COLLECTIVES:
        return event.op
    if event.engine == "dma":
        return "store" if is_store(event) else "load"
    path, line = event.line
    return f"{next(name for first, last, name in _functions(path) if first <= line <= last)}, {event.engine}"


def path_us(events: Sequence[Event], timed: Schedule) -> dict[str, tuple[float, float]]:
    """(microseconds, microseconds that move or compute data) of each stage of the critical path, in its order."""
    stages: dict[str, tuple[float, float]] = {}
    for event, parts in timed.critical:
        name = stage(events[event])
        us, data_us = stages.get(name, (0.0, 0.0))
        us += sum(ns for _, ns in parts) / 1e3
        data_us += sum(ns for cause, ns in parts if cause.endswith("data")) / 1e3
        stages[name] = us, data_us
    return stages


def explained(events: Sequence[Event]) -> str:
    """The critical path as a table; time without data is fixed costs of instructions that wait for each other."""
    path = path_us(events, schedule(events, band=False))
    total = tuple(sum(column) for column in zip(*path.values(), strict=True))
    lines = [[name, f"{us:.2f}", f"{data_us:.2f}"] for name, (us, data_us) in (*path.items(), ("all", total))]
    return markdown(["stage of the critical path", "us (simulated)", "data, us"], lines)


def sums_ns(events: Sequence[Event]) -> float:
    """Lower bound in nanoseconds of any schedule of these all-reduces: each needs the previous one's sum.

    Counts the store of the last product, the core barrier, the collective and the load of the sum, no other work.
    """
    n, cores = TRN2.at("nominal"), len({event.core for event in events})
    fixed = 2 * (n.dma_trigger_ns + n.dma_tail_ns + n.dma_semaphore_ns) + n.dma_store_lead_ns + n.dma_load_lead_ns
    fixed += (n.core_semaphore_ns + n.core_barrier_ns) * (cores > 1)
    sums = [dma_cost(event, n) for event in events if event.op == "all_reduce" and event.core == events[0].core]
    return sum(fixed + cost.lead + cost.shares[0][1] for cost in sums)


def prompt_bound_ns(d: AttentionDims, cores: int = 1) -> float:
    """Lower bound in nanoseconds of prompt attention with exact maxima: one pass over all visible scores."""
    scores = prompt_attention(d).flops / (4 * d.dim)
    return scores / (cores * PARTITIONS * TRN2.at("nominal").vector_ghz)
