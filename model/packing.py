"""Which weights of a layer a bundle holds packed, block by block as the fused layer kernels stream them."""

from __future__ import annotations

from typing import NamedTuple

from model.config import LayerConfig

# the sizes that the fused kernels take: a hidden size of whole partitions, and one head dim
_HIDDEN_UNIT, _FUSED_DIM = 128, 128


class Packing(NamedTuple):
    """The halves of each layer whose weights are packed; the neutral value is NxDI's layout."""

    attention: bool = False
    mlp: bool = False


def fused_packing(config: LayerConfig, tp: int) -> Packing:
    """The halves that the fused kernels can serve."""
    whole = config.hidden_size % _HIDDEN_UNIT == 0
    # gate and up are dealt to two cores
    return Packing(whole and config.head_dim == _FUSED_DIM, whole and config.intermediate_size // tp % 2 == 0)


def nothing_packed(config: LayerConfig, tp: int) -> Packing:
    """NxDI's layout for every model."""
    return Packing()
