"""A bundle's NEFFs on a device, by `nrtpy`, AWS's Python binding of the Neuron runtime: neither torch nor JAX runs.

Each rank is a process (`trnspec/runtime/nrt_rank.py`) that holds the rank's weights and caches on its core. A run sends
it the inputs, some hundred bytes, and rank 0 sends the outputs back; an output that goes into the next run stays there.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.dtypes import BY_NAME
from model.errors import UserError
from model.graph_io import StepInputs, StepOutputs, zeros_of
from model.graph_key import GraphKey
from model.graph_spec import TensorSpec
from trnspec.bundle.opening import Bundle
from trnspec.runtime.ranks import Ranks

# the package that the ranks import, and the platform's name
PACKAGE = "nrtpy"
_RANK = "trnspec.runtime.nrt_rank"
_CORES, _MEETING, _LNC = "NEURON_RT_VISIBLE_CORES", "NEURON_RT_ROOT_COMM_ID", "NEURON_LOGICAL_NC_CONFIG"


@dataclass(frozen=True, eq=False)
class Output:
    """An output of a run, as numpy reads it: it waits for the run's end."""

    run: Future[Any]
    place: int
    shape: tuple[int, ...]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.run.result()[self.place], dtype)

    def is_ready(self) -> bool:
        """Whether the run has ended, as an array of JAX's says it."""
        return self.run.done()


class NrtGraphs:
    """The graphs of one bundle as NEFFs, loaded when first used, with their weights and state: as `runtime.Graphs`.

    Raises:
        UserError: no NEFFs or no weights in the bundle, too few cores, or a rank that cannot start.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self.tp = bundle, bundle.spec.tp
        compiler = bundle.manifest.compiler
        if compiler.neff != "neff":
            raise UserError(
                f"{bundle.path} holds no NEFF of each graph (neff: {compiler.neff}); run python -m compile.neuron "
                f"{bundle.path} where neuronx-cc is"
            )
        if not bundle.manifest.has_weights:
            raise UserError(f"{bundle.path} was built without weights; build it from checkpoint folders that hold them")
        # a rank loads a NEFF by its path: a copy of the bytes that were checked, which nobody else can exchange
        self._folder = tempfile.TemporaryDirectory(prefix="trnspec-neff-")
        self._loaded = set[GraphKey]()
        # the run whose outputs are on the cores, and the inputs there that nobody writes to
        self._last: Future[Any] | None = None
        self._there: dict[TensorSpec, np.ndarray] = {}
        self._ranks = Ranks(_RANK, [str(bundle.path), bundle.manifest.digest], _environments(self.tp, compiler.lnc))
        try:
            self._ranks.ask("ready")
        except UserError:
            self.close()
            raise

    def compiled_apart(self) -> AbstractContextManager[None]:
        """Nothing is compiled."""
        return nullcontext()

    def prepare(self, key: GraphKey) -> None:
        """Load a graph on every rank and run it once on zeros, while no sequence is in the cache."""
        if key not in self._loaded:
            self.rehearse(key)

    def rehearse(self, key: GraphKey, runs: int = 1, inputs: StepInputs | None = None) -> float:
        """The wall seconds of a run of a graph on zeros or other inputs, of several in a row, while no sequence is in
        the cache."""
        self._load(key)
        inputs = inputs or zeros_of(self.bundle.plan.by_key[key].inputs)
        begin = time.perf_counter()
        for run in [self._run(key, inputs)[0].run for _ in range(runs)]:
            run.result()
        return (time.perf_counter() - begin) / runs

    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        """Begin a run of a graph on numpy inputs; its outputs wait for its end when they are read."""
        return StepOutputs.of(self._run(key, inputs))

    def draft(self, key: GraphKey, inputs: StepInputs) -> Any:
        """The only output of a graph of the draft alone, as `run` has its outputs: in a step the candidates (B, N)."""
        (output,) = self._run(key, inputs)
        return output

    def clear(self, slot: int, blocks: Sequence[int]) -> None:
        """Zero the NaN in a slot's state and in its blocks: attention multiplies rows that it does not see by 0."""
        self._ranks.ask("clear", slot, list(blocks))

    def close(self) -> None:
        """End the ranks, with their weights, caches and graphs; nothing runs afterwards."""
        self._ranks.close()
        self._folder.cleanup()

    def _load(self, key: GraphKey) -> None:
        if key in self._loaded:
            return
        file = Path(self._folder.name) / f"{key.name}.neff"
        file.write_bytes(self.bundle.read(neff_file(key)))
        self._ranks.ask("load", key, str(file))
        file.unlink()
        self._loaded.add(key)

    def _run(self, key: GraphKey, inputs: StepInputs) -> list[Output]:
        self._load(key)
        graph = self.bundle.plan.by_key[key]
        self._last = self._ranks.tell("run", key, [self._sent(t, getattr(inputs, t.name)) for t in graph.inputs])
        return [Output(self._last, place, tensor.shape) for place, tensor in enumerate(graph.outputs)]

    def _sent(self, tensor: TensorSpec, array: Any) -> np.ndarray | int | None:
        """An input as the ranks get it: the place of an output of the last run, None for the array that is there."""
        if isinstance(array, Output):
            if array.run is self._last:
                return array.place
            array = np.asarray(array)
        elif self._there.get(tensor) is array:
            return None
        self._there.pop(tensor, None)
        if not array.flags.writeable:
            self._there[tensor] = array
        return np.ascontiguousarray(array, BY_NAME[tensor.dtype].numpy)


def neff_file(key: GraphKey) -> str:
    """The file of a graph's NEFF in a bundle."""
    return f"neff/{key.name}.neff"


def _environments(tp: int, lnc: int) -> list[dict[str, str]]:
    """Each rank's environment: its own core, the port where all meet, the cores of a logical core as they were built.

    Source: NKIPy, docs/user_guide/distributed_execution.md, and the runtime's configuration of nrtpy.
    """
    cores = _cores(os.environ.get(_CORES, f"0-{tp - 1}"))
    if len(cores) < tp:
        raise UserError(f"{_CORES} names {len(cores)} cores, the bundle has {tp} ranks; name a core for each")
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = os.environ.get(_MEETING, f"127.0.0.1:{probe.getsockname()[1]}")
    shared = {**os.environ, _MEETING: meeting, _LNC: str(lnc)}
    return [shared | {_CORES: str(core)} for core in cores[:tp]]


def _cores(named: str) -> list[int]:
    """The numbers of a list like 0-3,8."""
    try:
        ranges = [[int(end) for end in part.split("-")] for part in named.split(",")]
    except ValueError as error:
        raise UserError(f"{_CORES} is {named!r}; write numbers and ranges, such as 0-3,8") from error
    return [core for ends in ranges for core in range(ends[0], ends[-1] + 1)]
