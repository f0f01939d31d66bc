"""The sampler in numpy fp64: the ids that a row may sample, given how fp32 rounds.

The law is docs/sampling.md's. Every number of a graph is within a derived error of the law's; where that leaves a
filter's border or two scores undecided, several ids are possible. An id that the law removes by more is not among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nki_kernels.sampling import law

Array = NDArray[np.float64]
# half a unit in the last place of fp32, relative
U = 2.0**-24
# a weight below it may be 0 in fp32
_SMALLEST = 2.0**-126
# roundings of one exponential or logarithm, in units of U
_OF_FUNCTION = 16


@dataclass(frozen=True)
class Row:
    """One row; `temperature`, `top_p` and `min_p` are rounded to fp32, as a graph gets them."""

    logits: NDArray[np.float32]
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: tuple[int, int] = (0, 0)
    position: int = 0
    allowed: NDArray[np.bool_] | None = None


def noise(row: Row) -> Array:
    """The Gumbel noise of every id, from the kernels' law."""
    ids = np.arange(len(row.logits), dtype=np.uint64)
    words = law.threefry(row.seed, (ids >> np.uint64(1), row.position))  # type: ignore[arg-type]
    word = np.where(ids & np.uint64(1), words[1], words[0])
    uniform = ((word >> np.uint64(9)).astype(np.float64) + 0.5) / 2**23
    return -np.log(-np.log(uniform))


def may_sample(row: Row, from_best: bool) -> NDArray[np.bool_]:
    """(V,) the ids that a graph may sample; none where the law has no sample.

    `from_best` says that it divides the distance from the best logit by T, as the reference does; a kernel divides the
    logit itself, whose rounding is larger.
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
    sure, maybe = _kept(row, below, error)
    gumbel = noise(row)
    score = gumbel - below / row.temperature
    error = error + U * _OF_FUNCTION * np.abs(gumbel)
    ids[:] = maybe & (score + error >= (score - error)[sure].max())
    return ids


def _kept(row: Row, below: Array, error: Array) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """The ids that min-p, top-k and top-p keep whatever the rounding, and those that they may keep."""
    mass = np.exp(-below / row.temperature)
    most = np.where(mass > 0, mass * np.exp(error) + _SMALLEST, 0)
    least = np.maximum(mass * np.exp(-error) - _SMALLEST, 0)
    best, finite = below == 0, np.isfinite(below)
    sure, maybe = best | (finite & (least >= row.min_p)), best | (finite & (most >= row.min_p))
    with np.errstate(invalid="ignore"):
        above = below[None] < below[:, None]
        surely_above = below[None] < below[:, None] * (1 - 2 * U)
    if row.top_k:
        # both counts are of the same ids before
        kept = (above & maybe).sum(1) < row.top_k, (surely_above & sure).sum(1) < row.top_k
        sure, maybe = sure & kept[0], maybe & kept[1]
    if row.top_p < 1:
        adding = len(below) * U
        bound = [row.top_p * m for m in (least[sure].sum() * (1 - adding), most[maybe].sum() * (1 + adding))]
        better = (above * (most * maybe)).sum(1) * (1 + adding), (surely_above * (least * sure)).sum(1) * (1 - adding)
        sure, maybe = sure & (better[0] < bound[0] * (1 - 2 * U)), maybe & (better[1] < bound[1] * (1 + 2 * U))
    return sure | best, maybe | best
