"""The sample on a shard, the merge over shards, the acceptance: token for token the law's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from model import sampling as model_sampling
from model.ops import EAGER
from nki_kernels.sampling import law
from nki_kernels.sampling.accept_drafts import accept_drafts
from nki_kernels.sampling.coupled_sample import coupled_sample
from nki_kernels.sampling.gumbel_noise import gumbel_noise
from tests.nki_kernels.sampling.inputs import NO_FLOOR, WAYS, Dims, Inputs, draw, generator_rows, merged, one


def run(x: Inputs, **options: Any) -> tuple[Any, Any]:
    best: tuple[Any, Any] = coupled_sample(x.logits, x.noise, x.temperature, x.floor, x.start, **options)
    return best


@pytest.mark.parametrize(("dims", "lnc"), WAYS, ids=str)
def test_shard(dims: Dims, lnc: int) -> None:
    """The largest perturbed logit of each row, and its id."""
    x = draw(dims)
    values, ids = run(x, lnc=lnc)
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
        x.logits, x.temperature = np.round(x.logits / 3).astype(np.float32), np.zeros_like(x.temperature)
        x.floor[:] = NO_FLOOR
        assert np.array_equal(merged(*run(x, lnc=lnc)), x.logits.argmax(1) + 5)
    x = draw(Dims(128, 151936 // 32))
    x.logits[:], x.temperature[:], x.floor[:] = 1.5, 0, NO_FLOOR
    assert not merged(*run(x, lnc=lnc)).any()
    for place in (0, 332):
        x = draw(Dims(5, 333))
        x.logits[:, place] = 100
        assert np.array_equal(merged(*run(x)), np.full(5, place))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_floor_keeps_the_logit_that_equals_it(dtype: str) -> None:
    x = draw(Dims(6, 333, 5, dtype))
    x.floor = x.logits.astype(np.float32).max(1, keepdims=True)
    assert np.array_equal(merged(*run(x)), x.logits.argmax(1) + 5)


def test_greedy_rows_and_sampled_ones() -> None:
    """Temperature 0 ignores the noise; the same noise moves a sampled row. All are the law's."""
    x = draw(Dims(4, 1000))
    x.temperature[:, 0], x.floor[:] = [0, 1, 0, 1], NO_FLOOR
    ids = merged(*run(x))
    rows = [law.RowParameters(float(t)) for t in x.temperature[:, 0]]
    assert list(ids) == [law.coupled_sample(*row) for row in zip(x.logits, x.noise, rows, strict=True)]
    assert list((ids == x.logits.argmax(1))[[0, 2]]) == [True, True]
    assert not (ids == x.logits.argmax(1)).all()


def test_bits_do_not_depend_on_neighbours() -> None:
    x = draw(Dims(32, 501, 8))
    values, ids = run(x)
    for r in (0, 13, 31):
        alone = (a[r : r + 1].copy() for a in (x.logits, x.noise, x.temperature, x.floor))
        value, token = run(Inputs(*alone, x.start))
        assert (value[:, 0], token[:, 0]) == (values[:, r], ids[:, r])


@pytest.mark.parametrize("columns", [2373, *(pytest.param(n, marks=pytest.mark.slow) for n in (4748, 151936))])
def test_tokens_of_a_seed_are_the_model_s(columns: int) -> None:
    """Noise kernel, sample kernel and merge over shards of one vocabulary, against model/sampling.py."""
    vocabulary, rows = 151936, 6
    seeds, positions = generator_rows(rows, 5)
    logits = (4 * np.random.default_rng(8).standard_normal((rows, vocabulary))).astype(np.float32)
    temperature = np.array([[0.6], [1.0], [0.0], [1.4], [0.9], [2.0]], np.float32)
    starts = [0, 75967, vocabulary - columns] if columns < vocabulary else [0]

    def sampled(seeds: Any, start: int) -> Any:
        part = logits[:, start : start + columns].copy()
        noise = gumbel_noise(seeds, positions, one(start), columns, 0)
        return coupled_sample(part, noise, temperature, np.full((rows, 1), NO_FLOOR), one(start))

    values, ids = (np.concatenate(parts) for parts in zip(*(sampled(seeds, start) for start in starts), strict=True))
    seen = np.full_like(logits, -1e30)
    for start in starts:
        seen[:, start : start + columns] = logits[:, start : start + columns]
    parameters = model_sampling.SamplingParams(torch.from_numpy(temperature[:, 0]), torch.from_numpy(seeds), None)
    places, every_id = torch.from_numpy(positions[:, 0]), torch.arange(vocabulary, dtype=torch.int32)
    noise_RV = model_sampling.gumbel_noise(EAGER, parameters.seed_R2, places, every_id)
    drawn = model_sampling.sample(EAGER, torch.from_numpy(seen), parameters, noise_RV)
    assert np.array_equal(merged(values, ids), drawn.numpy())
    # negative control: other seeds
    others = np.stack([generator_rows(rows, 6)[0][:, 0], seeds[:, 1]], 1)
    assert not np.array_equal(sampled(others, starts[0])[1], ids[:1])


def _draws(shards: int, batch: int, rows: int) -> tuple[Any, ...]:
    """values, ids, the merged ids, drafts, positions, limits."""
    rng = np.random.default_rng(shards + batch)
    values = rng.integers(0, 4, (shards, batch, rows)).astype(np.float32)
    ids = (1000 * np.arange(shards)[:, None, None] + rng.integers(0, 1000, (shards, batch, rows))).astype(np.int32)
    best = merged(values, ids)
    drafts = np.where(rng.random((batch, rows - 1)) < 0.8, best[:, :-1], 5).astype(np.int32)
    positions = rng.integers(0, 2**20, (batch, 1)).astype(np.int32)
    return values, ids, best, drafts, positions, rng.integers(0, rows + 1, (batch, 1)).astype(np.int32)


@pytest.mark.parametrize(("shards", "batch", "rows"), [(3, 5, 7), (64, 4, 8), (1, 1, 2), (128, 32, 16), (5, 9, 1)])
def test_accept(shards: int, batch: int, rows: int) -> None:
    values, ids, best, drafts, positions, limits = _draws(shards, batch, rows)
    steps = (drafts, positions, limits) if rows > 1 else (None, positions, None)
    accepted, counts, following, reached = accept_drafts(values, ids, *steps)
    for b in range(batch):
        emitted = law.accept_drafts(list(drafts[b]), list(best[b]), int(limits[b, 0]))
        assert list(accepted[b]) == emitted + [-1] * (rows - len(emitted))
        assert (counts[b, 0], following[b, 0]) == (len(emitted), emitted[-1])
        assert reached[b, 0] == positions[b, 0] + len(emitted)
