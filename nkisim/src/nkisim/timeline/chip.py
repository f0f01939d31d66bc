"""The chip as one frozen value: every number that the simulator knows about the hardware.

Each constant states its unit, its source and its kind:
  documented  stated in the vendor's manual,
  profile     read off an official profiler screenshot in the manual (1 to 4 % reading error),
  measured    follows from public measurements of kernels on the chip, with their spread,
  inferred    our estimate; it carries the values that give the lowest and the highest latency.
Source paths are relative to the manual (aws-neuron-sdk); NKL is nki-library.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Generic, TypeVar

from nkisim.geometry import Geometry

CASES = ("low", "nominal", "high")

A3 = "nki/guides/architecture/trainium2_arch.rst"
A2 = "nki/guides/architecture/trainium_inferentia2_arch.rst (v2 guide, carried over)"
DMA_OVERVIEW = "nki/get-started/about/nki-dma-overview.rst"
KERNEL_OPT = "nki/guides/tutorials/kernel-optimization.rst, profiles v2 to v5"
RMSNORM_QUANT = "nki/library/specs/design-rmsnorm-quant.rst, profiles"
SHARED_API = "nki/api/nki.api.shared.rst"
GLOSSARY = "tools/neuron-explorer/glossary.rst"
LNC = "about-neuron/arch/neuron-features/logical-neuroncore-config.rst"
NO_SOURCE = "no published figure"
REDUCES = "a public record of 80 all-reduces of 8 KB in a row, 4 ranks of two cores on one chip: 13.0 to 13.8 us"
GATHERS = "a public record of all-gathers of 8 B and 2 KB, 4 ranks on one chip: 22 to 27 us, 22 to 34"
LEDGER = "a public ledger of 630 all-reduces of 64 ranks: least 17.5 us, median 44.2, 90th percentile 135"
MEGAKERNEL = "github.com/KevGomes1403/nki-moe-megakernel: 10.31 ms a step on the host, 9.50 on the device"
COLLECTIVE_DOC = "neuron-runtime/explore/intranode-collective-comm.rst"
CHIPBOOST = "github.com/yahavb/trainium-agent-labs, projects/03-chipboost (validation/rows.py)"
CS149 = "github.com/xaviergonzalez/asst4-trainium2, writeup.md (validation/rows.py)"
CS149_PROFILES = "github.com/rishic3/asst4-trainium2, part1/profile_view_*.txt"
KDA = "github.com/Jerry2423/kda-for-trainium (validation/operators.py)"
NAKB = "github.com/awslabs/nki-autotune, benchmark (validation/library_rows.json)"
TILED = "a public microbenchmark of column-tiled products: 1.38 columns a cycle in turn, 1.08 in one place"
PUBLIC_PROFILES = "public trn2 profile records of about a hundred kernels"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Constant:
    """One number with its unit, source and kind; `low` and `high` are the latency band's ends."""

    value: float
    unit: str
    source: str
    kind: str = "documented"
    low: float | None = None
    high: float | None = None

    @property
    def count(self) -> int:
        """The value of a constant that counts something."""
        return int(self.value)

    def at(self, case: str) -> float:
        """The value for one case of the band."""
        bound = {"low": self.low, "high": self.high}.get(case)
        return self.value if bound is None else bound


def documented(value: float, unit: str, source: str) -> Constant:
    """A number stated in the manual's text."""
    return Constant(value, unit, source)


def profile(value: float, unit: str, source: str, low: float, high: float) -> Constant:
    """A number read off a published profile, with the range of its readings."""
    return Constant(value, unit, source, "profile", low, high)


def measured(value: float, unit: str, source: str, low: float, high: float) -> Constant:
    """A number that many public measurements of kernels agree on, with their range."""
    return Constant(value, unit, source, "measured", low, high)


def inferred(value: float, unit: str, why: str, low: float, high: float) -> Constant:
    """Our estimate, with the range that the uncertainty band explores."""
    return Constant(value, unit, why, "inferred", low, high)


