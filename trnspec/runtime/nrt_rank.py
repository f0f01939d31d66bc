"""`python -m trnspec.runtime.nrt_rank`: the process of one rank, started by `trnspec.runtime.nrt`.

Serves the messages of a pipe (`trnspec/runtime/ranks.py`) until it closes. All graphs share the weights on the core; a
cache is an input and an output of a graph, which updates it in place.
"""

import importlib
import itertools
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from model.dtypes import BY_NAME
from model.errors import UserError
from model.graph_key import GraphKey
from model.graph_spec import GraphSpec, TensorSpec
from trnspec.bundle import plan
from trnspec.bundle.hlo import STATE
from trnspec.bundle.opening import read_bundle
from trnspec.bundle.shards import shard_tensors
from trnspec.runtime.ranks import serve

# sources of an input that is not an output of the last run: shared memory, or the core, where an earlier run left it
SHARED, UNCHANGED = -1, -2
# input buffers in shared memory
RUNS_AHEAD = 4
_ALIGNMENT = 64


def input_offsets(graph: GraphSpec) -> list[int]:
    """The offset in bytes of each input in a buffer of shared memory, and the end of the last one."""
    sizes = (-(-tensor.bytes // _ALIGNMENT) * _ALIGNMENT for tensor in graph.inputs)
    return list(itertools.accumulate(sizes, initial=0))


class _Loaded(NamedTuple):
    """A NEFF on the core. `resident`: weights and state by input name; `inputs`: the other inputs; `state`: state by
    output name. `outputs` has two sets: one may be input of the next run, which writes to the other."""

    model: Any
    resident: dict[str, Any]
    inputs: dict[str, TensorSpec]
    state: dict[str, Any]
    outputs: list[dict[str, Any]]


class RankWorker:
    """A bundle's tensors and graphs on one core. Raises UserError if the folder now has a different bundle."""

    def __init__(self, rank: int, path: str, digest: str, shared: str, nrtpy: Any = None) -> None:
        self.bundle, self.rank = read_bundle(Path(path)), rank
        if self.bundle.manifest.digest != digest:
            raise UserError(f"has a different bundle in {path}")
        self._shared = np.memmap(shared, np.uint8, "r").reshape(RUNS_AHEAD, -1)
        # vendor seam
        self._nrtpy = nrtpy or importlib.import_module("nrtpy")
        self._weights = {name: self._put(array) for name, array in shard_tensors(self.bundle, rank).items()}
        self._state = {t.name: self._zeros(t) for t in self.bundle.plan.state}
        self._inputs: dict[TensorSpec, Any] = {}
        self._graphs: dict[GraphKey, _Loaded] = {}
        # the outputs of the last run, in the plan's order
        self._last: list[Any] = []

    def ready(self) -> None:
        """Does nothing; the reply means that weights and caches are on the core."""

    def load(self, key: GraphKey, neff: str) -> None:
        """Loads a graph's NEFF, with its collectives over all ranks."""
        graph, tp = self.bundle.plan.by_key[key], self.bundle.spec.tp
        model = self._nrtpy.NrtpyModel.load_from_neff(
            neff, name=key.name, core_id=0, cc_enabled=tp > 1, rank_id=self.rank, world_size=tp
        )
        names, outputs = _names(graph, model.input_tensors_info), [t.name for t in (*graph.outputs, *graph.state)]
        unknown = set(model.input_tensors_info) - names.keys(), set(model.output_tensors_info) ^ set(outputs)
        for kind, different in zip(("input", "output"), unknown, strict=True):
            if different:
                raise UserError(f"has a NEFF of {key.name} that differs from the plan in the {kind} {min(different)}")
        stored = self._weights | self._state
        resident = {name: stored[t.name] for name, t in names.items() if t.name in stored}
        inputs = {name: t for name, t in names.items() if t.name not in stored}
        written = {t.name: self._state[t.name] for t in graph.state}
        two = [{t.name: self._zeros(t) for t in graph.outputs} for _ in range(2)]
        self._graphs[key] = _Loaded(model, resident, inputs, written, two)

    def run(self, key: GraphKey, line: int, sources: Sequence[int]) -> list[np.ndarray]:
        """Runs a graph. Sources in the plan's order: an output's index in the last run, UNCHANGED, or SHARED.

        SHARED inputs are in buffer `line` of the shared memory, at `input_offsets`.
        """
        graph, loaded = self.bundle.plan.by_key[key], self._graphs[key]
        inputs = {}
        for tensor, source, at in zip(graph.inputs, sources, input_offsets(graph), strict=False):
            if source == SHARED:
                # even if this NEFF does not read it: the value is not sent again to the next one, which may
                value = (
                    self._shared[line, at : at + tensor.bytes].view(BY_NAME[tensor.dtype].numpy).reshape(tensor.shape)
                )
                if tensor in self._inputs:
                    self._inputs[tensor].write_from_numpy(value)
                else:
                    self._inputs[tensor] = self._put(value)
            inputs[tensor] = self._last[source] if source >= 0 else self._inputs[tensor]
        loaded.outputs.reverse()
        outputs = loaded.outputs[0]
        loaded.model(loaded.resident | {n: inputs[t] for n, t in loaded.inputs.items()}, outputs | loaded.state)
        self._last = [outputs[t.name] for t in graph.outputs]
        return [_numpy(x, t) for x, t in zip(self._last, graph.outputs, strict=True)] if self.rank == 0 else []

    def clear(self, slot: int, blocks: Sequence[int]) -> None:
        """Replaces NaN and infinity by 0 in a slot's state and in blocks."""
        for tensor in self.bundle.plan.state:
            array = _numpy(self._state[tensor.name], tensor).copy()
            rows = list(blocks) if plan.is_cache(tensor.name) else [slot]
            array[rows] = np.where(np.isfinite(array[rows]), array[rows], 0)
            self._state[tensor.name].write_from_numpy(array)

    def _put(self, array: np.ndarray) -> Any:
        return self._nrtpy.NrtpyTensor.from_numpy(np.ascontiguousarray(array), core_id=0)

    def _zeros(self, tensor: TensorSpec) -> Any:
        return self._put(np.zeros(tensor.shape, BY_NAME[tensor.dtype].numpy))


def _numpy(tensor: Any, spec: TensorSpec) -> np.ndarray:
    # nrtpy may return a void dtype
    return tensor.numpy().view(BY_NAME[spec.dtype].numpy)


def _names(graph: GraphSpec, loaded: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """The tensors of a graph by the names of a NEFF's inputs; a NEFF may omit inputs that it does not read."""
    tensors = (*graph.weights, *graph.inputs, *graph.state)
    names = {name: t for t in tensors for name in (t.name + STATE, t.name) if name in loaded}
    for name, tensor in names.items():
        if (size := loaded[name].size) != tensor.bytes:
            raise UserError(f"has a NEFF of {graph.key.name} whose {name} has {size} bytes, not {tensor.bytes}")
    return names


if __name__ == "__main__":
    number, *arguments = sys.argv[2:]
    serve(Connection(int(sys.argv[1])), int(number), lambda: RankWorker(int(number), *arguments))
