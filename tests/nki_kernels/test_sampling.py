"""The sampling kernels against their laws and the model; the bits of a row.

The noise is compared with the model's generator, which has known answers in tests/model/test_sampling.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from model.ops import EAGER
from model.sampling import gumbel_noise as model_noise
from nki_kernels.limits import SUM_ROWS
from nki_kernels.sampling import law
from nki_kernels.sampling.accept_drafts import accept_drafts
from nki_kernels.sampling.coupled_sample import coupled_sample
from nki_kernels.sampling.gumbel_noise import gumbel_noise
from nki_kernels.sampling.weights_above import weights_above
from tests.nki_kernels.attention.inputs import DTYPES

NO_FLOOR = np.float32(-3.4028235e38)
# ulps of fp32 by which two roundings of log(-log u) may differ
ULPS = 4


class Dims(NamedTuple):
    """R rows of a shard of V ids from `start` on."""

    R: int
    V: int
    start: int = 0
    dtype: str = "fp32"


# odd shards at odd places, one row, all partitions; then a shard, the full vocabulary, another shard
SHAPES = [
    Dims(5, 333, 7), Dims(3, 4747, 9495, "bf16"), Dims(1, 9, 1), Dims(128, 61, 151875, "bf16"), Dims(32, 4748, 14244),
    Dims(4, 151936), Dims(7, 37984, 37984, "bf16"),
]  # fmt: skip
# long shards and the other number of cores are slow
WAYS = [
    *((dims, 1 + n % 2) for n, dims in enumerate(SHAPES[:5])),
    *(pytest.param(dims, 2 - n % 2, marks=pytest.mark.slow) for n, dims in enumerate(SHAPES)),
    *(pytest.param(dims, 1 + n % 2, marks=pytest.mark.slow) for n, dims in enumerate(SHAPES[5:])),
]


class Inputs(NamedTuple):
    """The operands of coupled_sample."""

    logits: Any
    noise: Any
    temperature: Any
    floor: Any
    start: Any


def draw(dims: Dims, seed: int = 0, spread: float = 3.0) -> Inputs:
    """Normal logits, Gumbel noise; a third of the rows greedy, half of the others with a floor."""
    rng = np.random.default_rng(seed)
    logits = (spread * rng.standard_normal((dims.R, dims.V))).astype(DTYPES[dims.dtype])
    noise = rng.gumbel(size=(dims.R, dims.V)).astype(np.float32)
    temperature = rng.choice([0.0, 0.7, 1.3], (dims.R, 1)).astype(np.float32)
    best = logits.astype(np.float32).max(1, keepdims=True)
    floor = np.where(rng.random((dims.R, 1)) < 0.5, NO_FLOOR, best - 2).astype(np.float32)
    return Inputs(logits, noise, temperature, floor, one(dims.start))


def one(number: int) -> Any:
    """A (1, 1) int32 operand."""
    return np.array([[number]], np.int32)


def generator_rows(rows: int, seed: int = 0) -> tuple[Any, Any]:
    """Seeds (R, 2) and positions (R, 1), the extreme values included."""
    rng = np.random.default_rng(seed)
    seeds = rng.integers(-(2**31), 2**31, (rows, 2)).astype(np.int32)
    positions = rng.integers(0, 2**24, (rows, 1)).astype(np.int32)
    seeds[0], positions[0] = 0, 0
    seeds[-1], positions[-1] = -1, 2**24 - 1
    return seeds, positions


def merged(values: Any, ids: Any) -> Any:
    """The smallest id of the largest value over the first axis."""
    return np.where(values == values.max(0), ids, np.iinfo(np.int32).max).min(0)


@pytest.mark.parametrize(("dims", "lnc"), WAYS, ids=str)
def test_noise(dims: Dims, lnc: int) -> None:
    """The model's noise up to the rounding of the logarithms."""
    seeds, positions = generator_rows(dims.R)
    noise = gumbel_noise(seeds, positions, one(dims.start), dims.V, 0, lnc=lnc)
    ids = torch.arange(dims.start, dims.start + dims.V, dtype=torch.int32)
    expected = model_noise(EAGER, torch.from_numpy(seeds), torch.from_numpy(positions[:, 0]), ids).numpy()
    # log(-log u) near u = 1 / e is much smaller than its terms: an ulp of 1 bounds the error there
    assert (np.abs(noise - expected) <= ULPS * np.spacing(np.maximum(np.abs(expected), 1))).all()
    for row in range(0, dims.R, 40):
        secret = tuple(map(int, seeds[row].view(np.uint32)))
        part = law.gumbel_noise(secret, int(positions[row, 0]), range(dims.start, dims.start + 6))
        assert np.abs(noise[row, :6] - part).max() <= ULPS * np.spacing(np.float32(16))


def test_bits_of_noise_do_not_depend_on_the_launch() -> None:
    """A row's noise by itself, with others, on a shard or on all ids, on one core or two; domains differ."""
    seeds, positions = generator_rows(9)
    full = gumbel_noise(seeds, positions, one(0), 601, 0)
    assert np.array_equal(gumbel_noise(seeds, positions, one(0), 601, 0, lnc=2), full)
    for start, columns in ((0, 300), (300, 301), (151, 77)):
        part = gumbel_noise(seeds[4:5].copy(), positions[4:5].copy(), one(start), columns, 0)
        assert np.array_equal(part, full[4:5, start : start + columns])
    assert not (gumbel_noise(seeds, positions, one(0), 601, 1) == full).any()


