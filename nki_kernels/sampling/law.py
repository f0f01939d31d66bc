"""The laws of the sampling kernels: Python integers and NumPy in fp64, explicit loops, no `nki`.

Specification: docs/sampling.md. R rows, V ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_WORD = (1 << 32) - 1


@dataclass(frozen=True)
class RowParameters:
    """The sampling parameters of one row; by default no filter is on."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Both words of Threefry-2x32 with 13 rounds (Salmon et al., SC 2011)."""
    schedule = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (c + k & _WORD for c, k in zip(counter, key, strict=True))
    for r in range(13):
        by = _ROTATIONS[r % 8]
        x = x + y & _WORD
        y = (y << by & _WORD | y >> 32 - by) ^ x
        if r % 4 == 3:
            s = r // 4 + 1
            x, y = x + schedule[s % 3] & _WORD, y + schedule[(s + 1) % 3] + s & _WORD
    return x, y


def uniform(seed: tuple[int, int], position: int, token: int, domain: int = 0) -> float:
    """The uniform number of (seed, position, token id) in a domain, strictly between 0 and 1."""
    word = threefry(seed, (token >> 1, position + (domain << 24)))[token & 1]
    return ((word >> 9) + 0.5) / 2**23


def gumbel_noise(seed: tuple[int, int], position: int, ids: range, domain: int = 0) -> Array:
    """-log(-log u) for each id."""
    return np.array([-np.log(-np.log(uniform(seed, position, i, domain))) for i in ids])


def filter_mask(logits: Array, row: RowParameters) -> NDArray[np.bool_]:
    """Which ids pass the filters, in the order min-p, top-k, top-p; equal logits pass or are removed together."""
    mass = np.exp((logits - logits.max()) / row.temperature)
    mask = mass >= row.min_p
    above = np.array([np.sum(mask & (logits > x)) for x in logits])
    if row.top_k > 0:
        mask &= above < row.top_k
    if row.top_p < 1:
        better = np.array([mass[mask & (logits > x)].sum() for x in logits])
        mask &= better < row.top_p * mass[mask].sum()
    return mask


def coupled_sample(logits: Array, noise: Array, row: RowParameters) -> int:
    """The id that one row samples: the largest perturbed logit that passes the filters, the smallest id of equals."""
    if row.temperature == 0:
        return int(np.argmax(logits))
    return int(np.argmax(np.where(filter_mask(logits, row), logits / row.temperature + noise, -np.inf)))


def accept_drafts(drafts: list[int], sampled: list[int], limit: int) -> list[int]:
    """The ids that one sequence emits: the target's samples up to the first that differs from its draft."""
    count = 0
    while count < min(limit, len(drafts)) and drafts[count] == sampled[count]:
        count += 1
    return sampled[: count + 1]
