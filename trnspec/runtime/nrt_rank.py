"""`python -m trnspec.runtime.nrt_rank`: one rank of a bundle on its core, started by `trnspec.runtime.nrt`.

It answers messages on a pipe (`trnspec/runtime/ranks.py`) until the pipe closes. Weights are written to the core once,
and every graph takes the same tensors; caches are input and output of a graph at once, so that it writes them in place.
"""

from __future__ import annotations

import importlib
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
from trnspec.bundle.opening import Bundle, read_bundle
from trnspec.bundle.shards import shard_tensors
from trnspec.runtime.ranks import Failure


class _Loaded(NamedTuple):
    """A NEFF on the core: its tensors by its own names, the inputs to write, and two sets of outputs.

    An output may be an input of the next run, which therefore writes to the other set.
    """

    model: Any
    resident: dict[str, Any]
    state: dict[str, Any]
    inputs: dict[str, TensorSpec]
    outputs: list[dict[str, Any]]


class Rank:
    """A bundle's tensors and graphs on one core."""

    def __init__(self, bundle: Bundle, rank: int, nrtpy: Any) -> None:
        self.bundle, self.rank, self._nrtpy = bundle, rank, nrtpy
        self._resident = {name: self._put(array) for name, array in shard_tensors(bundle, rank).items()}
        self._state = {t.name: self._zeros(t) for t in bundle.plan.state}
        self._inputs: dict[TensorSpec, Any] = {}
        self._graphs: dict[GraphKey, _Loaded] = {}
        # the outputs of the last run, in the plan's order
        self._last: list[Any] = []

    def ready(self) -> None:
        """Nothing: the answer says that weights and caches are on the core."""

    def load(self, key: GraphKey, neff: str) -> None:
        """Load a graph's NEFF, joined with the other ranks'."""
        graph, tp = self.bundle.plan.by_key[key], self.bundle.spec.tp
        model = self._nrtpy.NrtpyModel.load_from_neff(
            neff, name=key.name, core_id=0, cc_enabled=tp > 1, rank_id=self.rank, world_size=tp
        )
        weights, inputs, state = (
            _named(graph, tensors, model.input_tensors_info) for tensors in (graph.weights, graph.inputs, graph.state)
        )
        _no_others(graph, "input", weights.keys() | inputs.keys() | state.keys(), model.input_tensors_info)
        wanted = [t.name for t in (*graph.outputs, *graph.state)]
        _no_others(graph, "output", wanted, model.output_tensors_info)
        _no_others(graph, "output", model.output_tensors_info, wanted)
        resident = {name: self._resident[t.name] for name, t in weights.items()}
        resident |= {name: self._state[t.name] for name, t in state.items()}
        for tensor in inputs.values():
            self._inputs.setdefault(tensor, self._zeros(tensor))
        outputs = [{t.name: self._zeros(t) for t in graph.outputs} for _ in range(2)]
        written = {t.name: self._state[t.name] for t in graph.state}
        self._graphs[key] = _Loaded(model, resident, written, inputs, outputs)

    def run(self, key: GraphKey, given: Sequence[np.ndarray | int | None]) -> list[np.ndarray]:
        """Run a graph on inputs in the plan's order: an array, the place of an output of the last run, or None for what
        the input holds already."""
        graph, loaded = self.bundle.plan.by_key[key], self._graphs[key]
        inputs = {}
        for tensor, value in zip(graph.inputs, given, strict=True):
            inputs[tensor] = self._last[value] if isinstance(value, int) else self._inputs.get(tensor)
            if isinstance(value, np.ndarray) and tensor in self._inputs:
                self._inputs[tensor].write_from_numpy(value)
        loaded.outputs.reverse()
        outputs = loaded.outputs[0]
        loaded.model(loaded.resident | {n: inputs[t] for n, t in loaded.inputs.items()}, outputs | loaded.state)
        self._last = [outputs[t.name] for t in graph.outputs]
        return [_numpy(held, t) for held, t in zip(self._last, graph.outputs, strict=True)] if self.rank == 0 else []

    def clear(self, slot: int, blocks: Sequence[int]) -> None:
        """Zero the NaN in a slot's state and in its blocks."""
        for tensor in self.bundle.plan.state:
            array = _numpy(self._state[tensor.name], tensor).copy()
            places = list(blocks) if plan.is_cache(tensor.name) else [slot]
            array[places] = np.where(np.isfinite(array[places]), array[places], 0)
            self._state[tensor.name].write_from_numpy(array)

    def _put(self, array: np.ndarray) -> Any:
        return self._nrtpy.NrtpyTensor.from_numpy(np.ascontiguousarray(array), core_id=0)

    def _zeros(self, tensor: TensorSpec) -> Any:
        return self._put(np.zeros(tensor.shape, BY_NAME[tensor.dtype].numpy))


def _numpy(held: Any, tensor: TensorSpec) -> np.ndarray:
    # a tensor's dtype may come back void
    array: np.ndarray = held.numpy().view(BY_NAME[tensor.dtype].numpy)
    return array


def _named(graph: GraphSpec, tensors: Sequence[TensorSpec], there: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """A NEFF's names of these inputs; one that nothing reads may be missing."""
    names = {name: t for t in tensors for name in (t.name + STATE, t.name) if name in there}
    for name, tensor in names.items():
        if there[name].size != tensor.bytes:
            raise UserError(
                f"has a NEFF of {graph.key.name} whose {name} has {there[name].size} bytes, not {tensor.bytes}"
            )
    return names


def _no_others(graph: GraphSpec, what: str, wanted: Any, there: Any) -> None:
    if odd := sorted(set(there) - set(wanted)):
        raise UserError(f"has a NEFF of {graph.key.name} that differs from the plan in the {what} {odd[0]}")


def serve(pipe: Connection, rank: int, path: Path, digest: str) -> None:
    """Answer the messages of a pipe until it closes; a failure is the last answer."""
    number, held = 0, None
    try:
        while True:
            message = pipe.recv()
            if message is None:
                return
            number, answered, name, given = message
            held = held or _opened(rank, path, digest)
            value = getattr(held, name)(*given)
            if answered or rank == 0:
                pipe.send((number, value))
    except (EOFError, ConnectionError):
        return
    except Exception as error:  # whatever ends a rank, the others must not wait for it
        said = str(error) if isinstance(error, UserError) else f"failed ({type(error).__name__}: {str(error)[:200]})"
        pipe.send((number, Failure(said)))


def _opened(rank: int, path: Path, digest: str) -> Rank:
    bundle = read_bundle(path)
    if bundle.manifest.digest != digest:
        raise UserError(f"found a different bundle in {path}")
    # vendor seam
    return Rank(bundle, rank, importlib.import_module("nrtpy"))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
