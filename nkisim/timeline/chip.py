"""The chip as one frozen value: every number that the simulator knows about the hardware.

Each constant states its unit, its source and its kind:
  documented  stated in the text of the vendor's manual,
  profile     read off an official profiler screenshot in the manual (1 to 4 % reading error),
  inferred    our own estimate; it carries the values that give the lowest and the highest latency.
Source paths are relative to the manual (aws-neuron-sdk); NKL is nki-library.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from types import SimpleNamespace

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


def inferred(value: float, unit: str, why: str, low: float, high: float) -> Constant:
    """Our own estimate, with the range that the uncertainty band explores."""
    return Constant(value, unit, why, "inferred", low, high)


@dataclass(frozen=True, slots=True)
class Chip:
    """One accelerator generation; field names carry what they measure, `unit` says in what."""

    name: str

    # sizes of memories and tiles
    geometry: Geometry

    # tensor engine
    tensor_ghz: Constant
    tensor_min_cycles: Constant
    tensor_issue_cycles: Constant
    tensor_drain_ns: Constant
    tensor_fp32_passes: Constant
    tensor_fp32_cycles_per_column: Constant
    tensor_load_columns_per_cycle: Constant
    tensor_load_exposed_ns: Constant
    tensor_throttle_share: Constant
    tensor_throttle_window_ns: Constant
    tensor_throttle_utilisation: Constant
    tensor_bf16_tflops: Constant
    tensor_fp32_tflops: Constant
    tensor_fp8_tflops: Constant

    # vector engine
    vector_ghz: Constant
    vector_latency_ns: Constant
    vector_gap_ns: Constant
    vector_pointer_ns: Constant
    vector_min_cycles: Constant
    vector_wide_elements: Constant
    vector_sbuf_elements: Constant
    vector_half_wide_elements: Constant
    vector_base_elements: Constant
    vector_strided_bytes: Constant
    vector_reciprocal_cycles: Constant
    vector_scan_cycles: Constant
    vector_rng_cycles: Constant

    # scalar engine
    scalar_ghz: Constant
    scalar_latency_ns: Constant
    scalar_gap_ns: Constant
    scalar_read_cycles: Constant
    scalar_table_load_ns: Constant
    scalar_tables_resident: Constant

    # gpsimd engine
    gpsimd_ghz: Constant
    gpsimd_latency_ns: Constant
    gpsimd_gap_ns: Constant
    gpsimd_cycles: Constant
    gpsimd_rsqrt_cycles: Constant
    gpsimd_search_cycles: Constant
    gpsimd_gather_group_ns: Constant
    gpsimd_partition_reduce_cycles: Constant
    gpsimd_topk_cycles: Constant

    # dma
    dma_engines: Constant
    dma_partitions_per_engine: Constant
    dma_bytes_per_ns: Constant
    dma_descriptor_ns: Constant
    dma_load_lead_ns: Constant
    dma_store_lead_ns: Constant
    dma_tail_ns: Constant
    dma_trigger_ns: Constant
    dma_hwdge_interval_ns: Constant
    dma_swdge_interval_ns: Constant
    dma_generator_depth: Constant
    dma_swdge_engine_ns: Constant
    dma_swdge_descriptor_ns: Constant
    dma_transpose_hbm_share: Constant
    dma_transpose_sbuf_share: Constant
    hbm_bytes_per_ns: Constant
    cores_per_hbm_stack: Constant
    gpsimd_dma_bytes_per_ns: Constant
    gpsimd_dma_latency_ns: Constant

    # handoffs
    semaphore_ns: Constant
    dma_semaphore_ns: Constant
    core_semaphore_ns: Constant
    core_barrier_ns: Constant
    register_ns: Constant
    register_memory_ns: Constant
    collective_latency_ns: Constant
    collective_bytes_per_ns: Constant

    def constants(self) -> dict[str, Constant]:
        """Every constant by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Constant)}

    def at(self, case: str) -> SimpleNamespace:
        """The plain numbers of one case: `low`, `nominal` or `high` latency."""
        return _numbers(self, case)


@lru_cache(maxsize=16)
def _numbers(chip: Chip, case: str) -> SimpleNamespace:
    if case not in CASES:
        raise ValueError(f"case {case!r} is not one of {', '.join(CASES)}")
    return SimpleNamespace(**{name: c.at(case) for name, c in chip.constants().items()})
