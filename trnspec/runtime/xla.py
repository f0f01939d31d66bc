"""A bundle's graphs by XLA: on CPU devices as they are in the bundle, or on Trainium by the Neuron plugin in JAX."""

from __future__ import annotations

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
from trnspec.bundle import plan
from trnspec.bundle.contract import violations
from trnspec.bundle.opening import Bundle
from trnspec.bundle.shards import shard_tensors
from trnspec.runtime import jax_compat, pjrt
from trnspec.runtime.runner import Runner


class XlaRunner(Runner):
    """Compiles a bundle's HLO protos; ranks are devices of this process.

    Weights and graphs are read and checked once, when the runner is made. Raises UserError for a bundle that the
    platform cannot run.
    """

    def __init__(self, bundle: Bundle, platform: str = "cpu") -> None:
        super().__init__(bundle)
        if platform != "cpu":
            if bundle.spec.kernels != "reference":
                reason = bundle.manifest.without_kernels or "PJRT runs no NKI kernels; build with --kernels reference"
                raise UserError(f"{bundle.path} cannot run on {platform}: {reason}")
            pjrt.set_lnc(bundle.manifest.compiler)
        self._platform, self._devices = platform, pjrt.devices_of(platform, self.tp)
        self._sharding = NamedSharding(Mesh(np.array(self._devices), ("rank",)), PartitionSpec("rank"))
        # (array, its copy on the devices) of the last run's outputs and read-only inputs
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
            raise pjrt.refused(self.graph(key), "run", error) from error

    def _load(self, graph: GraphSpec) -> None:
        proto = self._protos[graph.key]
        if clauses := violations(graph, proto, self.bundle.spec):
            raise UserError(f"{self.bundle.path} cannot run: {graph.file}: {clauses[0]}; build the bundle again")
        if self._platform != "cpu":
            pjrt.set_flags(self.bundle.manifest.compiler, graph.key)
        self._executables[graph.key] = pjrt.compile_hlo(proto, self._devices, graph, self._platform)

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
            self._state[name] = self._put([pjrt.unshared(part) for part in parts])

    def close(self) -> None:
        for array in (*self._weights.values(), *self._state.values()):
            array.delete()
        for values in (self._weights, self._state, self._executables, self._placed):
            values.clear()  # type: ignore[attr-defined]

    def _inputs(self, inputs: list[Any]) -> list[Any]:
        """Inputs on the devices, where the last run's outputs are already, and its inputs that cannot change."""
        placed = {id(array): on_devices for array, on_devices in self._placed}
        for array in inputs:
            if id(array) not in placed:
                placed[id(array)] = jax_compat.replicate(array, self._sharding, self._devices)
        fixed = (array for array in inputs if isinstance(array, np.ndarray) and not array.flags.writeable)
        self._placed = [(array, placed[id(array)]) for array in fixed]
        return [placed[id(array)] for array in inputs]

    def _zeros(self, tensor: TensorSpec) -> Any:
        zeros = np.zeros(tensor.shape, BY_NAME[tensor.dtype].numpy)
        return self._put([pjrt.unshared(zeros) for _ in self._devices])

    def _put(self, parts: list[np.ndarray]) -> Any:
        return self._join([jax.device_put(p, d) for p, d in zip(parts, self._devices, strict=True)])

    def _join(self, parts: list[Any]) -> Any:
        if self.tp == 1:
            return parts[0]
        first = parts[0].shape
        return jax.make_array_from_single_device_arrays((first[0] * self.tp, *first[1:]), self._sharding, parts)
