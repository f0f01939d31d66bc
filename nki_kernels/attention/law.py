"""The laws of attention: plain numpy in fp64, loops welcome, no `nki`.

Dimension key: B sequences, H query heads, G kv heads, D head dim, N = k + 1 candidate rows, S positions, R rows,
M shards, C rows of a prompt.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def visible_slots(first: int, n: int, ancestors: int | None) -> list[int]:
    """The slots that row n, in slot first + n, sees: those up to its own, or the prefix and its ancestors."""
    if ancestors is None:
        return list(range(first + n + 1))
    return [*range(first), *(first + j for j in range(32) if ancestors >> j & 1)]


def verify_attention(
    q: Array, new: tuple[Array, Array], cache: tuple[Array, Array], positions: Array, ancestors: Array | None = None
) -> tuple[Array, Array]:
    """Append rows to keys and values (B, G, S, D), in place, then attend: out (B, H, N, D) and lse (B, H, N).

    Row n of sequence b is in slot positions[b, 0] + n; query head h reads kv head h // (H / G).
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


def prompt_attention(q: Array, cache: tuple[Array, Array], start: int) -> Array:
    """Rows start to start + C - 1 of one sequence, q (H, C, D), over its keys and values (G, S, D), theirs among them.

    Returns out (H, C, D); query head h reads kv head h // (H / G).
    """
    heads, count, dim = q.shape
    group, out = heads // cache[0].shape[0], np.zeros(q.shape)
    for h in range(heads):
        for r in range(count):
            keys, values = (kept[h // group, : start + r + 1] for kept in cache)
            scores = keys @ q[h, r] / np.sqrt(dim)
            weights = np.exp(scores - scores.max())
            out[h, r] = weights @ values / weights.sum()
    return out


def merge_attention(part: Array, lse: Array) -> tuple[Array, Array]:
    """Attention over the union of M shards from part (M, R, D) and lse (M, R): out (R, D) and lse (R,)."""
    weights = np.exp(lse - lse.max(0))
    out = (weights[..., None] * part).sum(0) / weights.sum(0)[:, None]
    return out, lse.max(0) + np.log(weights.sum(0))
