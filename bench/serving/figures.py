"""Percentiles with bootstrap intervals, for one prompt on one endpoint and for the ratio of two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.serving.load import BlockResult
from bench.serving.sample import Sample

Floats = NDArray[np.float64]
PERCENTILES = (50, 90, 99)
_RESAMPLES = 2000
_CURVE_POINTS = 41


@dataclass(frozen=True)
class Estimate:
    """A figure with the ends of its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    @property
    def as_list(self) -> list[float]:
        return [self.value, self.low, self.high]


def _resampled(found: Floats, percentile: float, seed: int) -> Floats:
    rng, size = np.random.default_rng(seed), len(found)
    # a few resamples at a time: thousands of requests must not take gigabytes
    at_once = max(1, min(_RESAMPLES, 1_000_000 // size))
    picks = (rng.integers(size, size=(at_once, size)) for _ in range(-(-_RESAMPLES // at_once)))
    return np.concatenate([np.atleast_1d(np.percentile(found[p], percentile, axis=1)) for p in picks])


def estimate(values: Sequence[float], percentile: float, seed: int = 0) -> Estimate:
    """A percentile of independent values (one per request) and its interval (percentile bootstrap)."""
    array = np.asarray(values, dtype=np.float64)
    low, high = np.percentile(_resampled(array, percentile, seed), (2.5, 97.5))
    return Estimate(float(np.percentile(array, percentile)), float(low), float(high))


def ratio(over: Sequence[float], under: Sequence[float], percentile: float = 50, seed: int = 0) -> Estimate:
    """The ratio of a percentile of two independent sets of requests, and its interval."""
    a, b = np.asarray(over, dtype=np.float64), np.asarray(under, dtype=np.float64)
    drawn = _resampled(a, percentile, seed) / _resampled(b, percentile, seed + 1)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return Estimate(float(np.percentile(a, percentile) / np.percentile(b, percentile)), float(low), float(high))


def values(samples: Iterable[Sample], figure: str) -> list[float]:
    """One figure of every request that has it; requests with errors have none."""
    found = (getattr(s, figure) for s in samples if not s.error)
    return [v for v in found if v is not None]


def summary_row(results: Sequence[BlockResult], acceptance: dict[str, Any] | None) -> dict[str, Any]:
    """The figures of one prompt on one endpoint, over all its blocks; seconds and tokens.

    Gaps are percentiles over all gaps of all requests: those of one answer hang together, so they get
    no interval. Throughput counts the tokens of complete answers over the time that the blocks took.
    """
    block, samples = results[0].block, [s for r in results for s in r.samples]
    good, seconds = [s for s in samples if not s.error], sum(r.seconds for r in results)
    row: dict[str, Any] = {
        "source": "wall",
        "variant": block.variant,
        "case": block.prompt.name,
        "tier": block.prompt.tier,
        "requests": len(samples),
        "errors": len(samples) - len(good),
        "seconds": seconds,
        "error_kinds": sorted({s.error for s in samples if s.error}),
        "output_tokens": sum(s.tokens or 0 for s in good),
        "input_tokens": sum(s.prompt_tokens or 0 for s in good),
        "tokens_per_second": sum(s.tokens or 0 for s in good) / seconds,
        "requests_per_second": len(good) / seconds,
        "events_with_text": sum(len(s.text_at) for s in good),
    }
    for figure in ("ttft_s", "itl_s", "e2e_s"):
        if found := values(good, figure):
            row[figure] = {f"p{p}": estimate(found, p).as_list for p in PERCENTILES}
            row[f"{figure}_curve"] = curve(found)
    if gaps := [g for s in good for g in s.gaps_s]:
        row["gap_s"] = {f"p{p}": float(np.percentile(gaps, p)) for p in PERCENTILES}
    if acceptance:
        row["acceptance"] = acceptance
    return row


def curve(found: Sequence[float]) -> list[float]:
    """The values at equally spaced shares from 0 to 1: the distribution, for a plot."""
    return [float(v) for v in np.percentile(found, np.linspace(0, 100, _CURVE_POINTS))]
