"""The generator on the simulated engines: known answers, exact words, the noise that they give."""

from __future__ import annotations

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
import torch

import nkisim
from model.sampling import gumbel_of
from nki_kernels.sampling import law, threefry
from nki_kernels.sampling.gumbel_noise import gumbel_noise
from nkisim.pytest_plugin import KernelRuns
from tests.nki_kernels.sampling.inputs import WAYS, Dims, generator_rows, key, one

ALL_ONES = 0xFFFFFFFF
# Random123's known answers for 13 rounds, also in docs/sampling.md
ANSWERS = [
    ((0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
    ((ALL_ONES, ALL_ONES), (ALL_ONES, ALL_ONES), (0xFD36D048, 0x2D17272C)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xBA3E4725, 0xF27D669E)),
]
# ulps of fp32 by which two roundings of log(-log u) may differ
ULPS = 4


@nki.jit
def words_kernel(keys, first, second):  # type: ignore[no-untyped-def]
    """Both words of counters (first (P, W), second (P, 1)) under keys (P, 2)."""
    rows, width = first.shape
    key_tile = nl.ndarray((rows, 2, 1), dtype=nl.uint32)
    counter = nl.ndarray((rows, width, 1), dtype=nl.uint32)
    other = nl.ndarray((rows, 1, 1), dtype=nl.uint32)
    for tile, source in ((key_tile, keys), (counter, first), (other, second)):
        nisa.dma_copy(dst=tile, src=source)
    both = threefry.threefry(counter, other, threefry.schedule(key_tile))
    out = nl.ndarray((2, rows, width), dtype=nl.uint32, buffer=nl.shared_hbm)
    for i in range(2):
        nisa.dma_copy(dst=out[i], src=both[i])
    return out


def words(keys: Any, first: Any, second: Any) -> Any:
    return nkisim.simulate(words_kernel)(*(np.array(a, np.uint32) for a in (keys, first, second)))


@pytest.mark.parametrize(("secret", "counter", "expected"), ANSWERS)
def test_known_answers(secret: tuple[int, int], counter: tuple[int, int], expected: tuple[int, int]) -> None:
    drawn_words = words([secret], [[counter[0]]], [[counter[1]]])
    assert tuple(drawn_words[:, 0, 0]) == expected == law.threefry(secret, counter)


def exact_words(keys: Any, first: Any, second: Any) -> Any:
    """The law, one counter after the other."""
    rows = [
        [law.threefry(tuple(map(int, k)), (int(c), int(s[0]))) for c in row]
        for k, row, s in zip(keys, first, second, strict=True)
    ]
    return np.moveaxis(np.array(rows, np.uint32), 2, 0)


def test_words_are_exact(nki_kernel: KernelRuns) -> None:
    """Random keys and counters, and those whose halves carry in every sum."""
    rng = np.random.default_rng(3)
    edges = np.array([0, 1, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFF0000, ALL_ONES], np.uint32)
    keys = np.concatenate([rng.integers(0, 2**32, (90, 2), dtype=np.uint32), rng.choice(edges, (38, 2))])
    first = np.concatenate([rng.integers(0, 2**32, (128, 3), dtype=np.uint32), rng.choice(edges, (128, 4))], 1)
    second = rng.choice(edges, (128, 1))
    nki_kernel.check(words_kernel, exact_words, [keys, first, second], hostile=())


def test_a_round_less_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threefry, "ROUNDS", 12)
    assert tuple(words([(0, 0)], [[0]], [[0]])[:, 0, 0]) != ANSWERS[0][2]


@pytest.mark.parametrize(("dims", "lnc"), WAYS, ids=str)
def test_noise(dims: Dims, lnc: int) -> None:
    """The model's noise up to the rounding of the logarithms, on one core and on two."""
    seeds, positions = generator_rows(dims.R)
    noise = gumbel_noise(seeds, positions, one(dims.start), dims.V, 0, lnc=lnc)
    ids = torch.arange(dims.start, dims.start + dims.V, dtype=torch.int32)
    expected = gumbel_of(torch.from_numpy(seeds), torch.from_numpy(positions[:, 0]), ids).numpy()
    # log(-log u) near u = 1 / e is small against its terms: an ulp of 1 bounds it there
    bound = ULPS * np.spacing(np.maximum(np.abs(expected), 1))
    assert (np.abs(noise - expected) <= bound).all()


def test_noise_is_the_law_s() -> None:
    seeds, positions = generator_rows(4)
    noise = gumbel_noise(seeds, positions, one(1001), 6, 0)
    for r in range(4):
        expected = law.gumbel_noise(key(seeds, r), int(positions[r, 0]), range(1001, 1007))
        assert np.abs(noise[r] - expected).max() <= ULPS * np.spacing(np.float32(16))


def test_bits_do_not_depend_on_the_launch() -> None:
    """A row's noise alone, beside others, on a shard or on all ids, on one core or two."""
    seeds, positions = generator_rows(9)
    whole = gumbel_noise(seeds, positions, one(0), 601, 0)
    assert np.array_equal(gumbel_noise(seeds, positions, one(0), 601, 0, lnc=2), whole)
    for start, columns in ((0, 300), (300, 301), (151, 77)):
        part = gumbel_noise(seeds[4:5].copy(), positions[4:5].copy(), one(start), columns, 0)
        assert np.array_equal(part, whole[4:5, start : start + columns])


def test_domains_differ() -> None:
    seeds, positions = generator_rows(3)
    noise, other = (gumbel_noise(seeds, positions, one(0), 50, d) for d in (0, 1))
    assert not (noise == other).any()
