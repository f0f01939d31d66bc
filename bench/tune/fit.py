"""One acceptance rate and one cost ratio fitted to a published series, and how far each point is off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.tune.acceptance import tokens

_POINTS, _ROUNDS = 40, 4


@dataclass(frozen=True)
class Fit:
    """tokens = (1 - a^(k+1)) / (1 - a) and speed-up = tokens / (1 + k c), with their relative errors per k."""

    rate: float
    cost_ratio: float
    lengths: tuple[float, ...]
    speedups: tuple[float, ...]
    length_errors: tuple[float, ...]
    speedup_errors: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The largest relative error of any point."""
        return max(map(abs, (*self.length_errors, *self.speedup_errors)))


def evaluate(rate: float, cost_ratio: float, lengths: Sequence[float], speedups: Sequence[float]) -> Fit:
    """The model with given parameters beside a series for k = 1, 2, ..."""
    made = tuple(tokens(rate, k) for k in range(1, len(lengths) + 1))
    ups = tuple(made[k - 1] / (1 + k * cost_ratio) for k in range(1, len(speedups) + 1))
    return Fit(rate, cost_ratio, made, ups, _errors(made, lengths), _errors(ups, speedups))


def fit(lengths: Sequence[float], speedups: Sequence[float]) -> Fit:
    """The rate and the ratio with the smallest worst error over both series, by a grid that narrows."""
    best = evaluate(0.5, 0.5, lengths, speedups)
    width = 0.5
    for _ in range(_ROUNDS):
        offsets = [width * (2 * i / _POINTS - 1) for i in range(_POINTS + 1)]
        grid = [
            (best.rate + a, best.cost_ratio + c)
            for a in offsets
            for c in offsets
            if 0 < best.rate + a < 1 and best.cost_ratio + c >= 0
        ]
        best = min((evaluate(*point, lengths, speedups) for point in grid), key=lambda f: f.worst)
        # two steps of the old grid, so that the optimum cannot lie outside
        width *= 4 / _POINTS
    return best


def _errors(made: Sequence[float], published: Sequence[float]) -> tuple[float, ...]:
    return tuple(m / p - 1 for m, p in zip(made, published, strict=True))
