"""The enumerations of nki.isa, with the manual's members and values."""

from __future__ import annotations

from enum import Enum, IntEnum

# the public names, of nki.isa and of nki.isa.constants
__all__ = [
    "dge_mode", "dma_engine", "engine", "gpsimd_engine", "matmul_perf_mode", "nc_version", "oob_mode", "reduce_cmd",
    "scalar_engine", "tensor_engine", "unknown_engine", "vector_engine",
]  # fmt: skip


class engine(Enum):
    """Engines of a NeuronCore."""

    tensor = 1
    vector = 5
    scalar = 2
    gpsimd = 3
    dma = 4
    sync = 6
    unknown = 0


class reduce_cmd(Enum):
    """The use that an instruction makes of its engine's reduction registers."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):
    """Who generates DMA descriptors."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    """The effect of a run-time index out of range."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):
    """Throughput modes of the Tensor Engine."""

    none = "none"
    double_row = "double_row"


class nc_version(IntEnum):
    """Generations of the NeuronCore, in order; kernels compare them with each other and with integers."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class dma_engine(Enum):
    """Which DMA moves data between two cores."""

    dma = 1
    gpsimd_dma = 2


ENGINE_NAMES: dict[engine, str] = {e: e.name for e in engine if e is not engine.unknown}
# deprecated module constants
tensor_engine = engine.tensor
vector_engine = engine.vector
scalar_engine = engine.scalar
gpsimd_engine = engine.gpsimd
unknown_engine = engine.unknown
