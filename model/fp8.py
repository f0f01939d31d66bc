"""FP8 weights of projections: float8_e4m3 numbers and one fp32 scale per output channel, y = (x W) * scale.

The product is summed in fp32, scaled, and rounded once to x's dtype. A scale is the largest magnitude of a channel of
the full weight / 240, so values do not depend on tp. trn2's float8_e4m3 ends at 240; torch only has float8_e4m3fn, up
to 448, which has the same bits up to 240. Checkpoints of Qwen in FP8 have one scale per block of 128 x 128 instead.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.dtypes import FP8

LARGEST = 240.0
# of a block of Qwen's checkpoints
BLOCK = 128


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 numbers (out, in) and scales (out, 1) of a weight.

    Raises:
        ValueError: a channel has NaN, infinity, or numbers so small that its scale is subnormal.
    """
    weight = weight.float()
    largest = weight.abs().amax(1, keepdim=True)
    if not torch.isfinite(largest).all():
        raise ValueError("has NaN or infinity")
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    if (smallest := float(scale.min())) < torch.finfo(torch.float32).tiny:
        raise ValueError(f"has a channel whose largest number is {smallest * LARGEST:.3g}, its scale is subnormal")
    return (weight / scale).to(FP8.torch), scale


def of_blocks(weight: Tensor, scales: Tensor) -> Tensor:
    """The numbers, fp32, of an FP8 weight with a scale for each block."""
    of_rows = scales.float().repeat_interleave(BLOCK, 0)[: weight.shape[0]]
    return weight.float() * of_rows.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]


class FP8Linear(nn.Module):
    """A projection with FP8 weights, in the place of one of the same shape."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.ops: Any = getattr(linear, "ops", None)
        self.weight = linear.weight
        self.weight_scale = nn.Parameter(torch.ones(linear.out_features, 1, device=linear.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        y = (F.linear(x.float(), self.weight.float()) * self.weight_scale.T).to(x.dtype)
        return self.ops.all_reduce(y) if self.ops else y


def quantize_projections(layers: Any) -> None:
    """Give a model's layers modules for FP8 weights."""
    for half in (half for layer in layers for half in (layer.self_attn, layer.mlp)):
        for name, child in list(half.named_children()):
            if isinstance(child, nn.Linear):
                setattr(half, name, FP8Linear(child))
