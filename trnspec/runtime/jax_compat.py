"""The runtime's only imports from internals of jax and jaxlib, for jax 0.10."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from jax._src.compiler import compile_or_get_cached
from jax._src.interpreters.mlir import make_ir_context
from jaxlib import xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from jaxlib.xla_client import _xla  # type: ignore[attr-defined]

__all__ = ["COMPILER_ERRORS", "compile_module", "ir", "module_of", "operations", "stablehlo"]
# raised by the compiler for an invalid module, and by the conversion for an invalid proto
COMPILER_ERRORS = (RuntimeError, ValueError, IndexError, ir.MLIRError)


@contextmanager
def module_of(proto: bytes) -> Iterator[ir.Module]:
    """The StableHLO module of an HLO proto, in an MLIR context that is active until the block ends."""
    with make_ir_context(), ir.Location.unknown():
        yield ir.Module.parse(_xla.mlir.hlo_to_stablehlo(proto))


def operations(operation: Any) -> Iterator[Any]:
    """Yields the operations nested in an operation, depth first."""
    for block in (block for region in operation.regions for block in region.blocks):
        for nested in block.operations:
            yield nested.operation
            yield from operations(nested)


def compile_module(module: ir.Module, devices: Sequence[Any], xla_options: Mapping[str, bool | str | int]) -> Any:
    """Compiles a module, one replica per device, or loads it from JAX's cache (JAX_COMPILATION_CACHE_DIR)."""
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = len(devices), 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[d.id] for d in devices]))
    options.env_option_overrides = list(xla_options.items())
    listed = xla_client.DeviceList(tuple(devices))
    return compile_or_get_cached(devices[0].client, module, np.array(devices), options, [], listed)
