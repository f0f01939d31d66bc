"""All that the runtime imports from the internals of jax and jaxlib, written for jax 0.10."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax._src.compiler import compile_or_get_cached
from jax._src.interpreters.mlir import make_ir_context
from jaxlib import xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from jaxlib.xla_client import _xla  # type: ignore[attr-defined]

__all__ = ["COMPILER_ERRORS", "compile_module", "ir", "module_of", "operations", "replicate", "stablehlo"]
# of a compiler that refuses a module, and of a conversion that refuses a proto
COMPILER_ERRORS = (RuntimeError, ValueError, IndexError, ir.MLIRError)
_aval = functools.cache(jax.core.ShapedArray)


@contextmanager
def module_of(proto: bytes) -> Iterator[ir.Module]:
    """The StableHLO module of an HLO proto, in a context that is active until the end of the block."""
    with make_ir_context(), ir.Location.unknown():
        yield ir.Module.parse(_xla.mlir.hlo_to_stablehlo(proto))


def operations(operation: Any) -> Iterator[Any]:
    """The operations nested in a module's operation, depth first."""
    for block in (block for region in operation.regions for block in region.blocks):
        for nested in block.operations:
            yield nested.operation
            yield from operations(nested)


def compile_module(module: ir.Module, devices: Sequence[Any], xla_options: Mapping[str, bool | str | int]) -> Any:
    """An executable of a module, one replica a device; JAX's cache (JAX_COMPILATION_CACHE_DIR) may hold it already."""
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = len(devices), 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[d.id] for d in devices]))
    options.env_option_overrides = list(xla_options.items())
    listed = xla_client.DeviceList(tuple(devices))
    return compile_or_get_cached(devices[0].client, module, np.array(devices), options, [], listed)


def replicate(array: np.ndarray, sharding: Any, devices: list[Any]) -> Any:
    """A copy of an array on each device, joined along the first axis; faster than `jax.device_put` for small arrays."""
    shape = (array.shape[0] * len(devices), *array.shape[1:])
    return xla_client.batched_device_put(_aval(shape, array.dtype), sharding, [array] * len(devices), devices)
