"""Rotary position embedding (RoPE), with optional YaRN scaling."""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model.config import ModelConfig, Yarn


class Rotation(NamedTuple):
    """cos and sin of the rows' angles, both (B, N, D / 2) fp32."""

    cos_BND: Tensor
    sin_BND: Tensor


def rotation(positions_BN: Tensor, config: ModelConfig) -> Rotation:
    """cos and sin of position * frequency; frequency i is theta^(-2i/D), or YaRN's."""
    yarn: Yarn | None = getattr(config, "rope_scaling", None)
    if yarn:
        inverse, scale = list(yarn_frequencies(config.head_dim, config.rope_theta, yarn)), attention_factor(yarn)
    else:
        inverse, scale = [config.rope_theta ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)], 1.0
    frequencies = torch.tensor(inverse, dtype=torch.float32, device=positions_BN.device)
    angles_BND = positions_BN[..., None].float() * frequencies
    rope = Rotation(angles_BND.cos(), angles_BND.sin())
    return rope if scale == 1.0 else Rotation(rope.cos_BND * scale, rope.sin_BND * scale)


def apply_rope(x_BHND: Tensor, rope: Rotation) -> Tensor:
    """Rotates pairs (i, i + D/2), the half-split layout of the checkpoints."""
    cos, sin = (part_BND[:, None].to(x_BHND.dtype) for part_BND in rope)
    a, b = x_BHND.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@cache
def yarn_frequencies(head_dim: int, theta: float, yarn: Yarn) -> tuple[float, ...]:
    """High frequencies are unchanged, low ones are divided by the factor, a linear ramp interpolates between them.

    Source: YaRN (arXiv 2309.00071). In fp32 and in the order of transformers' `_compute_yarn_parameters`: at position
    40,000 the last bit of a frequency changes the angle by 0.002.
    """
    length = yarn.original_max_position_embeddings
    # the dimension whose frequency makes this many rotations over the original context length
    low, high = (
        head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        for rotations in (yarn.beta_fast, yarn.beta_slow)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), head_dim - 1)
    dims = np.arange(head_dim // 2, dtype=np.float32)
    ramp = np.clip((dims - np.float32(low)) / np.float32(high - low or 0.001), np.float32(0), np.float32(1))
    plain = np.array([theta ** float(np.float32(2 * i / head_dim)) for i in range(head_dim // 2)], np.float32)
    fast, slow = np.float32(1) / plain, np.float32(1) / (np.float32(yarn.factor) * plain)
    fast_share = np.float32(1) - ramp
    return tuple(map(float, slow * (np.float32(1) - fast_share) + fast * fast_share))


def attention_factor(yarn: Yarn) -> float:
    """The factor of cos and sin: `attention_factor` if given, else YaRN's."""
    return 0.1 * math.log(yarn.factor) + 1.0 if yarn.attention_factor is None else yarn.attention_factor
