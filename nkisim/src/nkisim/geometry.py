"""Sizes of the memories and tiles of one NeuronCore, as frozen values with their sources."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of one NeuronCore as the programmer sees it; time is not part of it."""

    name: str
    generation: int
    # architecture guide of Trainium2: "SBUF: 128 partitions"
    partitions: int
    # partitions are addressed in groups of 32 (architecture guide of Trainium1, start partitions)
    quadrant: int
    # a GpSimd processor serves 16 partitions (architecture guide of Trainium1)
    gpsimd_group: int
    # architecture guide of Trainium2: 24 -> 28 MiB, 224 KiB per partition
    sbuf_bytes_per_partition: int
    # architecture guide of Trainium1: PSUM 16 KiB per partition in 8 banks of 2 KiB
    psum_banks: int
    psum_bank_bytes: int
    # logical NeuronCore guide: one 24 GiB HBM stack per pair of physical cores
    hbm_bytes: int
    # nki.language.tile_size
    gemm_stationary_fmax: int
    gemm_moving_fmax: int
    bn_stats_fmax: int
    # bytes; the manual prints no value, dma and engines address even bytes (KLR front end)
    sbuf_min_align: int
    psum_min_align: int

    @property
    def psum_bytes_per_partition(self) -> int:
        """Bytes of PSUM in one partition, all banks together."""
        return self.psum_banks * self.psum_bank_bytes


CORE_V3 = Geometry(
    name="trn2",
    generation=3,
    partitions=128,
    quadrant=32,
    gpsimd_group=16,
    sbuf_bytes_per_partition=224 * 1024,
    psum_banks=8,
    psum_bank_bytes=2048,
    hbm_bytes=24 * 1024**3,
    gemm_stationary_fmax=128,
    gemm_moving_fmax=512,
    bn_stats_fmax=512,
    sbuf_min_align=2,
    psum_min_align=4,
)
# architecture guide of Trainium3: SBUF 32 MiB, PSUM as before; 144 GiB in four stacks
CORE_V4 = replace(CORE_V3, name="trn3", generation=4, sbuf_bytes_per_partition=256 * 1024, hbm_bytes=36 * 1024**3)
CORES = {core.generation: core for core in (CORE_V3, CORE_V4)}
# neuronx-cc leaves 16 KiB of each partition: "separate buffers need 224KB>208KB", says the record of
# github.com/Jerry2423/kda-for-trainium; nki.language.tile_size speaks of usable bytes, without a number
NEURONX_CC = replace(CORE_V3, sbuf_bytes_per_partition=208 * 1024)
