"""One model of a bundle, target or draft: its sizes, its ranks, and every weight's names, shapes and cuts."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from model.backing import REFERENCE, Backing
from model.config import ModelConfig
from model.cut import Weight
from model.drafters.kind import DraftModel
from model.drafters.registry import model_of
from model.packing import Packing
from model.parallel import ONE_RANK, Parallel
from model.weights import RANK

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Part:
    """The target or the draft of a bundle, split as `parallel` says, on a backing of kernels."""

    role: str
    name: str
    config: Any
    parallel: Parallel
    backing: Backing

    @property
    def model(self) -> DraftModel:
        """The facts of its kind of model."""
        return model_of(self.config)

    @property
    def ranks(self) -> int:
        """Ranks that hold one copy of it."""
        return self.parallel.tp

    @property
    def head_ranks(self) -> int:
        """Ranks that hold one copy of its head."""
        return self.parallel.tp

    @property
    def prefix(self) -> str:
        """The prefix of its parameters, caches and weights: its name in a Pair."""
        return f"{self.role}_model"

    @property
    def packing(self) -> Packing:
        """The halves of its layers whose weights are packed."""
        return self.model.packing(self.backing, self.config, self.ranks)

    @property
    def weights(self) -> list[Weight]:
        """Every weight, but the rank's number."""
        return self.model.weights(self.config, self.packing)

    @property
    def shapes(self) -> Shapes:
        """Our name -> the shape of every weight on one rank."""
        return _shapes(self.config, self.parallel, self.backing)

    def bundle_names(self, alone: bool) -> dict[str, str]:
        """A pair's parameter -> its name in the bundle.

        NxDI puts the model's prefix before a weight's name in a pair, and nothing before those of a target alone.
        """
        before = "" if alone else f"{self.prefix}."
        named = {w.ours: w.bundle for w in self.weights} | {RANK: RANK}
        return {f"{self.prefix}.{ours}": before + bundle for ours, bundle in named.items()}


def checkpoint_shapes(config: ModelConfig) -> Shapes:
    """Hugging Face name -> shape of every tensor that a checkpoint of this configuration holds."""
    shapes = _shapes(config, ONE_RANK, REFERENCE)
    return {w.parts[0][0]: shapes[w.ours] for w in model_of(config).weights(config, Packing())}


@functools.lru_cache(maxsize=16)
def _shapes(config: Any, parallel: Parallel, backing: Backing) -> Shapes:
    with torch.device("meta"):
        model = model_of(config).module(config, parallel, backing)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
