"""Runs the graphs of a bundle: what the runners of XLA and of nrtpy share."""

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
    """The graphs of one bundle, loaded when first used; weights, caches and draft state stay on the devices.

    A run takes numpy inputs. Its outputs are arrays that numpy can read, which waits for the run; the next ids and
    positions of the last run may be inputs of the next one unread. Raises UserError for a bundle without weights.
    """

    def __init__(self, bundle: Bundle) -> None:
        if not bundle.manifest.has_weights:
            raise UserError(f"{bundle.path} was built without weights; build it from checkpoint folders that hold them")
        self.bundle, self.tp = bundle, bundle.spec.tp
        self.loaded = set[GraphKey]()

    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        return StepOutputs(*self.launch(key, inputs))

    def draft(self, key: GraphKey, inputs: StepInputs) -> Any:
        """Launch a graph of the draft; returns the candidates (B, N)."""
        (candidates_BN,) = self.launch(key, inputs)
        return candidates_BN

    def prepare(self, key: GraphKey, warm: bool = True) -> None:
        """Load a graph; `warm` also runs it once on zeros, since a first run is slow, while no sequence is active."""
        if key not in self.loaded:
            self.load(key)
            if warm:
                self._rehearse(self.graph(key), zeros_of(self.graph(key).inputs))

    def load(self, key: GraphKey) -> None:
        """Compile or load a graph, if it is not loaded."""
        if key not in self.loaded:
            self._load(self.graph(key))
            self.loaded.add(key)

    def launch(self, key: GraphKey, inputs: StepInputs) -> list[Any]:
        """Launch a graph, loading it first; returns its outputs."""
        self.load(key)
        return self._launch(self.graph(key), inputs)

    def graph(self, key: GraphKey) -> GraphSpec:
        return self.bundle.plan.by_key[key]

    @abstractmethod
    def _load(self, graph: GraphSpec) -> None: ...

    @abstractmethod
    def _launch(self, graph: GraphSpec, inputs: StepInputs) -> list[Any]: ...

    def _rehearse(self, graph: GraphSpec, inputs: StepInputs) -> None:
        """Run a graph for the first time, and wait for it."""
        np.asarray(self._launch(graph, inputs)[0])

    @abstractmethod
    def clear(self, slot: int, blocks: Sequence[int]) -> None:
        """Zero NaN in a slot's state and in blocks: attention multiplies rows that it does not see by 0."""

    @abstractmethod
    def close(self) -> None:
        """Free the devices' memory; nothing runs afterwards."""


def platform_of(bundle: Bundle, platform: str = "auto") -> str:
    """A platform's name; auto is neuron for a bundle with NEFFs where devices and nrtpy are, else cpu."""
    if platform not in PLATFORMS:
        raise UserError(f"platform is {platform!r}; it must be {', '.join(PLATFORMS[:-1])} or {PLATFORMS[-1]}")
    here = any(Path("/dev").glob("neuron[0-9]*")) and importlib.util.find_spec("nrtpy") is not None
    return platform if platform != "auto" else "neuron" if here and bundle.manifest.compiler.neff == "neff" else "cpu"


def load_runner(bundle: Bundle, platform: str = "auto") -> Runner:
    """A bundle on a platform: cpu, neuron (NEFFs by nrtpy), or pjrt (libneuronxla's plugin in JAX, a smoke test)."""
    platform = platform_of(bundle, platform)
    if platform == "neuron":
        from trnspec.runtime.nrt import NrtRunner  # noqa: PLC0415 (neither jax nor torch)

        return NrtRunner(bundle)
    from trnspec.runtime.xla import XlaRunner  # noqa: PLC0415

    return XlaRunner(bundle, "neuron" if platform == "pjrt" else platform)
