"""The seam to a device: PJRT's client interface, the same on a CPU and on Trainium, whose plugin the SDK registers."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import jax
import numpy as np
from jax._src.compiler import compile_or_get_cached
from jax._src.interpreters import mlir
from jax._src.xla_bridge import backends_are_initialized
from jaxlib import xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from jaxlib.xla_client import _xla as _jaxlib  # type: ignore[attr-defined]

from model.errors import UserError
from model.graph_key import GraphKey
from model.graph_spec import GraphSpec
from model.nki.launches import LNC
from trnspec.bundle.compiler_flags import PLAIN, flag_tag, with_lnc
from trnspec.bundle.manifest import Compiler
from trnspec.runtime import apart, columns, filter_branch, products, quicker, sums

# what is read once, at the first device or the first product. The pool of XLA's CPU client has one thread a device
EARLY = {"NPROC": "1"} | products.EARLY
_TOO_LATE = [f"{n}={v}" for n, v in EARLY.items() if n not in os.environ and backends_are_initialized()]
for _name, _value in EARLY.items():
    os.environ.setdefault(_name, _value)
# two graphs of one model must agree in their bits: bf16 values are rounded where the graph says so, and products and
# sums stay with the code whose order does not depend on the number of rows; wide vectors halve the time of exp
SAME_BITS = {
    "xla_allow_excess_precision": False,
    "xla_cpu_prefer_vector_width": 512,
} | products.OPTIONS
# a step's products are too small to be handed over to a thread, even to the only one of the pool. XLA then writes the
# smallest itself, with fused multiplications: the same bits unless oneDNN, which multiplies for prompts, is held back
OF_STEPS = {} if products.HELD_BACK else {"xla_cpu_multi_thread_eigen": False}
_FLAGS_VARIABLE, _LNC_VARIABLE = "NEURON_CC_FLAGS", "NEURON_LOGICAL_NC_CONFIG"
_OWN_FLAGS = os.environ.get(_FLAGS_VARIABLE)


def devices_of(platform: str, count: int) -> list[Any]:
    """The first `count` devices of a PJRT platform: the platform is all that differs between a CPU and a Trainium.

    `cpu` has as many as are requested; `neuron` are the devices of the SDK's plugin (libneuronxla) in JAX. Rank r runs
    on device r of this process in the plugin's own order, which is that of the logical cores.
    """
    if platform == "cpu":
        if _TOO_LATE:
            raise UserError(
                "jax made its devices before trnspec.runtime.pjrt was imported, which sets how they compute; "
                f"import it first, or start the process with {' '.join(_TOO_LATE)}"
            )
        # devices cannot be added once they are made; each one beyond the ranks is an extra thread, and XLA hands
        # every product of a step over from one to the other
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


def take_lnc(compiler: Compiler) -> None:
    """Leave the cores of a logical core where the Neuron plugin reads them, before it makes its devices.

    UserError where the environment has a different number than the bundle was compiled for.
    """
    found = os.environ.setdefault(_LNC_VARIABLE, str(compiler.lnc or LNC))
    if compiler.lnc and found != str(compiler.lnc):
        raise UserError(f"{_LNC_VARIABLE} is {found} and the bundle was compiled for {compiler.lnc}; leave it out")


def take_flags(compiler: Compiler, key: GraphKey) -> None:
    """Leave a graph's flags where the Neuron plugin's compiler reads them, unless the environment came with its own.

    A bundle that no compiler of the SDK has met gets the documented ones.
    """
    if _OWN_FLAGS is None:
        flags = compiler.flags.get(flag_tag(key), PLAIN)
        os.environ[_FLAGS_VARIABLE] = with_lnc(flags, os.environ[_LNC_VARIABLE])


def replicated(array: np.ndarray, sharding: Any, devices: list[Any]) -> Any:
    """A copy of an array on each device, joined along the first axis.

    The call below `jax.device_put`, which alone takes longer than the small arrays of a step.
    """
    shape = (array.shape[0] * len(devices), *array.shape[1:])
    return xla_client.batched_device_put(_aval(shape, array.dtype), sharding, [array] * len(devices), devices)


def not_shared(array: np.ndarray) -> np.ndarray:
    """A copy that no device takes as its own memory: one whose memory is the host's shares it, if it begins at a
    multiple of 64 bytes, and then refuses to write there."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    begin = 64 + 16 - memory.ctypes.data % 64
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@functools.cache
def _aval(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return jax.core.ShapedArray(shape, dtype)


def compile_hlo(proto: bytes, devices: list[Any], graph: GraphSpec | None = None, platform: str = "cpu") -> Any:
    """An executable of a graph's HLO proto, one replica a device.

    UserError if the compiler refuses the proto. `platform` is the one that was asked for: any plugin may call its
    devices cpu.

    A CPU's takes the graph's weights as `trnspec.runtime.columns` says, the Neuron plugin's as the bundle has them.
    Where JAX_COMPILATION_CACHE_DIR names a folder, JAX keeps a CPU's there and takes the same graph's from it.
    """
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = len(devices), 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([d.id for d in devices]).reshape(-1, 1))
    client, listed = devices[0].client, xla_client.DeviceList(tuple(devices))
    try:
        with mlir.make_ir_context(), ir.Location.unknown():
            module = stablehlo_of(proto)
            if platform == "cpu":
                of_graph = OF_STEPS if graph and not graph.key.is_prefill else {}
                options.env_option_overrides = list((SAME_BITS | of_graph).items())
                if graph:
                    _take_as_held(module, graph)
                return compile_or_get_cached(client, module, np.array(devices), options, [], listed)
            code = bytes(mlir.module_to_bytecode(module))
        return client.compile_and_load(code, listed, options)
    except (RuntimeError, ValueError, ir.MLIRError) as error:
        raise refused(graph, "compiled", error) from error


def loaded(executable: bytes, devices: list[Any]) -> Any:
    """An executable that another process has serialized (`trnspec/runtime/compiler.py`)."""
    return devices[0].client.deserialize_executable(executable, xla_client.DeviceList(tuple(devices)), None)


def refused(graph: GraphSpec | None, done: str, error: Exception) -> UserError:
    """A graph that XLA has not compiled or run, as a sentence."""
    name, said = graph.file if graph else "a graph", ascii(str(error).partition("\n")[0][:200])[1:-1]
    return UserError(f"{name} cannot be {done} ({said}); build the bundle again")


def stablehlo_of(proto: bytes) -> ir.Module:
    """The StableHLO module of an HLO proto, in the context that is active.

    A copy has no operation there, and jaxlib's own stands outside of the dialect, where plugins refuse it: a barrier
    takes its place.
    """
    module = ir.Module.parse(_jaxlib.mlir.hlo_to_stablehlo(proto))
    for operation in [o for o in quicker.operations(module) if o.name == "mhlo.copy"]:
        with ir.InsertionPoint(operation), operation.location:
            barrier = stablehlo.OptimizationBarrierOp(operation.operands)
        operation.results[0].replace_all_uses_with(barrier.results[0])
        operation.erase()
    return module


def _take_as_held(module: ir.Module, graph: GraphSpec) -> None:
    """Take weights as the runtime holds them on a CPU, launches over ranks apart, and rewrite slow parts."""
    for operation in [o for o in quicker.operations(module) if o.name == "stablehlo.custom_call"]:
        apart.take_apart(operation)
    main = ir.SymbolTable(module.operation)["main"].regions[0].blocks[0]
    columns.take_turned(main, graph.weights)
    columns.retype(module)
    filter_branch.branch(module)
    sums.in_order(module)
    quicker.rewrite(module)
