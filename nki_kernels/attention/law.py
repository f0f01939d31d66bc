"""The laws of the kernels: plain numpy in fp64, loops welcome, no `nki`.

Dimension key: B sequences, H query heads, G kv heads, D head dim, N = k + 1 candidate rows,
S positions, V vocabulary, R rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def visible_slots(first: int, n: int, ancestors: int | None) -> list[int]:
    """Slots that row n sees, which stands in slot first + n: a chain's up to its own, a tree's prefix and ancestors."""
    if ancestors is None:
        return list(range(first + n + 1))
    return [*range(first), *(first + j for j in range(32) if ancestors >> j & 1)]


def verify_attention(
    q: Array, new: tuple[Array, Array], cache: tuple[Array, Array], positions: Array, ancestors: Array | None = None
) -> tuple[Array, Array]:
    """Append rows to keys and values (B, G, S, D), in place, then attend: out (B, H, N, D) and lse (B, H, N).

    Row n of sequence b stands in slot positions[b, 0] + n; query head h reads kv head h // (H / G).
    """
    batch, heads, count, dim = q.shape
    group = heads // cache[0].shape[1]
    out, lse = np.zeros(q.shape), np.zeros(q.shape[:3])
    for b in range(batch):
        first = int(positions[b, 0])
        for kept, rows in zip(cache, new, strict=True):
            kept[b, :, first : first + count] = rows[b]
        for n in range(count):
            seen = visible_slots(first, n, None if ancestors is None else int(ancestors[b, n]))
            for h in range(heads):
                scores = cache[0][b, h // group, seen] @ q[b, h, n] / np.sqrt(dim)
                weights = np.exp(scores - scores.max())
                out[b, h, n] = weights @ cache[1][b, h // group, seen] / weights.sum()
                lse[b, h, n] = scores.max() + np.log(weights.sum())
    return out, lse


def merge_attention(part: Array, lse: Array) -> tuple[Array, Array]:
    """Attention over the union of M shards from part (M, R, D) and lse (M, R): out (R, D) and lse (R,)."""
    weights = np.exp(lse - lse.max(0))
    out = (weights[..., None] * part).sum(0) / weights.sum(0)[:, None]
    return out, lse.max(0) + np.log(weights.sum(0))


def rms_norm(x: Array, gamma: Array, eps: float = 1e-6) -> Array:
    """gamma x / rms(x) over the last axis."""
    return gamma * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def decode_mlp(x: Array, gamma: Array, weights: tuple[Array, Array, Array], eps: float = 1e-6) -> Array:
    """A rank's part of the MLP for rows (R, E): gate and up are (I, E), down (E, I), as in a checkpoint."""
    gate, up, down = weights
    normed = rms_norm(x, gamma, eps)
    gated = normed @ gate.T
    return gated / (1 + np.exp(-gated)) * (normed @ up.T) @ down.T


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
    """A rank's part of attention for rows (B, N, E); writes keys and values (B, G, S, D) first, in place.

    norms are gamma (E,) and those of keys and queries (D,); weights q, k, v (heads * D, E) and out (E, H * D).
    """
    normed, dim = rms_norm(x, norms[0]), norms[1].shape[0]
    q, k, v = ((normed @ w.T).reshape(*x.shape[:2], -1, dim).swapaxes(1, 2) for w in weights[:3])
    k, q = rotate(rms_norm(k, norms[1]), *angles), rotate(rms_norm(q, norms[2]), *angles)
    out, _ = verify_attention(q, (k, v), cache, positions)
    return out.swapaxes(1, 2).reshape(*x.shape[:2], -1) @ weights[3].T
