"""One model of a bundle, target or draft: its configuration, its ranks, and every weight's name and shape."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from model.config import ModelConfig
from model.context import ONE_RANK, Context
from model.drafters.registry import drafter_of
from model.weights import Packing, Weight

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Part:
    """The target or the draft of a bundle, on one of the context's ranks."""

    role: str
    name: str
    config: Any
    ctx: Context

    @property
    def prefix(self) -> str:
        """The prefix of its parameters, weights and caches: its name in a Pair."""
        return f"{self.role}_model"

    @property
    def packing(self) -> Packing:
        """The halves of its layers whose weights are packed; a target is what a chain drafts with."""
        packing = self.ctx.packing(self.config)
        return packing if drafter_of(self.config).packs_attention else packing._replace(attention={})

    @property
    def weights(self) -> list[Weight]:
        """Every weight but the rank's number."""
        return drafter_of(self.config).weights(self.config, self.packing)

    @property
    def shapes(self) -> Shapes:
        """Parameter -> its shape on one rank."""
        return _shapes(self.config, self.ctx)


def checkpoint_shapes(config: ModelConfig) -> Shapes:
    """Hugging Face name -> shape of every tensor in a checkpoint of this configuration."""
    shapes = _shapes(config, ONE_RANK)
    return {w.parts[0][0]: shapes[w.name] for w in drafter_of(config).weights(config, Packing())}


@functools.lru_cache(maxsize=16)
def _shapes(config: Any, ctx: Context) -> Shapes:
    with torch.device("meta"):
        model = ctx.fuse(drafter_of(config).model_type(config, ctx))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
