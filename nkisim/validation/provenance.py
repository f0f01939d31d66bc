"""`python -m validation.provenance [--out FILE]`: every constant of the chip, its range and its source."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from nkisim import command
from nkisim.command import Parser
from nkisim.timeline.chip import DMA_OVERVIEW, KERNEL_OPT, LEDGER, PUBLIC_PROFILES, TILED, Chip, Constant
from nkisim.timeline.trn2 import TRN2
from validation.library import rows as library_rows
from validation.operators import OPERATORS
from validation.rows import ROWS
from validation.second_batch import LATER
from validation.third_batch import COMPLETING, WITH_GELU

TITLE = "## Every constant"
HEAD = f"""{TITLE}

Written by `python -m validation.provenance --out docs/time.md` from `src/nkisim/timeline/trn2.py`.
Times and counts are in the stated unit; the range is the band's, from the fast end to the slow end.

* documented: stated in the manual (paths are relative to aws-neuron-sdk);
* profile: read off an official profiler screenshot in the manual;
* measured: follows from public measurements of kernels;
* inferred: our estimate.
"""
# the rows that a constant was read off, where its source holds many
FITTED = {
    "tensor_strided_columns_per_cycle": "output_projection_tkg[4], attention_tkg[0]",
    "tensor_lift_work": "conv1d[2]",
    "vector_pointer_bytes": "rmsnorm_quant, cross_entropy_backward",
    "vector_scan_cycles": "Mamba",
    "vector_scan_cast_cycles": "cumsum[3]",
    "vector_eight_ns": "argsort_unstable",
    "dma_index_ns": "permute_routed_tokens",
    "dma_swdge_start_ns": "sweep of blocks",
    "dma_swdge_engine_ns": "sweep of blocks",
    "dma_swdge_full_tile_share": "sweep of blocks",
    "dma_swdge_store_share": "sums of vectors, transposes",
    "dma_ring_ns": "sums of vectors",
    "hbm_bytes_per_ns": "decode MLPs of nki-library on two cores, 4 to 177 MB",
    "core_semaphore_ns": "qkv_tkg, mlp_tkg and router_topk on two cores",
    "profiled_launch_ns": "the 21 rows below 30 us",
    "residual_share": "the 61 rows that run",
}
# laws that are no constant, and what each was read off
LAWS = {
    "the latency is the lesser of two orders": "one author's ten versions of a kernel, `cross_entropy_backward`",
    "a pipelining compiler looks 300 instructions ahead, and loads go in the order of use": PUBLIC_PROFILES,
    "a copy without an engine goes to Vector or Scalar, whichever ends it first": PUBLIC_PROFILES,
    "the sync engine's loads do not wait for its stores": "assumed: a compiler moves loads ahead of stores that wait",
    "next-fit placement, tensors that stay at the lowest bytes": "products: 4096 x 256 x 6144, fp32 with 8 row tiles",
    "the throttle counts rows times busy time": "products over 1, 64 and 80 rows, conv1d[2]",
    "weights load during the running product": KERNEL_OPT,
    "an fp32 product is two passes of two cycles a column": KERNEL_OPT,
    "products in different columns of the array overlap": TILED,
    "a (P, 1) operand takes bytes of a performance mode": "rmsnorm_quant, cross_entropy_backward",
    "a scan takes a second cycle where it casts": "cumsum[3]",
    "a gather on GpSimd takes its time by what it gathers": "rotational_topk",
    "a DMA engine serves eight partitions": DMA_OVERVIEW,
    "or eight rows, where a partition has several of 64 bytes or more": "one kernel; the least certain law here",
    "software takes a time for each DMA engine, less for full tiles, more for stores": "sweep of blocks",
    "transfers of few partitions alternate on the ring of one engine": "sums of one element a partition",
    "`dge_mode.unknown` runs as software descriptors do": PUBLIC_PROFILES,
    "an engine that only read frees its operand early": "assumed",
    "a collective has a start, hops and bytes; ranks of several chips wait for the slowest": LEDGER,
}
# rows of the vendor's kernels that the simulator refuses, so that nothing was fitted to them
REFUSED = frozenset({"mlp_tkg[2]"})


def table(chip: Chip = TRN2) -> str:
    """A line for each constant."""
    lines = ["| constant | value | range | unit | kind | source | rows |", "|---|---|---|---|---|---|---|"]
    for name, c in chip.constants().items():
        cells = (f"`{name}`", f"{c.value:g}", _range(c), c.unit, c.kind, c.source, FITTED.get(name, ""))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _range(c: Constant) -> str:
    ends = (c.at("low"), c.at("high"))
    return "" if ends == (c.value, c.value) else f"{ends[0]:g} to {ends[1]:g}"


def laws() -> str:
    """A line for each law that is no constant."""
    lines = ["### Laws without a constant", "", "| law | read off |", "|---|---|"]
    return "\n".join([*lines, *(f"| {law} | {source} |" for law, source in LAWS.items())])


def divided() -> str:
    """Which measured rows constants were fitted to, which were only seen, and which nobody here has seen."""
    given = sum(row.id not in REFUSED for row in library_rows())
    pages = "[results.md](../validation/results.md), [library.md](../validation/library.md)"
    seen = f"{len(OPERATORS)} of operators, {len(LATER)} later, {len(COMPLETING) + len(WITH_GELU)} completing ones"
    lines = [
        "### Rows\n",
        "| rows | which | figures |",
        "|---|---|---|",
        f"| fitted | {len(ROWS)} of the first records, {given} of the vendor's kernels | {pages} |",
        f"| seen, to check laws | {seen} | the first page |",
        "| never seen | 65 of the vendor's kernels, which are not in this repository | none here |",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Print the section, or write it as the end of a page."""
    parser = Parser(prog="python -m validation.provenance", description=main.__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="a page in Markdown that the section ends")
    options = parser.parse_args(arguments)
    text = section()
    if options.out:
        before = options.out.read_text(encoding="utf-8").partition(TITLE)[0] if options.out.exists() else ""
        options.out.write_text(before + text, encoding="utf-8")
    else:
        print(text)
    return 0


def section() -> str:
    """The section."""
    return f"{HEAD}\n{table()}\n\n{laws()}\n\n{divided()}"


if __name__ == "__main__":
    command.run(lambda: main(sys.argv[1:]))
