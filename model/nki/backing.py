"""The backings by the names of the build's flag: torch alone, or NKI kernels, launched by a given function."""

from __future__ import annotations

import functools

from torch import Tensor

from model.attention import KEY_TILE
from model.backing import REFERENCE, Backing
from model.nki.fused_layer import FusedLayer, FusedLayers, branch, fused_mlp
from model.nki.kernels import NkiKernels
from model.nki.launches import Launch, Launcher
from model.packing import fused_packing

NAMES = (REFERENCE.name, "nki")


def planned(launch: Launch, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Refuses every launch: a plan reads a backing's facts alone."""
    raise AssertionError(f"{launch.kernel} was launched while planning")


@functools.cache
def backing_of(name: str, launch: Launcher = planned, layers: int = 1) -> Backing:
    """The backing of one of `NAMES`, its kernels served by `launch`, with at most so many layers in a launch."""
    if name == REFERENCE.name:
        return REFERENCE
    kernels = NkiKernels(launch)
    return Backing(
        name, kernels, FusedLayer, functools.partial(FusedLayers, most=layers), fused_mlp, branch, fused_packing,
        sharded=True, prompt_rows=KEY_TILE,
    )  # fmt: skip
