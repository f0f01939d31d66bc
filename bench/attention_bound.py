"""`python -m bench.attention_bound`: what no order of verification attention can beat, from the chip's constants.

The values' path alone: the first transfer starts, the DMA engines move the cache and the rows without a pause, and
after the last byte one product of the least width, one pass of the Vector Engine over a row's D numbers and one store
remain. Keys, maxima and exponentials are taken to be hidden entirely, and the Tensor Engine to run at full clock.
"""

from __future__ import annotations

from typing import NamedTuple

from model.errors import run_cli
from nki_kernels.roofline import AttentionDims, verify_attention
from nkisim.timeline.trn2 import TRN2

# partitions that a transfer fills at most: keys have D of them, values one for every run of slots
PARTITIONS = 128


class PathPart(NamedTuple):
    """One part of the path and its nanoseconds."""

    name: str
    ns: float


def value_path(d: AttentionDims) -> tuple[PathPart, ...]:
    """The steps that follow each other whatever else the kernel does, on one core."""
    n = TRN2.at("nominal")
    rate, groups = n.dma_engines * n.dma_bytes_per_ns, d.batch * d.kv_heads
    # a descriptor moves what lies together on both sides: a key dimension's slots, a partition's values
    cached = groups * (d.dim + min(PARTITIONS, d.slots))
    rows = d.batch * (d.heads + 2 * d.kv_heads) * d.candidates
    small = rows * (n.dma_descriptor_ns + d.dim * d.itemsize / n.dma_bytes_per_ns) / n.dma_engines
    columns = n.tensor_min_cycles + n.tensor_issue_cycles
    return (
        PathPart("first transfer: trigger and lead", n.dma_trigger_ns + n.dma_load_lead_ns),
        PathPart("bytes of the cache", verify_attention(d).hbm_bytes / rate),
        PathPart("their descriptors", cached * n.dma_descriptor_ns / n.dma_engines),
        PathPart("queries and new rows", small),
        PathPart("completion and semaphore", n.dma_tail_ns + n.dma_semaphore_ns),
        PathPart("one product", columns / n.tensor_ghz + n.tensor_drain_ns + n.semaphore_ns),
        PathPart("division of D columns", d.dim / n.vector_ghz + n.vector_latency_ns + n.vector_pointer_ns),
        PathPart("store of one row", n.semaphore_ns + n.dma_trigger_ns + n.dma_store_lead_ns + n.dma_descriptor_ns
             + d.dim * d.itemsize / n.dma_bytes_per_ns + n.dma_tail_ns),
    )  # fmt: skip


def bound_ns(d: AttentionDims) -> float:
    """Nanoseconds that the path takes at least."""
    return sum(step.ns for step in value_path(d))


def best_share(d: AttentionDims) -> float:
    """The share of the HBM roofline that a kernel on the bound would reach."""
    n = TRN2.at("nominal")
    return verify_attention(d).hbm_bytes / (n.dma_engines * n.dma_bytes_per_ns) / bound_ns(d)


def main() -> None:
    """Print the path at S = 1024 step by step, then the bound over lengths."""
    shard = AttentionDims(4, 2, 1, 8, 1024, 128, 2)
    for step in value_path(shard):
        print(f"{step.ns:8.0f} ns  {step.name}")
    for slots in (1024, 2048, 4096, 8192, 16384):
        d = AttentionDims(4, 2, 1, 8, slots, 128, 2)
        least = f"S {slots}: at least {bound_ns(d) / 1e3:.2f} us (simulated)"
        print(f"{least}, at most {best_share(d):.1%} of the roofline")


if __name__ == "__main__":
    run_cli(main)
