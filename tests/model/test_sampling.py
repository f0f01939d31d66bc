"""The sampler: known answers of the generator, filters, the distribution of samples, acceptance of drafts."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from model.filters import Filters
from model.ops import EAGER
from model.sampling import SamplingParams, accept, gumbel_noise, sample
from model.threefry import ROUNDS, threefry2x32
from nki_kernels.sampling import law

# source: kat_vectors of Random123 (D. E. Shaw Research)
KNOWN = [
    (13, (0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
    (13, (-1, -1), (-1, -1), (0xFD36D048, 0x2D17272C)),
    (13, (0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xBA3E4725, 0xF27D669E)),
    (20, (0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    (20, (-1, -1), (-1, -1), (0x1CB996FC, 0xBB002BE7)),
    (20, (0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


def _word(value: int) -> torch.Tensor:
    return torch.from_numpy(np.array([value & 0xFFFFFFFF], np.uint32).view(np.int32))


@pytest.mark.parametrize(("rounds", "key", "counter", "expected"), KNOWN, ids=str)
def test_known_answers(rounds: int, key: tuple, counter: tuple, expected: tuple) -> None:
    words = threefry2x32((_word(key[0]), _word(key[1])), (_word(counter[0]), _word(counter[1])), rounds)
    assert tuple(int(w) & 0xFFFFFFFF for w in words) == expected


def test_the_documented_known_answers() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/sampling.md").read_text(encoding="utf-8")
    for rounds, _, _, (first, second) in KNOWN:
        assert (f"`{first:08x} {second:08x}`" in page) == (rounds == ROUNDS)
    rows = re.findall(r"^\| `0x(\w{16})` \| (\d+) \| (\d+) \| `(\w{8})` \| ([\d.]+) \| (-?[\d.]+) \|$", page, re.M)
    assert len(rows) == 5
    for seed_hex, position, token, word, uniform, noise in rows:
        low, high = (_word(int(seed_hex, 16) >> shift) for shift in (0, 32))
        words = threefry2x32((low, high), (_word(int(token) >> 1), _word(int(position))))
        actual = int(words[int(token) & 1]) & 0xFFFFFFFF
        assert (f"{actual:08x}", ((actual >> 9) + 0.5) / 2**23) == (word, float(uniform))
        noise_1V = _noise(torch.cat((low, high))[None], torch.tensor([int(position)]), int(token) + 1)
        assert abs(float(noise_1V[0, -1]) - float(noise)) < 1e-4


def test_the_documented_first_samples() -> None:
    """At a very high temperature a prompt of L ids samples the argmax of the noise at L, L + 1, ..."""
    page = (Path(__file__).resolve().parents[2] / "docs/sampling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `0x([0-9a-f]{16})` \| (\d+) \| (\d+), (\d+), (\d+) \|$", page, re.M)
    assert len(rows) == 3
    for seed_hex, length, *ids in rows:
        words = int(seed_hex, 16) & 0xFFFFFFFF, int(seed_hex, 16) >> 32
        assert [law.gumbel_noise(words, int(length) + n, range(2048)).argmax() for n in range(3)] == [
            int(i) for i in ids
        ]


def _noise(seed_R2: torch.Tensor, positions_R: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return gumbel_noise(EAGER, seed_R2, positions_R, torch.arange(vocabulary, dtype=torch.int32))


def _params(rows: int, t: float = 1.0, k: float = 0, p: float = 1.0, m: float = 0.0) -> SamplingParams:
    seeds = torch.arange(rows, dtype=torch.int32)
    filters = Filters(torch.full((rows,), float(k)), torch.full((rows,), p), torch.full((rows,), m))
    return SamplingParams(torch.full((rows,), t), torch.stack((seeds, seeds * 0 + 7), 1), filters)


def _sampled(logits: torch.Tensor, params: SamplingParams, positions_R: torch.Tensor) -> torch.Tensor:
    return sample(EAGER, logits, params, _noise(params.seed_R2, positions_R, logits.shape[1]))


def law_of_filter(logits: np.ndarray, t: float, k: float, p: float, m: float) -> np.ndarray:
    """The distribution after min-p, top-k and top-p by their definitions, in fp64."""
    mass = np.exp((logits - logits.max()) / t)
    mask = mass >= m * mass.max()
    if k:
        mask &= np.array([(mask & (mass > x)).sum() < k for x in mass])
    if p < 1:
        total = mass[mask].sum()
        mask &= np.array([mass[mask & (mass > x)].sum() < p * total for x in mass])
    return np.where(mask, mass, 0) / mass[mask].sum()


def test_filters_equal_their_definition() -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        logits = np.round(rng.normal(0, 3, 37), 1 if seed % 2 else 6).astype(np.float32)
        k, p, m = rng.choice([0, 1, 3, 20]), rng.choice([1.0, 0.3, 0.8, 0.95]), rng.choice([0.0, 0.02, 0.3])
        shifted, ones = torch.from_numpy(logits - logits.max())[None], torch.ones(1)
        mask = _params(1, 1.0, k, p, m).filters.keep(EAGER, shifted, ones)[0].numpy()
        assert mask.tolist() == (law_of_filter(logits.astype(np.float64), 1.0, k, p, m) > 0).tolist(), (seed, k, p, m)


CASES = [(1.0, 0, 1.0, 0.0), (0.7, 3, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.2), (0.9, 4, 0.9, 0.05)]


def _samples(logits: np.ndarray, case: tuple, seeds: int, position: int = 5) -> np.ndarray:
    rows = torch.from_numpy(logits)[None].expand(seeds, -1)
    return _sampled(rows, _params(seeds, *case), torch.full((seeds,), position, dtype=torch.int32)).numpy()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_samples_follow_the_filtered_softmax(case: tuple) -> None:
    logits = np.array([1.5, 0.2, 1.4, -1.0, 0.7], np.float32)
    seeds = 200_000
    actual = np.bincount(_samples(logits, case, seeds), minlength=5) / seeds
    law = law_of_filter(logits.astype(np.float64), *case)
    # five standard deviations of a frequency over this many seeds
    assert np.abs(actual - law).max() < 5 * (0.25 / seeds) ** 0.5
    wrong = law_of_filter(logits.astype(np.float64), case[0] * 1.2, *case[1:])
    assert np.abs(actual - wrong).max() > 5 * (0.25 / seeds) ** 0.5


def test_positions_and_seeds_are_independent() -> None:
    logits, seeds = np.zeros(4, np.float32), 100_000
    here, there = (_samples(logits, CASES[0], seeds, position) for position in (5, 6))
    bound = 5 * (0.25 / seeds) ** 0.5

    def off(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.abs(np.histogram2d(a, b, bins=4)[0] / len(a) - 1 / 16).max())

    assert off(here, there) < bound
    assert off(here[1:], here[:-1]) < bound
    assert off(here, here) > bound, "a reused stream must be noticed"


def test_neighbours_change_no_row() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 50)
    filters = Filters(torch.tensor([0.0, 0.0, 5.0]), torch.tensor([1.0, 1.0, 0.5]), torch.zeros(3))
    seeds, positions = torch.arange(6, dtype=torch.int32).view(3, 2), torch.tensor([3, 4, 5], dtype=torch.int32)
    mixed = SamplingParams(torch.tensor([0.0, 1.0, 0.8]), seeds, filters)
    together = _sampled(logits, mixed, positions)
    for row in range(3):
        one = slice(row, row + 1)
        params = SamplingParams(mixed.temperature_R[one], seeds[one], Filters(*(t[one] for t in filters)))
        assert _sampled(logits[one], params, positions[one])[0] == together[row]
    assert together[0] == logits[0].argmax()


def test_ties_go_to_the_smallest_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert _sampled(logits, _params(1, 0.0), torch.zeros(1))[0] == 1


def test_noise_is_finite_and_gumbel() -> None:
    noise = _noise(torch.tensor([[1, 2]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 151_936)
    assert torch.isfinite(noise).all()
    assert abs(noise.mean() - 0.5772) < 0.02
    assert abs(noise.var() - np.pi**2 / 6) < 0.04


@pytest.mark.parametrize(
    ("drafts", "targets", "limit", "emitted"),
    [
        ([1, 2], [1, 2, 3], 2, [1, 2, 3]),
        ([1, 2], [1, 9, 3], 2, [1, 9, -1]),
        ([1, 2], [9, 2, 3], 2, [9, -1, -1]),
        ([1, 2], [1, 2, 3], 1, [1, 2, -1]),
        ([1, 2], [1, 2, 3], 0, [1, -1, -1]),
        ([], [4], 0, [4]),
    ],
    ids=str,
)
def test_acceptance(drafts: list, targets: list, limit: int, emitted: list) -> None:
    given = torch.tensor([drafts], dtype=torch.int32)
    samples = torch.tensor([targets], dtype=torch.int32)
    ids, count, last = accept(given, samples, torch.tensor([limit], dtype=torch.int32))
    assert ids[0].tolist() == emitted
    assert int(count) == sum(i >= 0 for i in emitted)
    assert int(last) == emitted[int(count) - 1]
