"""A bundle's graphs on the CPU: XLA compiles the HLO, weights and caches stay on its devices.

It takes the place of a NEFF on a Trainium machine. Ranks are virtual CPU devices.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.dtypes import BY_NAME
from model.errors import UserError
from model.graph_io import StepInputs, StepOutputs, zeros_of
from model.graph_key import GraphKey
from model.graph_spec import GraphSpec, TensorSpec
from model.nki import custom_calls
from model.nki.launches import TARGET
from trnspec.bundle import plan
from trnspec.bundle.contract import violations
from trnspec.bundle.opening import Bundle
from trnspec.bundle.shards import shard_tensors
from trnspec.runtime import columns, memory_maps, pjrt
from trnspec.runtime.compiler import Compiler


class Graphs:
    """The graphs of one bundle, compiled when first used, with their weights and state.

    Weights and graphs are read here, whole, and checked as they are read: later changes on disk are ignored.
    """

    def __init__(self, bundle: Bundle, platform: str = "cpu") -> None:
        self.bundle, self.tp = bundle, bundle.spec.tp
        if not bundle.manifest.has_weights:
            raise UserError(f"{bundle.path} was built without weights; build it from checkpoint folders that hold them")
        if platform != "cpu" and bundle.spec.kernels != "reference":
            why = bundle.manifest.without_kernels or "PJRT runs no NKI kernels; build it with --kernels reference"
            raise UserError(f"{bundle.path} cannot run on {platform}: {why}")
        if platform != "cpu":
            pjrt.take_lnc(bundle.manifest.compiler)
        self._platform, self._devices = platform, pjrt.devices_of(platform, self.tp)
        mesh = Mesh(np.array(self._devices), ("rank",))
        self._sharding = NamedSharding(mesh, PartitionSpec("rank"))
        # read-only inputs and outputs of the last run, and where they are on the devices
        self._kept: list[tuple[Any, Any]] = []
        self._executables: dict[GraphKey, Any] = {}
        self._compiler: Compiler | None = None
        self._protos = {graph.key: bytes(bundle.read(graph.file)) for graph in bundle.graphs}
        self._weights = self._load_weights()
        self._state = {t.name: self._zeros(t) for t in bundle.plan.state}

    @contextlib.contextmanager
    def compiled_apart(self) -> Iterator[None]:
        """While this lasts another process compiles for a CPU: one that has compiled many graphs runs them slower."""
        if self._platform != "cpu":
            yield
            return
        with Compiler(self.tp) as self._compiler:
            try:
                yield
            finally:
                self._compiler = None

    def prepare(self, key: GraphKey) -> None:
        """Compile a graph and run it once on zeros, while no sequence is in the cache.

        The first run of an executable is slow; only later ones are worth timing.
        """
        if key not in self._executables:
            self.rehearse(key)

    def rehearse(self, key: GraphKey, runs: int = 1, inputs: StepInputs | None = None) -> float:
        """The wall seconds of a run of a graph on zeros or other inputs, of several in a row, while no sequence is in
        the cache."""
        graph = self._graph(key)
        inputs = inputs or zeros_of(graph.inputs)
        begin = time.perf_counter()
        try:
            jax.block_until_ready([self._run(key, inputs) for _ in range(runs)])
        except jax.errors.JaxRuntimeError as error:
            raise pjrt.refused(graph, "run", error) from error
        return (time.perf_counter() - begin) / runs

    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        """Begin a run of a graph on numpy inputs; its outputs wait for its end when they are read. State stays here."""
        return StepOutputs.of(self._run(key, inputs))

    def draft(self, key: GraphKey, inputs: StepInputs) -> Any:
        """The only output of a graph of the draft alone, as `run` has its outputs: in a step the candidates (B, N)."""
        (output,) = self._run(key, inputs)
        return output

    def clear(self, slot: int, blocks: Sequence[int]) -> None:
        """Zero the NaN in a slot's state and in its blocks: attention multiplies rows that it does not see by 0."""
        for name, array in self._state.items():
            held = np.array(array)
            parts = np.split(held, self.tp)
            for part in parts:
                places = list(blocks) if plan.is_cache(name) else [slot]
                part[places] = np.where(np.isfinite(part[places]), part[places], 0)
            self._state[name] = self._put(parts, own=True)

    def _graph(self, key: GraphKey) -> GraphSpec:
        return self.bundle.plan.by_key[key]

    def _run(self, key: GraphKey, inputs: StepInputs) -> list[Any]:
        graph, executable = self._graph(key), self._executable(key)
        arguments = [self._weights[t.name] for t in graph.weights]
        arguments += self._placed([getattr(inputs, t.name) for t in graph.inputs])
        arguments += [self._state[t.name] for t in graph.state]
        executed = executable.execute_sharded(arguments)
        results = executed.disassemble_into_single_device_arrays()
        visible = len(graph.outputs)
        for tensor, parts in zip(graph.state, results[visible:], strict=True):
            self._state[tensor.name] = self._join(parts)
        custom_calls.check(results)
        self._kept += [(parts[0], self._join(parts)) for parts in results[:visible]]
        return [parts[0] for parts in results[:visible]]

    def _placed(self, inputs: list[Any]) -> list[Any]:
        """Inputs on the devices; the last run's outputs are there already, and its inputs that no graph writes to."""
        held = {id(array): on_devices for array, on_devices in self._kept}
        for array in inputs:
            if id(array) not in held:
                held[id(array)] = pjrt.replicated(array, self._sharding, self._devices)
        fixed = (array for array in inputs if isinstance(array, np.ndarray) and not array.flags.writeable)
        self._kept = [(array, held[id(array)]) for array in fixed]
        return [held[id(array)] for array in inputs]

    def close(self) -> None:
        """Free the devices' memory, weights and caches, and drop the compiled graphs; nothing runs afterwards."""
        for array in (*self._weights.values(), *self._state.values()):
            array.delete()
        for held in (self._weights, self._state, self._executables):
            held.clear()
        self._kept.clear()

    def _executable(self, key: GraphKey) -> Any:
        if key not in self._executables:
            graph, proto = self._graph(key), self._protos[key]
            if clauses := violations(graph, proto, self.bundle.spec):
                raise UserError(f"{self.bundle.path} cannot run: {graph.file}: {clauses[0]}; build the bundle again")
            calls = TARGET.encode() in proto
            if calls:
                custom_calls.register()
            if self._platform == "cpu":
                memory_maps.check_room()
            else:
                pjrt.take_flags(self.bundle.manifest.compiler, key)
            # a call into this process stays in it
            code = self._compiler.compile(proto, graph) if self._compiler and not calls else b""
            if code:
                self._executables[key] = pjrt.loaded(code, self._devices)
            else:
                self._executables[key] = pjrt.compile_hlo(proto, self._devices, graph, self._platform)
        return self._executables[key]

    def _load_weights(self) -> dict[str, Any]:
        shards = [shard_tensors(self.bundle, rank) for rank in range(self.tp)]
        plan = self.bundle.plan
        needed = plan.draft_weights + plan.target_weights
        return {t.name: self._put([self._laid(t, shard[t.name]) for shard in shards]) for t in needed}

    def _laid(self, weight: TensorSpec, rows: np.ndarray) -> np.ndarray:
        return columns.turn(rows) if self._platform == "cpu" and columns.turned(weight) else rows

    def _zeros(self, tensor: TensorSpec) -> Any:
        zeros = np.zeros(tensor.shape, BY_NAME[tensor.dtype].numpy)
        return self._put([zeros] * self.tp, own=True)

    def _put(self, parts: list[np.ndarray], own: bool = False) -> Any:
        """An array of all ranks; in memory of its `own`, where graphs write to it."""
        parts = [pjrt.not_shared(part) for part in parts] if own else parts
        return self._join([jax.device_put(p, d) for p, d in zip(parts, self._devices, strict=True)])

    def _join(self, parts: list[Any]) -> Any:
        if self.tp == 1:
            return parts[0]
        first = parts[0].shape
        return jax.make_array_from_single_device_arrays((first[0] * self.tp, *first[1:]), self._sharding, parts)
