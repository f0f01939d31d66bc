"""A bundle's graphs on the CPU: XLA compiles the HLO, weights and caches stay on its devices.

Stands where a NEFF runs on a Trainium machine. Ranks are virtual CPU devices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import safe_open

from model.bundle.manifest import PREFILL, Bundle, GraphSpec, TensorSpec
from model.bundle.schema import UNFILTERED
from model.bundle.shards import faults as shard_faults
from model.bundle.weights import shard_file
from model.dtypes import BY_NAME
from model.errors import UserError
from model.graph_io import StepInputs, StepOutputs
from model.nki import custom_calls
from model.nki.launches import TARGET
from model.serving import columns, memory_maps, pjrt, prefixes


class Graphs:
    """The graphs of one bundle, compiled when first used, with their weights and state."""

    def __init__(self, bundle: Bundle, platform: str = "cpu") -> None:
        self.bundle, self.tp = bundle, bundle["tp"]
        if bundle["weights"] is None:
            raise UserError(
                f"{bundle.path} was built without weights; build it with --checkpoint and "
                "--draft-checkpoint to generate from it"
            )
        self._platform, self._devices = platform, pjrt.devices_of(platform, self.tp)
        mesh = Mesh(np.array(self._devices), ("rank",))
        self._sharding = NamedSharding(mesh, PartitionSpec("rank"))
        self._graphs = {(graph.tag, graph.bucket): graph for graph in bundle.graphs}
        # read-only inputs of the last run and what it returned, and where they are on the devices
        self._kept: list[tuple[Any, Any]] = []
        self._executables: dict[tuple[str, int], Any] = {}
        # read now: a build may exchange the folder while a server runs, and its graphs go with its weights
        self._protos = {graph.file: (bundle.path / graph.file).read_bytes() for graph in bundle.graphs}
        self._weights = self._load_weights()
        prefill = next(g for g in bundle.graphs if g.tag == PREFILL)
        self._state = {t.name: self._zeros(t) for t in prefill.state}
        # on a CPU that compiles them itself, graphs get caches as long as their bucket, if they can
        compiled = bundle.manifest.get("executables")
        # a slice of the positions ends where no bucket does
        whole = bundle["kv_shard"] == "heads"
        self._cut = platform == "cpu" and whole and not (compiled and compiled["platform"] == platform)
        self._caches = [t.name for t in prefill.state if prefixes.is_cache(t)]
        self._prefixes = prefixes.Prefixes(bundle["buckets"], bundle["max_len"])

    def prepare(self, tag: str, bucket: int, ending: str = UNFILTERED) -> None:
        """Compile a graph and run it once on zeros, while no sequence is in the cache.

        The first run of an executable is slow; later ones are what is worth timing.
        """
        graph = self._picked(tag, bucket, ending)
        if (graph.tag, bucket) not in self._executables:
            inputs = StepInputs(*(np.zeros(t.shape, BY_NAME[t.dtype].numpy) for t in graph.inputs))
            # a row filters when it samples: a top-p of 0 is below 1
            inputs.sampling_params[:, 2] = UNFILTERED not in ending
            jax.block_until_ready(self._run(tag, bucket, inputs))

    def run(self, tag: str, bucket: int, inputs: StepInputs) -> StepOutputs:
        """Begin a run of a graph on numpy inputs; its outputs wait for its end when they are read. State stays here."""
        accepted, next_ids, next_mask, next_pos, *scores = self._run(tag, bucket, inputs)
        return StepOutputs(accepted, next_ids, next_mask, next_pos, scores=scores[0] if scores else None)

    def draft(self, tag: str, bucket: int, inputs: StepInputs) -> Any:
        """The candidates (B, N) of a graph that drafts alone, as `run` has its outputs."""
        (candidates_BN,) = self._run(tag, bucket, inputs)
        return candidates_BN

    def _run(self, tag: str, bucket: int, inputs: StepInputs) -> list[Any]:
        graph = self._picked(tag, bucket, inputs.ending)
        executable = self._executable(graph)
        self._fit(self._length(graph) if self._cut else self.bundle["max_len"])
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
        """Inputs on the devices; what the last run returned is there, and its inputs that nobody may write to."""
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

    def _picked(self, tag: str, bucket: int, ending: str) -> GraphSpec:
        """No graph has a branch: rows that do not filter have one without the search, in most bundles."""
        if (tag + ending, bucket) not in self._graphs:
            ending = ending.removeprefix(UNFILTERED)
        return self._graphs[tag + ending, bucket]

    def _executable(self, graph: GraphSpec) -> Any:
        key = (graph.tag, graph.bucket)
        if key not in self._executables:
            proto = self._protos[graph.file]
            if TARGET.encode() in proto:
                custom_calls.register()
            if self._platform == "cpu":
                memory_maps.check_room()
            loaded = pjrt.load(self.bundle, graph, self._platform, self._devices)
            compiled = loaded or pjrt.compile_hlo(proto, self._devices, graph, self._length(graph) * self._cut)
            if compiled is None:
                # one that needs whole caches: all get them, those that are there already too
                self._cut, before = False, [self._graphs[known] for known in self._executables]
                self._executables.clear()
                for other in before:
                    self._executable(other)
                return self._executable(graph)
            self._executables[key] = compiled
        return self._executables[key]

    def _length(self, graph: GraphSpec) -> int:
        """Positions that a graph reads: a short prompt's, those of the first bucket."""
        return max(graph.bucket, self.bundle["buckets"][0])

    def _fit(self, length: int) -> None:
        if self._prefixes.length != length:
            self._state |= self._prefixes.fit({name: self._state[name] for name in self._caches}, length)

    def _load_weights(self) -> dict[str, Any]:
        if fault := next(shard_faults(self.bundle), None):
            raise UserError(f"{self.bundle.path} cannot run: {fault}; build the bundle again")
        shards = [_read_shard(self.bundle.path / shard_file(rank)) for rank in range(self.tp)]
        needed = {t.name: t for g in self.bundle.graphs for t in g.weights}
        return {name: self._put([self._laid(t, shard[name]) for shard in shards]) for name, t in needed.items()}

    def _laid(self, weight: TensorSpec, rows: np.ndarray) -> np.ndarray:
        return columns.turn(rows) if self._platform == "cpu" and columns.turned(weight) else rows

    def _zeros(self, tensor: TensorSpec) -> Any:
        return self._put([np.zeros(tensor.shape, BY_NAME[tensor.dtype].numpy)] * self.tp)

    def _put(self, parts: list[np.ndarray]) -> Any:
        return self._join([jax.device_put(p, d) for p, d in zip(parts, self._devices, strict=True)])

    def _join(self, parts: list[Any]) -> Any:
        if self.tp == 1:
            return parts[0]
        first = parts[0].shape
        return jax.make_array_from_single_device_arrays((first[0] * self.tp, *first[1:]), self._sharding, parts)


def _read_shard(file: Path) -> dict[str, np.ndarray]:
    with safe_open(file, framework="np") as shard:
        return {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