@pytest.mark.parametrize(("dims", "lnc"), WAYS, ids=str)
def test_sample(dims: Dims, lnc: int) -> None:
    """The largest perturbed logit of each row, and its id."""
    x = draw(dims)
    values, ids = coupled_sample(*x, lnc=lnc)
    logits, hot = x.logits.astype(np.float64), x.temperature > 0
    scores = np.where(hot, logits / np.where(hot, x.temperature, 1) + x.noise, logits)
    scores[x.logits.astype(np.float32) < x.floor] = -np.inf
    assert np.array_equal(merged(values, ids), scores.argmax(1) + x.start.item())
    best = scores.max(1)
    assert np.abs(values.max(0) - best).max() <= 4 * np.spacing(np.float32(np.abs(best).max()))


@pytest.mark.parametrize("lnc", [1, 2])
def test_ties_go_to_the_smallest_id(lnc: int) -> None:
    """Logits of few values: ties within a part, over parts, over chunks and over cores; the first and the last id."""
    for columns in (40, 333, 4100):
        x = draw(Dims(6, columns, 5))
        x.logits[:], x.temperature[:], x.floor[:] = np.round(x.logits / 3), 0, NO_FLOOR
        assert np.array_equal(merged(*coupled_sample(*x, lnc=lnc)), x.logits.argmax(1) + 5)
    x = draw(Dims(128, 151936 // 32))
    x.logits[:], x.temperature[:], x.floor[:] = 1.5, 0, NO_FLOOR
    assert not merged(*coupled_sample(*x, lnc=lnc)).any()
    for place in (0, 332):
        x = draw(Dims(5, 333))
        x.logits[:, place] = 100
        assert np.array_equal(merged(*coupled_sample(*x)), np.full(5, place))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_floor_does_not_remove_an_equal_logit(dtype: str) -> None:
    x = draw(Dims(6, 333, 5, dtype))
    x.floor[:] = x.logits.astype(np.float32).max(1, keepdims=True)
    assert np.array_equal(merged(*coupled_sample(*x)), x.logits.argmax(1) + 5)


def test_bits_of_a_row_do_not_depend_on_others() -> None:
    """Its sample, and its sums above thresholds, by itself and with 31 other rows."""
    x, column = draw(Dims(32, 4748, 8)), np.ones((32, 1), np.float32)
    thresholds = np.tile(np.linspace(-3, 3, 7, dtype=np.float32), (32, 1))
    sums = x.logits, column, -9 * column, x.floor, thresholds
    best, above = coupled_sample(*x), weights_above(*sums)
    for r in range(0, 32, 5):
        values, ids = coupled_sample(*(a[r : r + 1].copy() for a in x[:4]), x.start)
        assert (values[:, 0], ids[:, 0]) == (best[0][:, r], best[1][:, r])
        assert np.array_equal(weights_above(*(a[r : r + 1].copy() for a in sums))[0, :, 0], above[0, :, r])


@pytest.mark.parametrize(("shards", "batch", "rows"), [(3, 5, 7), (64, 4, 8), (1, 1, 2), (128, 32, 16), (5, 9, 1)])
def test_accept(shards: int, batch: int, rows: int) -> None:
    rng = np.random.default_rng(shards + batch)
    values = rng.integers(0, 4, (shards, batch, rows)).astype(np.float32)
    ids = (1000 * np.arange(shards)[:, None, None] + rng.integers(0, 1000, (shards, batch, rows))).astype(np.int32)
    best = merged(values, ids)
    drafts = np.where(rng.random((batch, rows - 1)) < 0.8, best[:, :-1], 5).astype(np.int32)
    positions, limits = (rng.integers(0, high, (batch, 1)).astype(np.int32) for high in (2**20, rows + 1))
    steps = (drafts, positions, limits) if rows > 1 else (None, positions, None)
    accepted, counts, next_ids, next_positions = accept_drafts(values, ids, *steps)
    for b in range(batch):
        emitted = law.accept_drafts(list(drafts[b]), list(best[b]), int(limits[b, 0]))
        assert list(accepted[b]) == emitted + [-1] * (rows - len(emitted))
        assert (counts[b, 0], next_ids[b, 0]) == (len(emitted), emitted[-1])
        assert next_positions[b, 0] == positions[b, 0] + len(emitted)


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("dims", [d for d in SHAPES if d.R <= SUM_ROWS and d.V < 10000], ids=str)
def test_weights_above(dims: Dims, lnc: int) -> None:
    """Half of the rows count, half sum probabilities; logits below the floor are not counted."""
    x, rng = draw(dims), np.random.default_rng(1)
    numbers = x.logits.astype(np.float64)
    scale = np.where(np.arange(dims.R)[:, None] % 2, 0, 1 / 0.7).astype(np.float32)
    bias = (-numbers.max(1, keepdims=True) * scale).astype(np.float32)
    # thresholds are logits, which tests equality
    thresholds = rng.choice(x.logits.astype(np.float32).ravel(), (dims.R, 5)).astype(np.float32)
    sums = weights_above(x.logits, scale, bias, x.floor, thresholds, lnc=lnc).sum(0)
    weights = np.exp(numbers * scale + bias) * (x.logits.astype(np.float32) >= x.floor)
    expected = np.stack([(weights * (numbers > thresholds[:, j : j + 1])).sum(1) for j in range(5)])
    assert sums.shape == (5, dims.R)
    assert np.array_equal(sums[:, 1::2], expected[:, 1::2])
    assert np.abs(sums - expected).max() <= 1e-6 * np.maximum(expected.max(), 1)
