"""The base class of the runners (XLA, nrtpy), and the choice of a platform."""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import UserError
from model.graph_io import StepInputs, StepOutputs, zeros_of
from model.graph_key import GraphKey
from model.graph_spec import GraphSpec
from trnspec.bundle.opening import Bundle

PLATFORMS = ("auto", "cpu", "neuron", "pjrt")


class Runner(ABC):
    """Loads graphs on first use and runs them; weights, caches and draft state stay on the devices.

    Inputs are NumPy arrays. Outputs are arrays; converting one to NumPy waits for the run. `next_ids` and
    `next_positions` of the last run can be inputs of the next run without conversion. Raises UserError for a bundle
    without weights.
    """

    def __init__(self, bundle: Bundle) -> None:
        if not bundle.manifest.has_weights:
            raise UserError(f"{bundle.path} was built without weights; build it from checkpoint folders with weights")
        self.bundle, self.tp = bundle, bundle.spec.tp
        self.loaded = set[GraphKey]()

    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        return StepOutputs(*self.launch(key, inputs))

    def draft(self, key: GraphKey, inputs: StepInputs) -> Any:
        """Launches the draft half of a split step; returns the candidates (B, N)."""
        (candidates_BN,) = self.launch(key, inputs)
        return candidates_BN

    def prepare(self, key: GraphKey, warm: bool = True) -> None:
        """Loads a graph; `warm`, while no sequence is active, also runs it on zeros, because first runs are slow."""
        if key not in self.loaded:
            self._load(self.graph(key))
            self.loaded.add(key)
            if warm:
                self._warm_up(self.graph(key), zeros_of(self.graph(key).inputs))

    def launch(self, key: GraphKey, inputs: StepInputs) -> list[Any]:
        """Launches a graph, loaded if necessary; returns its outputs."""
        self.prepare(key, warm=False)
        return self._launch(self.graph(key), inputs)

    def graph(self, key: GraphKey) -> GraphSpec:
        return self.bundle.plan.by_key[key]

    @abstractmethod
    def _load(self, graph: GraphSpec) -> None: ...

    @abstractmethod
    def _launch(self, graph: GraphSpec, inputs: StepInputs) -> list[Any]: ...

    def _warm_up(self, graph: GraphSpec, inputs: StepInputs) -> None:
        """Runs a graph for the first time and waits for it."""
        np.asarray(self._launch(graph, inputs)[0])

    @abstractmethod
    def clear(self, slot: int, blocks: Sequence[int]) -> None:
        """Replaces NaN and infinity by 0 in a slot's state and in blocks: attention multiplies invisible rows by 0."""

    @abstractmethod
    def close(self) -> None:
        """Frees the devices' memory; the runner cannot be used afterwards."""


def platform_of(bundle: Bundle, platform: str = "auto") -> str:
    """Resolves a platform: auto is neuron if the bundle has NEFFs and the machine has devices and nrtpy, else cpu."""
    if platform not in PLATFORMS:
        raise UserError(f"platform is {platform!r}; it must be {', '.join(PLATFORMS[:-1])} or {PLATFORMS[-1]}")
    if platform != "auto":
        return platform
    has_device = any(Path("/dev").glob("neuron[0-9]*")) and importlib.util.find_spec("nrtpy") is not None
    return "neuron" if has_device and bundle.manifest.compiler.neff == "neff" else "cpu"


def load_runner(bundle: Bundle, platform: str = "auto") -> Runner:
    """The runner of a bundle: cpu, neuron (NEFFs with nrtpy), or pjrt (libneuronxla's plugin in JAX, a smoke test)."""
    platform = platform_of(bundle, platform)
    if platform == "neuron":
        from trnspec.runtime.nrt import NrtRunner  # noqa: PLC0415 (neither jax nor torch)

        return NrtRunner(bundle)
    from trnspec.runtime.xla import XlaRunner  # noqa: PLC0415

    return XlaRunner(bundle, "neuron" if platform == "pjrt" else platform)