@dataclass(frozen=True, slots=True)
class ChipSpec(Generic[T]):
    """The facts of one accelerator generation; field names carry the quantity, `unit` the unit."""

    name: str

    # sizes of memories and tiles
    geometry: Geometry

    # tensor engine
    tensor_ghz: T
    tensor_min_cycles: T
    tensor_issue_cycles: T
    tensor_drain_ns: T
    tensor_fp32_passes: T
    tensor_fp32_cycles_per_column: T
    tensor_load_columns_per_cycle: T
    tensor_strided_columns_per_cycle: T
    tensor_load_exposed_ns: T
    tensor_tiled_rate: T
    tensor_rotated_rate: T
    tensor_throttle_share: T
    tensor_throttle_window_ns: T
    tensor_lift_work: T
    tensor_throttle_work: T
    tensor_bf16_tflops: T
    tensor_fp32_tflops: T
    tensor_fp8_tflops: T

    # vector engine
    vector_ghz: T
    vector_latency_ns: T
    vector_gap_ns: T
    vector_pointer_ns: T
    vector_min_cycles: T
    vector_wide_elements: T
    vector_sbuf_elements: T
    vector_half_wide_elements: T
    vector_base_elements: T
    vector_mode_bytes: T
    vector_pointer_bytes: T
    vector_strided_bytes: T
    vector_reciprocal_cycles: T
    vector_scan_cycles: T
    vector_scan_cast_cycles: T
    vector_eight_ns: T
    vector_rng_cycles: T

    # scalar engine
    scalar_ghz: T
    scalar_latency_ns: T
    scalar_gap_ns: T
    scalar_read_cycles: T
    scalar_table_load_ns: T
    scalar_tables_resident: T

    # gpsimd engine
    gpsimd_ghz: T
    gpsimd_latency_ns: T
    gpsimd_gap_ns: T
    gpsimd_cycles: T
    gpsimd_rsqrt_cycles: T
    gpsimd_search_cycles: T
    gpsimd_gather_group_ns: T
    gpsimd_partition_reduce_cycles: T
    gpsimd_topk_cycles: T

    # dma
    dma_engines: T
    dma_partitions_per_engine: T
    dma_dealt_row_bytes: T
    dma_bytes_per_ns: T
    dma_descriptor_ns: T
    dma_load_lead_ns: T
    dma_store_lead_ns: T
    dma_tail_ns: T
    dma_trigger_ns: T
    dma_static_interval_ns: T
    dma_hwdge_interval_ns: T
    dma_swdge_start_ns: T
    dma_swdge_engine_ns: T
    dma_swdge_full_tile_share: T
    dma_swdge_store_share: T
    dma_index_ns: T
    dma_ring_ns: T
    dma_generator_depth: T
    dma_transpose_hbm_share: T
    dma_transpose_sbuf_share: T
    hbm_bytes_per_ns: T
    cores_per_hbm_stack: T
    gpsimd_dma_bytes_per_ns: T
    gpsimd_dma_latency_ns: T

    # handoffs
    semaphore_ns: T
    dma_semaphore_ns: T
    core_semaphore_ns: T
    core_barrier_ns: T
    register_ns: T
    register_memory_ns: T
    collective_start_ns: T
    collective_gather_start_ns: T
    collective_hop_ns: T
    collective_wait_ns: T
    collective_ring_share: T
    collective_bytes_per_ns: T

    # outside of a kernel's time: once per launch of a graph, on the device
    launch_ns: T
    # of a kernel that is profiled by itself, instead
    profiled_launch_ns: T
    # once per launch of a graph, on the host
    host_dispatch_ns: T
    # the compiler's window
    compiler_window: T
    # costs that no law here covers, as a factor of the band's ends
    unmodelled_share: T
    # how far measured kernels are from the nominal latency: nine of ten are nearer
    residual_share: T


@dataclass(frozen=True, slots=True)
class ResolvedSpec(ChipSpec[float]):
    """The plain numbers of one case of the band, in the units that the constants state."""


@dataclass(frozen=True, slots=True)
class Chip(ChipSpec[Constant]):
    """One accelerator generation, every number with its unit, source, kind and range."""

    def constants(self) -> dict[str, Constant]:
        """Every constant by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Constant)}

    def at(self, case: str) -> ResolvedSpec:
        """The plain numbers of one case: `low`, `nominal` or `high` latency."""
        return _numbers(self, case)


@lru_cache(maxsize=16)
def _numbers(chip: Chip, case: str) -> ResolvedSpec:
    if case not in CASES:
        raise ValueError(f"case {case!r} is not one of {', '.join(CASES)}")
    return ResolvedSpec(chip.name, chip.geometry, **{name: c.at(case) for name, c in chip.constants().items()})
