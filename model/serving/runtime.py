"""A bundle's graphs on the CPU: XLA compiles the HLO, weights and caches stay on its devices.

Stands where a NEFF runs on a Trainium machine. Ranks are virtual CPU devices.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import xla_client
from jaxlib.xla_client import _xla as _jaxlib  # type: ignore[attr-defined]
from safetensors import safe_open

from model.bundle.manifest import PREFILL, UNFILTERED, Bundle, GraphSpec, TensorSpec
from model.bundle.shards import faults as shard_faults
from model.bundle.weights import shard_file
from model.dtypes import BY_NAME
from model.errors import UserError
from model.graph_io import StepInputs
from model.nki import custom_calls
from model.nki.launches import TARGET

# read when the first device is made. The pool of XLA's CPU client: one thread a device
os.environ.setdefault("NPROC", "1")
# two graphs of one model must agree in their bits: bf16 values are rounded where the graph says so,
# and products and sums stay with the code whose order does not depend on the number of rows
_SAME_BITS = (
    "--xla_allow_excess_precision=false --xla_cpu_experimental_ynn_fusion_type="
    "-LIBRARY_FUSION_TYPE_REDUCE,-LIBRARY_FUSION_TYPE_DOT,-LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_SAME_BITS}"

# enough for the tensor-parallel runs that one process may mix
_MIN_DEVICES = 2


class Graphs:
    """The graphs of one bundle, compiled when first used, with their weights and state."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self.tp = bundle, bundle["tp"]
        if bundle["weights"] is None:
            raise UserError(
                f"{bundle.path} was built without weights; build it with --checkpoint and "
                "--draft-checkpoint to generate from it"
            )
        self._devices = _cpu_devices(self.tp)
        mesh = Mesh(np.array(self._devices), ("rank",))
        self._sharding = NamedSharding(mesh, PartitionSpec("rank"))
        self._executables: dict[tuple[str, int], Any] = {}
        self._weights = self._load_weights()
        prefill = next(g for g in bundle.graphs if g.tag == PREFILL)
        self._state = {t.name: self._zeros(t) for t in prefill.state}

    def prepare(self, tag: str, bucket: int) -> None:
        """Compile a graph and run it once on zeros, while no sequence is in the cache.

        The first run of an executable is slow; later ones are what is worth timing.
        """
        graph = self._picked(tag, bucket, filters=False)
        if (graph.tag, bucket) not in self._executables:
            self.run(tag, bucket, StepInputs(*(np.zeros(t.shape, BY_NAME[t.dtype].numpy) for t in graph.inputs)))

    def run(self, tag: str, bucket: int, inputs: StepInputs) -> list[np.ndarray]:
        """Run a graph on numpy inputs; returns its outputs and keeps the new state."""
        graph = self._picked(tag, bucket, inputs.filter)
        given = inputs._asdict()
        arguments = [self._weights[t.name] for t in graph.weights]
        # one call a device for all inputs: a call costs more than the copy
        replicas = [jax.device_put([given[t.name] for t in graph.inputs], d) for d in self._devices]
        arguments += [self._join(list(parts)) for parts in zip(*replicas, strict=True)]
        arguments += [self._state[t.name] for t in graph.state]
        executed = self._executable(graph).execute_sharded(arguments)
        results = executed.disassemble_into_single_device_arrays()
        visible = len(graph.outputs)
        for tensor, parts in zip(graph.state, results[visible:], strict=True):
            self._state[tensor.name] = self._join(parts)
        custom_calls.check(results)
        return [np.asarray(parts[0]) for parts in results[:visible]]

    def _picked(self, tag: str, bucket: int, filters: bool) -> GraphSpec:
        """No graph has a branch: rows that do not filter have one without the search."""
        tags = {g.tag for g in self.bundle.graphs}
        return self.bundle.graph(tag if filters or tag + UNFILTERED not in tags else tag + UNFILTERED, bucket)

    def _executable(self, graph: GraphSpec) -> Any:
        key = (graph.tag, graph.bucket)
        if key not in self._executables:
            proto = (self.bundle.path / graph.file).read_bytes()
            if TARGET.encode() in proto:
                custom_calls.register()
            self._executables[key] = compile_hlo(proto, self._devices)
        return self._executables[key]

    def _load_weights(self) -> dict[str, Any]:
        if fault := next(shard_faults(self.bundle), None):
            raise UserError(f"{self.bundle.path} cannot run: {fault}; build the bundle again")
        shards = [_read_shard(self.bundle.path / shard_file(rank)) for rank in range(self.tp)]
        needed = {t.name for g in self.bundle.graphs for t in g.weights}
        return {name: self._put([shard[name] for shard in shards]) for name in needed}

    def _zeros(self, tensor: TensorSpec) -> Any:
        return self._put([np.zeros(tensor.shape, BY_NAME[tensor.dtype].numpy)] * self.tp)

    def _put(self, parts: list[np.ndarray]) -> Any:
        return self._join([jax.device_put(p, d) for p, d in zip(parts, self._devices, strict=True)])

    def _join(self, parts: list[Any]) -> Any:
        if self.tp == 1:
            return parts[0]
        first = parts[0].shape
        return jax.make_array_from_single_device_arrays((first[0] * self.tp, *first[1:]), self._sharding, parts)


def _cpu_devices(count: int) -> list[Any]:
    # once the devices are made, they must do
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", max(count, _MIN_DEVICES))
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise UserError(f"this process has {len(devices)} CPU devices, the bundle needs {count}; start a new process")
    return list(devices[:count])


def _read_shard(file: Path) -> dict[str, np.ndarray]:
    with safe_open(file, framework="np") as shard:
        return {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118


def compile_hlo(proto: bytes, devices: list[Any]) -> Any:
    """An executable of an HLO proto, one replica a device."""
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = len(devices), 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.arange(len(devices)).reshape(-1, 1))
    client, listed = devices[0].client, xla_client.DeviceList(tuple(devices))
    stablehlo = _jaxlib.mlir.hlo_to_stablehlo(proto)
    return client.compile_and_load(stablehlo, listed, options)
