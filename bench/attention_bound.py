"""`python -m bench.attention_bound`: what no order of verification attention can beat, from the chip's constants.

The longer of two paths. Values: the first transfer starts, the DMA engines move the cache and the rows without a
pause, and after the last byte one product of the least width, one pass of the Vector Engine over a row's D numbers and
one store remain. Keys: all of them travel first, and after the last one a product, a maximum, an exponential and a
second product follow each other, of one column each. All else is taken to be hidden, and the Tensor Engine to run at
full clock. Two cores halve the sequences, and their engines draw no more than the stack of HBM gives.

The second table has what the committed run beside the vendor's kernel took, and how many times as fast as that a
kernel on the bound would be.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bench.tune.text import markdown
from model.errors import run_cli
from nki_kernels.roofline import AttentionDims, verify_attention
from nkisim.timeline.trn2 import TRN2

# partitions that a transfer fills at most: keys have D of them, values one for every run of slots
PARTITIONS = 128
# the shard of Qwen3-32B at tp 32, as beside the vendor's kernel
SHARD = AttentionDims(4, 2, 1, 8, 1024, 128, 2)
_MEASURED = Path(__file__).parent / "results" / "against_vendor.json"


class PathPart(NamedTuple):
    """One part of the path and its nanoseconds."""

    name: str
    ns: float


def _bytes_ns(d: AttentionDims, cores: int) -> float:
    """The cache's bytes at the roofline's rate."""
    n = TRN2.at("nominal")
    return verify_attention(d).hbm_bytes / min(cores * n.dma_engines * n.dma_bytes_per_ns, n.hbm_bytes_per_ns)


def _arrival(d: AttentionDims, cores: int, share: float) -> tuple[PathPart, ...]:
    """The first of the parts: the last byte of a share of the cache is on chip, each core with its sequences."""
    n, cache_ns = TRN2.at("nominal"), _bytes_ns(d, cores)
    d = replace(d, batch=d.batch // cores)
    groups = d.batch * d.kv_heads
    # a descriptor moves what lies together on both sides: a key dimension's slots, a partition's values
    cached = groups * (d.dim + min(PARTITIONS, d.slots))
    rows = d.batch * (d.heads + 2 * d.kv_heads) * d.candidates
    small = rows * (n.dma_descriptor_ns + d.dim * d.itemsize / n.dma_bytes_per_ns) / n.dma_engines
    return (
        PathPart("first transfer: trigger and lead", n.dma_trigger_ns + n.dma_load_lead_ns),
        PathPart("bytes of the cache", share * cache_ns),
        PathPart("their descriptors", share * cached * n.dma_descriptor_ns / n.dma_engines),
        PathPart("queries and new rows", small),
        PathPart("completion and semaphore", n.dma_tail_ns + n.dma_semaphore_ns),
    )


def _product() -> PathPart:
    n = TRN2.at("nominal")
    columns = n.tensor_min_cycles + n.tensor_issue_cycles
    return PathPart("one product", columns / n.tensor_ghz + n.tensor_drain_ns + n.semaphore_ns)


def _result(d: AttentionDims) -> tuple[PathPart, ...]:
    """What follows the last product."""
    n = TRN2.at("nominal")
    return (
        PathPart("division of D columns", d.dim / n.vector_ghz + n.vector_latency_ns + n.vector_pointer_ns),
        PathPart("store of one row", n.semaphore_ns + n.dma_trigger_ns + n.dma_store_lead_ns + n.dma_descriptor_ns
             + d.dim * d.itemsize / n.dma_bytes_per_ns + n.dma_tail_ns),
    )  # fmt: skip


def value_path(d: AttentionDims, cores: int = 1) -> tuple[PathPart, ...]:
    """The steps that follow each other if the values come last."""
    return *_arrival(d, cores, 1.0), _product(), *_result(d)


def key_path(d: AttentionDims, cores: int = 1) -> tuple[PathPart, ...]:
    """The steps that follow each other behind the keys, if they come first."""
    n = TRN2.at("nominal")
    softmax = (
        PathPart("maximum of a column", 1 / n.vector_ghz + n.vector_latency_ns + n.semaphore_ns),
        PathPart("exponential of a column", 1 / n.scalar_ghz + n.scalar_latency_ns + n.semaphore_ns),
    )
    return *_arrival(d, cores, 0.5), _product(), *softmax, _product(), *_result(d)


def bound_ns(d: AttentionDims, cores: int = 1) -> float:
    """Nanoseconds that the longer path takes at least."""
    return max(sum(step.ns for step in path(d, cores)) for path in (value_path, key_path))


def best_share(d: AttentionDims, cores: int = 1) -> float:
    """The share of the HBM roofline that a kernel on the bound would reach."""
    return _bytes_ns(d, cores) / bound_ns(d, cores)


def beside_the_vendor() -> list[list[str]]:
    """A line a length and number of cores: the bound, what both kernels took, and the most that the bound leaves."""
    lines = []
    for row in json.loads(_MEASURED.read_text(encoding="utf-8"))["rows"]:
        d, cores, ours, theirs = replace(SHARD, slots=row["slots"]), row["lnc"], row["ours"]["us"], row["vendor"]["us"]
        bound_us = bound_ns(d, cores) / 1e3
        shares = (f"{share:.0%}" for share in (best_share(d, cores), row["ours"]["roofline_share"]))
        ratios = (f"{theirs / us:.2f}" for us in (ours, bound_us))
        lines.append(
            [f"{d.slots}", f"{cores}", f"{bound_us:.2f}", next(shares), f"{ours:.2f}", next(shares), f"{theirs:.2f}",
             *ratios]
        )  # fmt: skip
    return lines


def main() -> None:
    """Print the paths at S = 1024 step by step on one core and two, then the bound over lengths."""
    for path in (value_path, key_path):
        parts = list(zip(path(SHARD), path(SHARD, cores=2), strict=True))
        for one, two in parts:
            print(f"{one.ns:8.0f} {two.ns:8.0f} ns  {one.name}")
        print(f"{sum(one.ns for one, _ in parts):8.0f} {sum(two.ns for _, two in parts):8.0f} ns  {path.__name__}\n")
    heads = [
        "S",
        "cores",
        "at least, us",
        "roofline",
        "ours, us",
        "roofline",
        "vendor's, us",
        "times as fast",
        "at most",
    ]
    print("All simulated:\n\n" + markdown(heads, beside_the_vendor()))


if __name__ == "__main__":
    run_cli(main)
