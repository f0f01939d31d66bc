"""The sampler of docs/sampling.md in NumPy fp64: the ids that a row may sample, given the rounding errors of fp32.

Each value of a graph is within a derived error bound of the fp64 value. If a filter's cutoff or two scores are closer
than the bound, several ids are possible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nki_kernels.sampling import law

Array = NDArray[np.float64]
# unit roundoff of fp32
U = 2.0**-24
# smaller weights may be 0 in fp32
_SMALLEST = 2.0**-126
# error of an exponential or a logarithm, in units of U
_OF_FUNCTION = 16


@dataclass(frozen=True)
class Row:
    """One row; `temperature`, `top_p` and `min_p` are rounded to fp32, as in a graph's inputs."""

    logits: NDArray[np.float32]
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: tuple[int, int] = (0, 0)
    position: int = 0
    allowed: NDArray[np.bool_] | None = None


def noise(row: Row) -> Array:
    """The Gumbel noise of all ids, from the kernels' NumPy reference."""
    ids = np.arange(len(row.logits), dtype=np.uint64)
    words = law.threefry(row.seed, (ids >> np.uint64(1), row.position))  # type: ignore[arg-type]
    word = np.where(ids & np.uint64(1), words[1], words[0])
    uniform = ((word >> np.uint64(9)).astype(np.float64) + 0.5) / 2**23
    return -np.log(-np.log(uniform))


def may_sample(row: Row, from_best: bool) -> NDArray[np.bool_]:
    """(V,) mask of the ids that a graph may sample; empty if the row's largest logit is not finite.

    `from_best`: the graph divides the distance to the best logit by T (torch). The kernels divide the logit, with a
    larger rounding error.
    """
    x = row.logits.astype(np.float64)
    if row.allowed is not None:
        x = np.where(row.allowed, x, -np.inf)
    ids = np.zeros(len(x), bool)
    if not np.isfinite(x.max()):
        return ids
    if row.temperature == 0:
        ids[x.argmax()] = True
        return ids
    below = x.max() - x
    size = below if from_best else np.abs(np.where(np.isfinite(x), x, 0)) + abs(x.max())
    error = U * (4 * np.where(np.isfinite(below), size, 0) / row.temperature + _OF_FUNCTION)
    sure, maybe = _filtered(row, below, error)
    gumbel = noise(row)
    score = gumbel - below / row.temperature
    error = error + U * _OF_FUNCTION * np.abs(gumbel)
    ids[:] = maybe & (score + error >= (score - error)[sure].max())
    return ids


def _filtered(row: Row, below: Array, error: Array) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Masks of the ids that pass min-p, top-k and top-p with any rounding errors, and with some."""
    mass = np.exp(-below / row.temperature)
    high = np.where(mass > 0, mass * np.exp(error) + _SMALLEST, 0)
    low = np.maximum(mass * np.exp(-error) - _SMALLEST, 0)
    best, finite = below == 0, np.isfinite(below)
    sure, maybe = best | (finite & (low >= row.min_p)), best | (finite & (high >= row.min_p))
    with np.errstate(invalid="ignore"):
        above = below[None] < below[:, None]
        surely_above = below[None] < below[:, None] * (1 - 2 * U)
    if row.top_k:
        passed = (above & maybe).sum(1) < row.top_k, (surely_above & sure).sum(1) < row.top_k
        sure, maybe = sure & passed[0], maybe & passed[1]
    if row.top_p < 1:
        adding = len(below) * U
        bound = [row.top_p * m for m in (low[sure].sum() * (1 - adding), high[maybe].sum() * (1 + adding))]
        better = (above * (high * maybe)).sum(1) * (1 + adding), (surely_above * (low * sure)).sum(1) * (1 - adding)
        sure, maybe = sure & (better[0] < bound[0] * (1 - 2 * U)), maybe & (better[1] < bound[1] * (1 + 2 * U))
    return sure | best, maybe | best
