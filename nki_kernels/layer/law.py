"""The laws of a decoder layer's halves: NumPy in fp64, no `nki`.

Dimension key: B sequences of N new rows, R = B N, E hidden, I intermediate, H query and G kv heads of D, S positions.
"""

from __future__ import annotations

import numpy as np

from nki_kernels.attention.law import Array, verify_attention


def rms_norm(x: Array, gamma: Array, eps: float = 1e-6) -> Array:
    """gamma x / rms(x) over the last axis."""
    return gamma * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def decode_mlp(x: Array, gamma: Array, weights: tuple[Array, Array, Array], eps: float = 1e-6) -> Array:
    """A rank's partial sum of the MLP for rows (R, E): gate and up are (I, E), down (E, I), as in a checkpoint."""
    gate, up, down = weights
    normed = rms_norm(x, gamma, eps)
    gated = normed @ gate.T
    return gated / (1 + np.exp(-gated)) * (normed @ up.T) @ down.T


def rope_tables(positions: Array, dim: int, theta: float = 1e6) -> tuple[Array, Array]:
    """cos and sin (B, N, D / 2) of position / theta^(2i / D), in fp32 as the model computes them."""
    inverse = np.array([theta ** (-2 * i / dim) for i in range(dim // 2)], np.float32)
    angles = np.asarray(positions)[..., None].astype(np.float32) * inverse
    return np.cos(angles), np.sin(angles)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding of heads (B, H, N, D) by tables (B, N, D / 2): pairs (i, i + D / 2)."""
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]], -1)


def decode_attention(
    x: Array,
    norms: tuple[Array, ...],
    weights: tuple[Array, ...],
    angles: tuple[Array, Array],
    cache: tuple[Array, Array],
    positions: Array,
) -> Array:
    """A rank's partial sum of attention for rows (B, N, E); writes keys and values (B, G, S, D) first, in place.

    norms are gamma (E,) and those of keys and queries (D,); weights q, k, v (heads * D, E) and out (E, H * D).
    """
    normed, dim = rms_norm(x, norms[0]), norms[1].shape[0]
    q, k, v = ((normed @ w.T).reshape(*x.shape[:2], -1, dim).swapaxes(1, 2) for w in weights[:3])
    k, q = rotate(rms_norm(k, norms[1]), *angles), rotate(rms_norm(q, norms[2]), *angles)
    out = verify_attention(q * dim**-0.5, (k, v), cache, positions)
    return out.swapaxes(1, 2).reshape(*x.shape[:2], -1) @ weights[3].T
