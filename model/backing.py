"""A backing of the model: its kernels, and the facts that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from model.cache import PLAIN, Layout
from model.config import Qwen3Config
from model.draft_config import Eagle3Config
from model.kernels import Kernels
from model.packing import Packing, nothing_packed


@dataclass(frozen=True)
class Backing:
    """What a model is built with.

    `layer` makes a decoder layer of a config, a `Parallel` and the kernels, `mlp` its half of a config and a
    `Parallel`, for layers that are not the target's; `layout` is that of its caches, `packing`
    says which weights of a config at a tp degree are packed. With `sharded` logits stay on their ranks: a draw is then
    a merge of the shards' best.
    """

    name: str
    kernels: Kernels
    layer: Callable[..., nn.Module]
    mlp: Callable[..., nn.Module]
    layout: Layout = PLAIN
    packing: Callable[[Qwen3Config | Eagle3Config, int], Packing] = nothing_packed
    sharded: bool = False
