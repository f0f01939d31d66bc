"""Where a kernel runs: programs of the grid, tile sizes, memories."""

from __future__ import annotations

import os

from nkisim.core.context import current, running
from nkisim.errors import BadLaunch, WrongArgument
from nkisim.geometry import CORE_V3, Geometry
from nkisim.isa.target import target
from nkisim.objects import MemoryRegion, NKIObject

__all__ = [
    "_TileSize", "hbm", "is_hbm", "is_on_chip", "is_psum", "is_sbuf", "num_programs", "private_hbm", "program_id",
    "program_ndim", "psum", "sbuf", "shared_hbm", "tile_size",
]  # fmt: skip

sbuf = MemoryRegion.sbuf
psum = MemoryRegion.psum
private_hbm = MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm
hbm = MemoryRegion.private_hbm


def program_id(axis: int = 0) -> int:
    """Return the index of this core in the launch grid."""
    if axis != 0:
        raise WrongArgument("program_id", "axis", f"is {axis}", "the grid has one axis, 0")
    return current("program_id").program


def num_programs(axes: int = 0) -> int:
    """Return how many cores the launch has."""
    if axes not in (0, (0,), None):
        raise WrongArgument("num_programs", "axes", f"is {axes}", "the grid has one axis, 0")
    return current("num_programs").programs


def program_ndim() -> int:
    """Return 1 with a launch grid, 0 without; on two cores without a grid (0.7) no document says which."""
    core = current("program_ndim")
    if core.programs == 2 and not core.grid:
        actual = "runs on two cores without a grid"
        raise BadLaunch("program_ndim", None, actual, "no document says if that is 0 or 1; launch kernel[2]")
    return 1 if core.grid else 0


def is_hbm(buffer: MemoryRegion) -> bool:
    """Return whether a memory is HBM."""
    return buffer in (MemoryRegion.private_hbm, MemoryRegion.shared_hbm)


def is_psum(buffer: MemoryRegion) -> bool:
    """Return whether a memory is PSUM."""
    return buffer is MemoryRegion.psum


def is_sbuf(buffer: MemoryRegion) -> bool:
    """Return whether a memory is SBUF."""
    return buffer is MemoryRegion.sbuf


def is_on_chip(buffer: MemoryRegion) -> bool:
    """Return whether a memory is SBUF or PSUM."""
    return is_psum(buffer) or is_sbuf(buffer)


def _core() -> Geometry:
    core = running()
    return core.geometry if core else target()


class _TileSize(NKIObject):
    """Sizes that tiles may have on the target."""

    pmax: int = CORE_V3.partitions
    psum_fmax: int = CORE_V3.psum_bank_bytes // 4
    psum_bank_fmax: int = CORE_V3.psum_bank_bytes // 4
    psum_bank_fmax_bytes: int = CORE_V3.psum_bank_bytes
    gemm_stationary_fmax: int = CORE_V3.gemm_stationary_fmax
    gemm_moving_fmax: int = CORE_V3.gemm_moving_fmax
    bn_stats_fmax: int = CORE_V3.bn_stats_fmax
    psum_min_align: int = CORE_V3.psum_min_align
    sbuf_min_align: int = CORE_V3.sbuf_min_align

    @property
    def psum_num_banks(self) -> int:
        """Banks of PSUM; one less while DMA transposes borrow it."""
        borrowed = os.environ.get("NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE") == "true"
        return CORE_V3.psum_banks - borrowed

    @property
    def sbuf_size_bytes(self) -> int:
        """Bytes of SBUF, all partitions."""
        return _core().partitions * _core().sbuf_bytes_per_partition

    @property
    def sbuf_fmax(self) -> int:
        """fp32 elements in one partition of SBUF."""
        return _core().sbuf_bytes_per_partition // 4

    @property
    def sbuf_fmax_bytes(self) -> int:
        """Bytes in one partition of SBUF."""
        return _core().sbuf_bytes_per_partition

    @property
    def total_available_sbuf_size(self) -> int:
        """Usable bytes in one partition (deprecated; the manual gives no value of its own)."""
        return _core().sbuf_bytes_per_partition


tile_size = _TileSize()
