"""Weights above thresholds: probabilities and counts of a shard, summed over cores and shards."""

from __future__ import annotations

import numpy as np
import pytest

from nki_kernels.limits import SUM_ROWS
from nki_kernels.sampling.weights_above import weights_above
from tests.nki_kernels.sampling.inputs import NO_FLOOR, SHAPES, Dims, draw


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("dims", [d for d in SHAPES if d.R <= SUM_ROWS and d.V < 10000], ids=str)
def test_law(dims: Dims, lnc: int) -> None:
    """Half of the rows count, half weigh by probability; the floor takes part."""
    x, rng = draw(dims), np.random.default_rng(1)
    numbers = x.logits.astype(np.float64)
    scale = np.where(np.arange(dims.R)[:, None] % 2, 0, 1 / 0.7).astype(np.float32)
    bias = (-numbers.max(1, keepdims=True) * scale).astype(np.float32)
    # thresholds among the logits, so that equality is met
    thresholds = rng.choice(x.logits.astype(np.float32).ravel(), (dims.R, 5)).astype(np.float32)
    sums = weights_above(x.logits, scale, bias, x.floor, thresholds, lnc=lnc).sum(0)
    weights = np.exp(numbers * scale + bias) * (x.logits.astype(np.float32) >= x.floor)
    expected = np.stack([(weights * (numbers > thresholds[:, j : j + 1])).sum(1) for j in range(5)])
    assert sums.shape == (5, dims.R)
    assert np.array_equal(sums[:, 1::2], expected[:, 1::2])
    assert np.abs(sums - expected).max() <= 1e-6 * np.maximum(expected.max(), 1)


def test_bits_do_not_depend_on_neighbours() -> None:
    """Each row's sums alone and beside 31 others."""
    x = draw(Dims(32, 4748))
    scale, bias = np.ones((32, 1), np.float32), np.full((32, 1), -9, np.float32)
    floor = np.full((32, 1), NO_FLOOR)
    thresholds = np.tile(np.linspace(-3, 3, 7, dtype=np.float32), (32, 1))
    whole = weights_above(x.logits, scale, bias, floor, thresholds)
    for r in range(0, 32, 5):
        alone = weights_above(x.logits[r : r + 1].copy(), scale[:1], bias[:1], floor[:1], thresholds[:1])
        assert np.array_equal(alone[0, :, 0], whole[0, :, r])
