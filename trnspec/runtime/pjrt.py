"""Devices and executables by PJRT, the same on a CPU and on Trainium, whose plugin the SDK registers."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import jax
import numpy as np

from model.errors import UserError
from model.graph_key import GraphKey
from model.graph_spec import GraphSpec
from model.nki import custom_calls
from model.nki.launches import LNC, TARGET
from trnspec.bundle.compiler_flags import PLAIN, flag_tag, with_lnc
from trnspec.bundle.manifest import Compiler
from trnspec.runtime import split_layers
from trnspec.runtime.jax_compat import COMPILER_ERRORS, compile_module, ir, module_of, operations, stablehlo

# XLA's options on a CPU, with which a row has the same bits among any number of rows (tests/runtime/test_bits.py):
# bf16 values are rounded where the graph says so, and YNNPACK's consistent arithmetic multiplies on one thread
CPU_OPTIONS: dict[str, bool | str] = {
    "xla_allow_excess_precision": False,
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    "xla_cpu_enable_platform_dependent_math": False,
    "xla_cpu_multi_thread_eigen": False,
}
_FLAGS_VARIABLE, _LNC_VARIABLE = "NEURON_CC_FLAGS", "NEURON_LOGICAL_NC_CONFIG"
_FLAGS_OF_USER = os.environ.get(_FLAGS_VARIABLE)


def devices_of(platform: str, count: int) -> list[Any]:
    """The first `count` devices of a PJRT platform: cpu, or neuron (libneuronxla's plugin in JAX).

    Rank r runs on device r of this process in the plugin's order, which is that of the logical cores. UserError if
    there are fewer.
    """
    if platform == "cpu":
        # devices cannot be added once they are made
        with contextlib.suppress(RuntimeError):
            wanted = max(count, jax.config.jax_num_cpu_devices)  # type: ignore[attr-defined]
            jax.config.update("jax_num_cpu_devices", wanted)
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise UserError(
            f"JAX has no platform {platform!r} on this machine; install libneuronxla from AWS's package index, on a "
            "machine with Trainium2, or use cpu"
        ) from error
    if len(devices) < count:
        more = f"start a new process with JAX_NUM_CPU_DEVICES={count}" if platform == "cpu" else "build for fewer ranks"
        raise UserError(f"this process has {len(devices)} {platform} devices, the bundle needs {count}; {more}")
    return list(devices[:count])


def set_lnc(compiler: Compiler) -> None:
    """Set the cores of a logical core for the Neuron plugin, which reads them when it makes its devices.

    UserError where the environment has a different number than the bundle was compiled for.
    """
    found = os.environ.setdefault(_LNC_VARIABLE, str(compiler.lnc or LNC))
    if compiler.lnc and found != str(compiler.lnc):
        raise UserError(f"{_LNC_VARIABLE} is {found} and the bundle was compiled for {compiler.lnc}; leave it out")


def set_flags(compiler: Compiler, key: GraphKey) -> None:
    """Set a graph's flags for the Neuron plugin's compiler, unless the user's environment has flags."""
    if _FLAGS_OF_USER is None:
        flags = compiler.flags.get(flag_tag(key), PLAIN)
        os.environ[_FLAGS_VARIABLE] = with_lnc(flags, os.environ[_LNC_VARIABLE])


def compile_hlo(proto: bytes, devices: list[Any], graph: GraphSpec, platform: str = "cpu") -> Any:
    """An executable of a graph's HLO proto, one replica a device; UserError if the compiler refuses it.

    The module is compiled as it is, with two exceptions: a CPU runs a launch that sums over ranks as the launches of
    its layers' halves, and a plugin gets a barrier for each copy (`without_copies`).
    """
    try:
        with module_of(proto) as module:
            if platform != "cpu":
                without_copies(module)
                return compile_module(module, devices, {})
            if TARGET.encode() in proto:
                custom_calls.register()
                split_layers.split(module)
            return compile_module(module, devices, CPU_OPTIONS)
    except COMPILER_ERRORS as error:
        raise refused(graph, "compiled", error) from error


def without_copies(module: ir.Module) -> None:
    """Replace copies by barriers: StableHLO has no copy, and plugins refuse the operation outside of it."""
    for operation in [o for o in operations(module.operation) if o.name == "mhlo.copy"]:
        with ir.InsertionPoint(operation), operation.location:
            barrier = stablehlo.OptimizationBarrierOp(operation.operands)
        operation.results[0].replace_all_uses_with(barrier.results[0])
        operation.erase()


def refused(graph: GraphSpec, done: str, error: Exception) -> UserError:
    """The error of a graph that is not compiled or run, as a sentence."""
    message = ascii(str(error).partition("\n")[0][:200])[1:-1]
    return UserError(f"{graph.file} cannot be {done} ({message}); build the bundle again")


def unshared(array: np.ndarray) -> np.ndarray:
    """A copy that a CPU device copies too: memory that begins at a multiple of 64 bytes becomes its own, and cannot be
    donated. With `may_alias=False` of jax.device_put a plugin refuses the donation as well."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    begin = 64 + 16 - memory.ctypes.data % 64
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
