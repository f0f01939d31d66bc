"""The laws of attention: NumPy in fp64, explicit loops, no `nki`.

Dimension key: B sequences, H query heads, G kv heads, D head dim, N = k + 1 new rows, S positions, C rows of a prompt.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def softmax_attention(q: Array, keys: Array, values: Array) -> Array:
    """Attention (D,) of one query (D,), times 1 / sqrt(D), over keys and values (S, D)."""
    scores = keys @ q
    weights = np.exp(scores - scores.max())
    out: Array = weights @ values / weights.sum()
    return out


def verify_attention(
    q: Array, new: tuple[Array, Array], cache: tuple[Array, Array], positions: Array, limit: Array | None = None
) -> Array:
    """Append new rows (B, G, N, D) to keys and values (B, G, S, D), in place, then attend: out (B, H, N, D).

    Row n of sequence b is at positions[b, n] and attends positions up to its own, or up to limit[b, 0].
    """
    out, group = np.zeros(q.shape), q.shape[1] // cache[0].shape[1]
    for b, h, n in np.ndindex(q.shape[:3]):
        for stored, rows in zip(cache, new, strict=True):
            stored[b, :, positions[b]] = rows[b].swapaxes(0, 1)
        end = 1 + int(positions[b, n] if limit is None else limit[b, 0])
        out[b, h, n] = softmax_attention(q[b, h, n], *(stored[b, h // group, :end] for stored in cache))
    return out


def append_rows(new: Array, pool: Array, positions: Array, block_table: Array) -> None:
    """Write rows (1, G, C, D) to a pool (pages, G, 128, D), in place; rows without a page go to a spare page."""
    for c, p in enumerate(positions[0]):
        page = block_table[0, p // 128] if 0 <= p < 128 * block_table.shape[1] else 0
        if page:
            pool[page, :, p % 128] = new[0, :, c]


def prompt_attention(q: Array, cache: tuple[Array, Array], start: int) -> Array:
    """Rows start to start + C - 1 of one sequence, q (H, C, D), over keys and values (G, S, D): out (H, C, D)."""
    out, group = np.zeros(q.shape), q.shape[0] // cache[0].shape[0]
    for h, r in np.ndindex(q.shape[:2]):
        out[h, r] = softmax_attention(q[h, r], *(stored[h // group, : start + r + 1] for stored in cache))
    return out
