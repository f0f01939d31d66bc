"""Runs a bundle's graphs with XLA: on CPU devices, or on Trainium with the Neuron PJRT plugin in JAX."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.dtypes import BY_NAME
from model.errors import UserError
from model.graph_io import StepInputs
from model.graph_key import GraphKey
from model.graph_spec import GraphSpec, TensorSpec
from model.nki import custom_calls
from model.nki.launches import CUSTOM_CALL_TARGET, LNC
from trnspec.bundle import plan
from trnspec.bundle.contract import violations
from trnspec.bundle.manifest import PLAIN, Compiler, flag_tag, with_lnc
from trnspec.bundle.opening import Bundle
from trnspec.bundle.shards import shard_tensors
from trnspec.runtime import jax_compat, split_layers
from trnspec.runtime.compile_cache import cache_compiled_graphs
from trnspec.runtime.jax_compat import ir, stablehlo
from trnspec.runtime.runner import Runner

# with these options a row's bits do not depend on the number of rows (tests/runtime/test_bits.py): bf16 values are
# rounded where the graph says so, and YNNPACK's consistent arithmetic multiplies on one thread
CPU_OPTIONS: dict[str, bool | str] = {
    "xla_allow_excess_precision": False,
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    "xla_cpu_enable_platform_dependent_math": False,
    "xla_cpu_multi_thread_eigen": False,
}
_FLAGS_VARIABLE, _LNC_VARIABLE = "NEURON_CC_FLAGS", "NEURON_LOGICAL_NC_CONFIG"
_FLAGS_OF_USER = os.environ.get(_FLAGS_VARIABLE)


class XlaRunner(Runner):
    """Compiles a bundle's HLO protos; ranks are devices of this process.

    Reads and verifies weights and graphs on construction. Raises UserError if the platform cannot run the bundle.
    """

    def __init__(self, bundle: Bundle, platform: str = "cpu") -> None:
        super().__init__(bundle)
        if platform != "cpu":
            if bundle.spec.kernels != "reference":
                reason = bundle.manifest.without_kernels or "PJRT runs no NKI kernels; build with --kernels reference"
                raise UserError(f"{bundle.path} cannot run with PJRT: {reason}")
            set_lnc(bundle.manifest.compiler)
        else:
            cache_compiled_graphs()
        self._platform, self._devices = platform, devices_of(platform, self.tp)
        self._sharding = NamedSharding(Mesh(np.array(self._devices), ("rank",)), PartitionSpec("rank"))
        # (array, its copy on the devices): the last run's outputs and read-only inputs
        self._placed: list[tuple[Any, Any]] = []
        self._executables: dict[GraphKey, Any] = {}
        self._protos = {graph.key: bytes(bundle.read(graph.file)) for graph in bundle.graphs}
        shards = [shard_tensors(bundle, rank) for rank in range(self.tp)]
        weights = bundle.plan.draft_weights + bundle.plan.target_weights
        self._weights = {t.name: self._put([shard[t.name] for shard in shards]) for t in weights}
        self._state = {t.name: self._zeros(t) for t in bundle.plan.state}

    def prepare(self, key: GraphKey, warm: bool = True) -> None:
        try:
            super().prepare(key, warm)
        except jax.errors.JaxRuntimeError as error:
            raise refused(self.graph(key), "run", error) from error

    def _load(self, graph: GraphSpec) -> None:
        proto = self._protos[graph.key]
        if clauses := violations(graph, proto, self.bundle.spec):
            raise UserError(f"{self.bundle.path} cannot run: {graph.file}: {clauses[0]}; build the bundle again")
        if self._platform != "cpu":
            set_flags(self.bundle.manifest.compiler, graph.key)
        self._executables[graph.key] = compile_hlo(proto, self._devices, graph, self._platform)

    def _launch(self, graph: GraphSpec, inputs: StepInputs) -> list[Any]:
        arguments = [self._weights[t.name] for t in graph.weights]
        arguments += self._inputs([getattr(inputs, t.name) for t in graph.inputs])
        arguments += [self._state[t.name] for t in graph.state]
        executed = self._executables[graph.key].execute_sharded(arguments)
        results = executed.disassemble_into_single_device_arrays()
        visible = results[: len(graph.outputs)]
        for tensor, parts in zip(graph.state, results[len(graph.outputs) :], strict=True):
            self._state[tensor.name] = self._join(parts)
        custom_calls.check(results)
        self._placed += [(parts[0], self._join(parts)) for parts in visible]
        return [parts[0] for parts in visible]

    def clear(self, slot: int, blocks: Sequence[int]) -> None:
        for name, array in self._state.items():
            parts = np.split(np.array(array), self.tp)
            rows = list(blocks) if plan.is_cache(name) else [slot]
            for part in parts:
                part[rows] = np.where(np.isfinite(part[rows]), part[rows], 0)
            self._state[name] = self._put([unshared(part) for part in parts])

    def close(self) -> None:
        for array in (*self._weights.values(), *self._state.values()):
            array.delete()
        for values in (self._weights, self._state, self._executables, self._placed):
            values.clear()  # type: ignore[attr-defined]

    def _inputs(self, inputs: list[Any]) -> list[Any]:
        """Copies inputs to the devices, except for outputs and read-only inputs of the last run, which are there."""
        placed = {id(array): on_devices for array, on_devices in self._placed}
        for array in inputs:
            if id(array) not in placed:
                placed[id(array)] = self._put([array] * self.tp)
        fixed = (array for array in inputs if isinstance(array, np.ndarray) and not array.flags.writeable)
        self._placed = [(array, placed[id(array)]) for array in fixed]
        return [placed[id(array)] for array in inputs]

    def _zeros(self, tensor: TensorSpec) -> Any:
        zeros = np.zeros(tensor.shape, BY_NAME[tensor.dtype].numpy)
        return self._put([unshared(zeros) for _ in self._devices])

    def _put(self, parts: list[np.ndarray]) -> Any:
        return self._join([jax.device_put(p, d) for p, d in zip(parts, self._devices, strict=True)])

    def _join(self, parts: list[Any]) -> Any:
        if self.tp == 1:
            return parts[0]
        first = parts[0].shape
        return jax.make_array_from_single_device_arrays((first[0] * self.tp, *first[1:]), self._sharding, parts)


def devices_of(platform: str, count: int) -> list[Any]:
    """The first `count` devices of a PJRT platform: cpu, or neuron (libneuronxla's plugin in JAX).

    Rank r runs on device r, in the plugin's order, which is that of the logical cores. Raises UserError if there are
    fewer devices.
    """
    if platform == "cpu":
        # raises if the devices exist already
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
    """Sets LNC for the Neuron plugin, which reads it when it creates its devices.

    Raises UserError if the environment has a different LNC than the bundle was compiled for.
    """
    lnc = os.environ.setdefault(_LNC_VARIABLE, str(compiler.lnc or LNC))
    if compiler.lnc and lnc != str(compiler.lnc):
        raise UserError(f"{_LNC_VARIABLE} is {lnc} and the bundle was compiled for {compiler.lnc}; unset it")


def set_flags(compiler: Compiler, key: GraphKey) -> None:
    """Sets a graph's compiler flags for the Neuron plugin, unless the user has set NEURON_CC_FLAGS."""
    if _FLAGS_OF_USER is None:
        flags = compiler.flags.get(flag_tag(key), PLAIN)
        os.environ[_FLAGS_VARIABLE] = with_lnc(flags, os.environ[_LNC_VARIABLE])


def compile_hlo(proto: bytes, devices: list[Any], graph: GraphSpec, platform: str = "cpu") -> Any:
    """Compiles a graph's HLO proto, one replica per device. Raises UserError if the compiler rejects it.

    The module is compiled unchanged, with two exceptions: on a CPU launches with all-reduces inside are split
    (`split_layers`), and for a plugin copies become barriers (`without_copies`).
    """
    try:
        with jax_compat.module_of(proto) as module:
            if platform != "cpu":
                without_copies(module)
                return jax_compat.compile_module(module, devices, {})
            if CUSTOM_CALL_TARGET.encode() in proto:
                custom_calls.register()
                split_layers.split(module)
            return jax_compat.compile_module(module, devices, CPU_OPTIONS)
    except jax_compat.COMPILER_ERRORS as error:
        raise refused(graph, "compiled", error) from error


def without_copies(module: ir.Module) -> None:
    """Replaces copies by optimization barriers: StableHLO has no copy operation, and plugins reject mhlo.copy."""
    for operation in [o for o in jax_compat.operations(module.operation) if o.name == "mhlo.copy"]:
        with ir.InsertionPoint(operation), operation.location:
            barrier = stablehlo.OptimizationBarrierOp(operation.operands)
        operation.results[0].replace_all_uses_with(barrier.results[0])
        operation.erase()


def refused(graph: GraphSpec, done: str, error: Exception) -> UserError:
    """The UserError for a graph that cannot be compiled or run."""
    message = ascii(str(error).partition("\n")[0][:200])[1:-1]
    return UserError(f"{graph.file} cannot be {done} ({message}); build the bundle again")


def unshared(array: np.ndarray) -> np.ndarray:
    """A copy that is not 64-byte aligned, so that a CPU device copies it: a device that aliases the array's memory
    could not donate it. `may_alias=False` of jax.device_put does not help: a plugin rejects the donation as well."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    begin = 64 + 16 - memory.ctypes.data % 64
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
