"""One model of a bundle, target or draft: its configuration, its ranks, and every weight's name and shape."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from model.backing import REFERENCE, Backing
from model.config import ModelConfig
from model.drafters.kind import DraftModel
from model.drafters.registry import model_of
from model.packing import Packing
from model.parallel import ONE_RANK, Parallel
from model.weights import Weight

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Part:
    """The target or the draft of a bundle, split as `parallel` says, with the kernels of a backing."""

    role: str
    name: str
    config: Any
    parallel: Parallel
    backing: Backing

    @property
    def model(self) -> DraftModel:
        """The description of its kind of model."""
        return model_of(self.config)

    @property
    def prefix(self) -> str:
        """The prefix of its parameters, weights and caches: its name in a Pair."""
        return f"{self.role}_model"

    @property
    def packing(self) -> Packing:
        """The halves of its layers whose weights are packed."""
        return self.model.packing(self.backing, self.config, self.parallel.tp)

    @property
    def weights(self) -> list[Weight]:
        """Every weight but the rank's number."""
        return self.model.weights(self.config, self.packing)

    @property
    def shapes(self) -> Shapes:
        """Parameter -> its shape on one rank."""
        return _shapes(self.config, self.parallel, self.backing)


def checkpoint_shapes(config: ModelConfig) -> Shapes:
    """Hugging Face name -> shape of every tensor in a checkpoint of this configuration."""
    shapes = _shapes(config, ONE_RANK, REFERENCE)
    return {w.parts[0][0]: shapes[w.name] for w in model_of(config).weights(config, Packing())}


@functools.lru_cache(maxsize=16)
def _shapes(config: Any, parallel: Parallel, backing: Backing) -> Shapes:
    with torch.device("meta"):
        model = model_of(config).module(config, parallel, backing)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
