"""Runs a bundle's NEFFs with `nrtpy`, AWS's Python binding of the Neuron runtime, without torch or JAX.

Each rank is a process (`trnspec/runtime/nrt_rank.py`) with its weights and caches on its core. Ranks read inputs from
shared memory, and rank 0 returns the outputs. An output that is an input of the next run stays on the cores.
"""

import os
import socket
import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.dtypes import BY_NAME
from model.errors import UserError
from model.graph_io import StepInputs
from model.graph_spec import GraphSpec, TensorSpec
from trnspec.bundle.opening import Bundle
from trnspec.runtime.nrt_rank import RUNS_AHEAD, SHARED, UNCHANGED, input_offsets
from trnspec.runtime.ranks import Ranks
from trnspec.runtime.runner import Runner

_CORES, _ROOT_ADDRESS, _LNC = "NEURON_RT_VISIBLE_CORES", "NEURON_RT_ROOT_COMM_ID", "NEURON_LOGICAL_NC_CONFIG"


@dataclass(frozen=True, eq=False)
class Output:
    """An output of a run; converting it to a NumPy array waits for the run."""

    run: Future[Any]
    index: int

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.run.result()[self.index], dtype)


class NrtRunner(Runner):
    """Loads a bundle's NEFFs on all ranks.

    Raises UserError for a bundle without NEFFs or weights, too few cores, or a rank that does not start.
    """

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        compiler = bundle.manifest.compiler
        if compiler.neff != "neff":
            raise UserError(
                f"{bundle.path} does not have a NEFF for each graph (neff: {compiler.neff}); run python -m "
                f"compile.neuron {bundle.path} on a machine with neuronx-cc"
            )
        # nrtpy loads NEFFs by path: write the verified bytes to a private folder
        self._folder = tempfile.TemporaryDirectory(prefix="trnspec-neff-")
        # the last run, whose outputs are on the cores, and the read-only inputs that are on the cores
        self._last: Future[Any] | None = None
        self._unchanged: dict[TensorSpec, np.ndarray] = {}
        # a ring of input buffers. A run's buffer is free when rank 0 ends it: its collectives need all ranks' inputs
        shared = Path(self._folder.name) / "inputs"
        size = max(input_offsets(graph)[-1] for graph in bundle.graphs)
        self._inputs = np.memmap(shared, np.uint8, "w+", shape=(RUNS_AHEAD, size))
        self._runs, self._count = deque[Future[Any]](maxlen=RUNS_AHEAD), 0
        arguments = [str(bundle.path), bundle.manifest.digest, str(shared)]
        self._ranks = Ranks("trnspec.runtime.nrt_rank", arguments, environments(self.tp, compiler.lnc))
        try:
            self._ranks.broadcast("ready")
        except UserError:
            self.close()
            raise

    def _load(self, graph: GraphSpec) -> None:
        file = Path(self._folder.name) / f"{graph.key.name}.neff"
        file.write_bytes(self.bundle.read(f"neff/{graph.key.name}.neff"))
        self._ranks.broadcast("load", graph.key, str(file))
        file.unlink()

    def _launch(self, graph: GraphSpec, inputs: StepInputs, every: bool = False) -> list[Any]:
        if len(self._runs) == RUNS_AHEAD:
            wait([self._runs[0]])
        line, offsets = self._count % RUNS_AHEAD, input_offsets(graph)
        pairs = zip(graph.inputs, offsets, strict=False)
        sources = [self._source(tensor, getattr(inputs, tensor.name), self._inputs[line, at:]) for tensor, at in pairs]
        self._last = self._ranks.submit("run", graph.key, line, sources, every=every)
        self._runs.append(self._last)
        self._count += 1
        return [Output(self._last, index) for index in range(len(graph.outputs))]

    def _warm_up(self, graph: GraphSpec, inputs: StepInputs) -> None:
        # wait for all ranks: first runs on ranks that are out of step are reported to fail
        self._launch(graph, inputs, every=True)[0].run.result()
        self._last = None

    def clear(self, slot: int, blocks: Sequence[int]) -> None:
        self._ranks.broadcast("clear", slot, list(blocks))

    def close(self) -> None:
        self._ranks.close()
        self._folder.cleanup()

    def _source(self, tensor: TensorSpec, array: Any, place: np.ndarray) -> int:
        """The source of an input: an output's index in the last run, UNCHANGED, or SHARED, written to `place`."""
        if isinstance(array, Output):
            if array.run is self._last:
                return array.index
            array = np.asarray(array)
        elif self._unchanged.get(tensor) is array:
            return UNCHANGED
        self._unchanged.pop(tensor, None)
        if not array.flags.writeable:
            self._unchanged[tensor] = array
        content = np.ascontiguousarray(array, BY_NAME[tensor.dtype].numpy)
        place[: content.nbytes] = content.reshape(-1).view(np.uint8)
        return SHARED


def environments(tp: int, lnc: int) -> list[dict[str, str]]:
    """The environment variables of each rank: its core, the root rank's address, LNC.

    Source: NKIPy, docs/user_guide/distributed_execution.md, and nrtpy's runtime configuration.
    """
    cores = _cores(os.environ.get(_CORES, f"0-{tp - 1}"))
    if len(cores) < tp:
        raise UserError(f"{_CORES} lists {len(cores)} cores, the bundle has {tp} ranks; list a core for each rank")
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        address = os.environ.get(_ROOT_ADDRESS, f"127.0.0.1:{probe.getsockname()[1]}")
    shared = {**os.environ, _ROOT_ADDRESS: address, _LNC: str(lnc)}
    return [shared | {_CORES: str(core)} for core in cores[:tp]]


def _cores(text: str) -> list[int]:
    """Parses a list of cores such as 0-3,8."""
    try:
        ranges = [[int(end) for end in part.split("-")] for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"{_CORES} is {text!r}; give numbers and ranges, such as 0-3,8") from error
    return [core for ends in ranges for core in range(ends[0], ends[-1] + 1)]
