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
from model.ops import EAGER
from model.sampling import gumbel_noise as model_noise
from nki_kernels.sampling import law, threefry
from nki_kernels.sampling.gumbel_noise import gumbel_noise
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
    tiles = []
    for source, count in ((keys, 2), (first, width), (second, 1)):
        tiles.append(nl.ndarray((rows, count, 1), dtype=nl.uint32))
        nisa.dma_copy(dst=tiles[-1], src=source)
    both = threefry.threefry(tiles[1], tiles[2], threefry.schedule(tiles[0]))
    out = nl.ndarray((2, rows, width), dtype=nl.uint32, buffer=nl.shared_hbm)
    for i in range(2):
        nisa.dma_copy(dst=out[i], src=both[i])
    return out


def words(keys: Any, first: Any, second: Any) -> Any:
    return nkisim.simulate(words_kernel)(*(np.array(a, np.uint32) for a in (keys, first, second)))


def test_known_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, counters, expected = zip(*ANSWERS, strict=True)
    first, second = ([[counter[i]] for counter in counters] for i in range(2))
    assert [tuple(pair) for pair in words(keys, first, second)[:, :, 0].T] == list(expected)
    assert [law.threefry(*answer[:2]) for answer in ANSWERS] == list(expected)
    # negative control: a round less
    monkeypatch.setattr(threefry, "ROUNDS", 12)
    assert tuple(words([(0, 0)], [[0]], [[0]])[:, 0, 0]) != expected[0]


def test_words_are_exact() -> None:
    """Random keys and counters, and those whose halves carry in every sum."""
    rng = np.random.default_rng(3)
    edges = np.array([0, 1, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFF0000, ALL_ONES], np.uint32)
    keys = np.concatenate([rng.integers(0, 2**32, (90, 2), dtype=np.uint32), rng.choice(edges, (38, 2))])
    first = np.concatenate([rng.integers(0, 2**32, (128, 3), dtype=np.uint32), rng.choice(edges, (128, 4))], 1)
    second = rng.choice(edges, (128, 1))
    rows = [
        [law.threefry(tuple(map(int, k)), (int(c), int(s[0]))) for c in row]
        for k, row, s in zip(keys, first, second, strict=True)
    ]
    assert np.array_equal(words(keys, first, second), np.moveaxis(np.array(rows, np.uint32), 2, 0))


@pytest.mark.parametrize(("dims", "lnc"), WAYS, ids=str)
def test_noise(dims: Dims, lnc: int) -> None:
    """The model's noise up to the rounding of the logarithms, on one core and on two."""
    seeds, positions = generator_rows(dims.R)
    noise = gumbel_noise(seeds, positions, one(dims.start), dims.V, 0, lnc=lnc)
    ids = torch.arange(dims.start, dims.start + dims.V, dtype=torch.int32)
    expected = model_noise(EAGER, torch.from_numpy(seeds), torch.from_numpy(positions[:, 0]), ids).numpy()
    # log(-log u) near u = 1 / e is small against its terms: an ulp of 1 bounds it there
    assert (np.abs(noise - expected) <= ULPS * np.spacing(np.maximum(np.abs(expected), 1))).all()
    for row in range(0, dims.R, 40):
        part = law.gumbel_noise(key(seeds, row), int(positions[row, 0]), range(dims.start, dims.start + 6))
        assert np.abs(noise[row, :6] - part).max() <= ULPS * np.spacing(np.float32(16))


def test_bits_do_not_depend_on_the_launch() -> None:
    """A row's noise alone, with others, on a shard or on all ids, on one core or two; domains differ."""
    seeds, positions = generator_rows(9)
    whole = gumbel_noise(seeds, positions, one(0), 601, 0)
    assert np.array_equal(gumbel_noise(seeds, positions, one(0), 601, 0, lnc=2), whole)
    for start, columns in ((0, 300), (300, 301), (151, 77)):
        part = gumbel_noise(seeds[4:5].copy(), positions[4:5].copy(), one(start), columns, 0)
        assert np.array_equal(part, whole[4:5, start : start + columns])
    assert not (gumbel_noise(seeds, positions, one(0), 601, 1) == whole).any()
