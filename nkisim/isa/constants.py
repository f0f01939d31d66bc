"""nki.isa.constants: the enumerations under the name that published kernels import them by."""

from nkisim.enums import (
    dge_mode,
    dma_engine,
    engine,
    gpsimd_engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
    scalar_engine,
    tensor_engine,
    unknown_engine,
    vector_engine,
)

__all__ = [
    "dge_mode", "dma_engine", "engine", "gpsimd_engine", "matmul_perf_mode", "nc_version", "oob_mode",
    "reduce_cmd", "scalar_engine", "tensor_engine", "unknown_engine", "vector_engine",
]  # fmt: skip
