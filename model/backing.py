"""A backing of the model: its kernels, and the facts that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from model.config import LayerConfig
from model.kernels import Kernels
from model.packing import Packing, nothing_packed


@dataclass(frozen=True)
class Backing:
    """The kernels, layers and layouts that a model is built with.

    `layer` makes a decoder layer from a config, a `Parallel` and the kernels, and `layers` the list of them that runs a
    pass; `mlp` makes a layer's second half, which `branch` runs behind its norm; without them a model has those of
    `model/qwen3.py`. `packing` says which weights
    of a config at a tp degree are packed. With `sharded` logits stay on their ranks: a draw then merges the shards'
    best. A prompt's graph has a multiple of `prompt_rows` rows.
    """

    name: str
    kernels: Kernels
    layer: Callable[..., nn.Module] | None = None
    layers: Callable[..., Any] | None = None
    mlp: Callable[..., Any] | None = None
    branch: Callable[..., Tensor] | None = None
    packing: Callable[[LayerConfig, int], Packing] = nothing_packed
    sharded: bool = False
    prompt_rows: int = 16


REFERENCE = Backing("reference", Kernels())
