"""Which weights of a layer are stored packed, in the order in which the fused layer kernels stream them."""

from __future__ import annotations

from typing import NamedTuple

from model.config import ModelConfig

# sizes of the fused kernels: a hidden size of full partitions, and one head dim
_HIDDEN_UNIT, _FUSED_DIM = 128, 128


class Packing(NamedTuple):
    """The halves of each layer whose weights are packed."""

    attention: bool = False
    mlp: bool = False


def fused_packing(config: ModelConfig, tp: int) -> Packing:
    """The halves that the fused kernels support."""
    full = config.hidden_size % _HIDDEN_UNIT == 0
    # gate and up are split between two cores
    return Packing(full and config.head_dim == _FUSED_DIM, full and config.intermediate_size // tp % 2 == 0)
