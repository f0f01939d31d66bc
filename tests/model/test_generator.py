"""Statistical tests of the counter-based generator in the orders in which sampling reads it: id, position, seed.

Each statistic is a standard score, approximately normal for independent uniform words. Threefry with two rounds fails;
the documented 13 rounds must pass in each order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from model.threefry import ROUNDS, threefry2x32

COUNT = 1 << 20
Words = np.ndarray


def _words(order: str, rounds: int, key: int = 12345) -> Words:
    """COUNT words in the order of ids, of positions, or of seeds."""
    step = torch.arange(COUNT // 2, dtype=torch.int32)
    fixed = torch.full_like(step, 17)
    seed = torch.full_like(step, key)
    keys, counters = {
        "ids": ((seed, fixed), (step, fixed)),
        "positions": ((seed, fixed), (fixed, step)),
        "seeds": ((step, fixed), (fixed, seed)),
        "high seeds": ((fixed, step << 12), (fixed, seed)),
    }[order]
    return torch.stack(threefry2x32(keys, counters, rounds), 1).flatten().numpy().view(np.uint32)


def _chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float((((counts - expected) ** 2 / expected).sum() - (counts.size - 1)) / (2 * (counts.size - 1)) ** 0.5)


def every_bit_is_fair(words: Words) -> float:
    """The largest score of the 32 counts of ones."""
    ones = np.array([((words >> b) & 1).sum() for b in range(32)], np.int64)
    return float(np.abs((ones - words.size / 2) / (words.size / 4) ** 0.5).max())


def top_values_are_uniform(words: Words) -> float:
    """Chi-square of the top 12 bits, those that a uniform number begins with."""
    return _chi_square(np.bincount(words >> 20, minlength=4096))


def low_mantissa_is_uniform(words: Words) -> float:
    """Chi-square of the lowest 12 of the 23 bits used."""
    return _chi_square(np.bincount((words >> 9) & 0xFFF, minlength=4096))


def neighbours_are_independent(words: Words) -> float:
    """Chi-square of pairs of consecutive words, and of words two apart (the next counter)."""
    scores = []
    for lag in (1, 2):
        first, second = words[::4], words[lag::4]
        pairs = (first[: second.size] >> 26).astype(np.int64) * 64 + (second >> 26)
        scores.append(_chi_square(np.bincount(pairs, minlength=4096)))
    return max(scores, key=abs)


def serial_correlation(words: Words) -> float:
    """Correlation of consecutive uniform numbers, times the root of their count."""
    u = words.astype(np.float64) / 2**32
    return float(max((np.corrcoef(u[:-lag], u[lag:])[0, 1] * u.size**0.5 for lag in (1, 2, 3)), key=abs))


def runs(words: Words) -> float:
    """Wald and Wolfowitz's count of runs above and below the median value."""
    above = words >> 31
    changes = int((above[1:] != above[:-1]).sum())
    return (changes - (words.size - 1) / 2) / ((words.size - 1) / 4) ** 0.5


def birthday_spacings(words: Words) -> float:
    """Marsaglia's repeated spacings: 512 birthdays in 2^24 days have 2 on average, 500 times over."""
    days = np.sort((words[: 500 * 512] >> 8).astype(np.int64).reshape(500, 512), 1)
    spacings = np.sort(np.diff(days, axis=1), 1)
    repeated = int((np.diff(spacings, axis=1) == 0).sum())
    return (repeated - 1000) / 1000**0.5


BATTERY: list[Callable[[Words], float]] = [
    every_bit_is_fair,
    top_values_are_uniform,
    low_mantissa_is_uniform,
    neighbours_are_independent,
    serial_correlation,
    runs,
    birthday_spacings,
]
ORDERS = ["ids", "positions", "seeds", "high seeds"]


@pytest.mark.parametrize("order", ORDERS)
def test_the_generator_passes(order: str) -> None:
    words = _words(order, ROUNDS)
    scores = {test.__name__: test(words) for test in BATTERY}
    assert {name: s for name, s in scores.items() if abs(s) > 5} == {}


@pytest.mark.parametrize("order", ORDERS)
def test_two_rounds_fail(order: str) -> None:
    words = _words(order, 2)
    assert sum(abs(test(words)) > 8 for test in BATTERY) >= 3


@pytest.mark.parametrize("test", BATTERY, ids=lambda t: t.__name__)
def test_every_statistic_can_fail(test: Callable[[Words], float]) -> None:
    rising = (np.arange(COUNT, dtype=np.uint64) * 4099 % (1 << 31)).astype(np.uint32)
    assert abs(test(rising)) > 8


def test_streams_of_neighbouring_seeds_and_positions_do_not_correlate() -> None:
    base = _words("ids", ROUNDS).astype(np.float64)
    for key in (12344, 12346, 12345 ^ (1 << 30), 12345 ^ 1):
        other = _words("ids", ROUNDS, key).astype(np.float64)
        assert abs(np.corrcoef(base, other)[0, 1]) * COUNT**0.5 < 5
    assert np.corrcoef(base, base)[0, 1] * COUNT**0.5 > 5


def test_flipping_one_bit_of_key_or_counter_flips_half_of_the_output() -> None:
    rng = np.random.default_rng(0)
    given = [torch.from_numpy(rng.integers(-(2**31), 2**31, 4096).astype(np.int32)) for _ in range(4)]

    def share(rounds: int, word: int, bit: int) -> float:
        flipped = [*given]
        flipped[word] = given[word] ^ (torch.tensor(1 << bit).to(torch.int32) if bit < 31 else -(2**31))
        one, other = (threefry2x32((g[0], g[1]), (g[2], g[3]), rounds) for g in (given, flipped))
        bits = np.stack([(a ^ b).numpy().view(np.uint32) for a, b in zip(one, other, strict=True)])
        return float(np.unpackbits(bits.view(np.uint8)).mean())

    shares = [share(ROUNDS, word, bit) for word in range(4) for bit in range(32)]
    bound = 5 * (0.25 / (4096 * 64)) ** 0.5
    assert max(abs(s - 0.5) for s in shares) < bound
    assert abs(share(2, 2, 31) - 0.5) > bound
