"""The law of what the kernels emit, by exact enumeration over drafts, uniforms and noise.

Two ids, two drafts. Probabilities are fractions, so that grids of midpoints count them exactly: a uniform by the
grid itself, a draw of two ids by the logistic difference of its two Gumbel numbers. Every combination runs as one
sequence. With what the target adds after a step, each text of three tokens must have the target's own probability.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from nki_kernels.sampling.accept_drafts import accept_drafts
from nki_kernels.sampling.coupled_sample import coupled_sample
from tests.nki_kernels.sampling.inputs import NO_FLOOR, merged, one

K, TOKENS = 2, 3
# rounding of probabilities that come from fp32 logits
BOUND = 1e-5

Table = Callable[[tuple[int, ...]], Any]
# the probability of id 1 after each text, in twelfths for the target and the draft
TARGET = {(): 6, (0,): 4, (1,): 9, (0, 0): 3, (0, 1): 6, (1, 0): 8, (1, 1): 12}
DRAFT = {(): 4, (0,): 8, (1,): 9}


def target(text: tuple[int, ...]) -> Any:
    return np.array([12 - TARGET[text], TARGET[text]]) / 12


def draft(text: tuple[int, ...]) -> Any:
    return np.array([12 - DRAFT[text], DRAFT[text]]) / 12


def grid(count: int) -> Any:
    return (np.arange(count) + 0.5) / count


def race(u: float) -> Any:
    """Noise of two ids: id 1 wins with probability p exactly where u < p."""
    return np.array([0, np.log(1 / u - 1)], np.float32)


def law_of_texts(emitted: Iterator[tuple[float, list[int]]]) -> Any:
    """The probability of each text when the target goes on after a step, from (weight, emitted ids)."""
    texts = dict.fromkeys(itertools.product((0, 1), repeat=TOKENS), 0.0)
    for weight, ids in emitted:
        for text in texts:
            if list(text[: len(ids)]) == ids:
                rest = [target(text[:n])[text[n]] for n in range(len(ids), TOKENS)]
                texts[text] += weight * float(np.prod(rest))
    return np.array(list(texts.values()))


def exact_law() -> Any:
    return np.array(
        [np.prod([target(t[:n])[t[n]] for n in range(TOKENS)]) for t in itertools.product((0, 1), repeat=TOKENS)]
    )


def draws(tables: list[Any], noise: list[Any], temperatures: Any) -> Any:
    """The kernel's draws of rows of probabilities whose temperature acts on their logarithms."""
    logits = np.log(np.maximum(np.array(tables), 1e-30)).astype(np.float32)
    temperature = np.array(temperatures, np.float32)[:, None]
    # the law is of the tempered distribution: undo it in the logits, so that every row draws from its table
    logits = np.where(temperature > 0, logits * temperature, logits).astype(np.float32)
    floor = np.full((len(tables), 1), NO_FLOOR)
    ids = []
    for first in range(0, len(tables), 128):
        rows = slice(first, first + 128)
        operands = (logits[rows].copy(), np.array(noise[rows]), temperature[rows].copy(), floor[rows].copy())
        ids.append(merged(*coupled_sample(*operands, one(0))))
    return np.concatenate(ids)


def run_coupled(same_noise: bool) -> Iterator[tuple[float, list[int]]]:
    """Every triple of noise cells: drafts and target draw with it, or the drafts with its mirror."""
    cells = list(itertools.product(grid(12), repeat=TOKENS))
    temperatures = np.resize([0.5, 1.0, 2.0], len(cells))
    texts: list[tuple[int, ...]] = [()] * len(cells)
    for n in range(K):
        noise = [race(u[n] if same_noise else 1 - u[n]) for u in cells]
        drawn = draws([draft(t) for t in texts], noise, temperatures)
        texts = [(*t, int(d)) for t, d in zip(texts, drawn, strict=True)]
    rows = [draws([target(t[:n]) for t in texts], [race(u[n]) for u in cells], temperatures) for n in range(K + 1)]
    ids = np.stack(rows, 1).astype(np.int32)[None]
    for first in range(0, len(cells), 128):
        part = slice(first, first + 128)
        count = ids[0, part].shape[0]
        steps = np.array(texts[part], np.int32), np.zeros((count, 1), np.int32), np.full((count, 1), K, np.int32)
        accepted, counts, _, _ = accept_drafts(np.zeros((1, count, K + 1), np.float32), ids[:, part].copy(), *steps)
        for row, c in zip(accepted, counts[:, 0], strict=True):
            yield 1 / len(cells), list(map(int, row[:c]))


@pytest.mark.parametrize("same_noise", [True, False])
def test_coupled_sampling_emits_the_target_s_law(same_noise: bool) -> None:
    """Whatever the draft draws with; with the same noise more drafts are accepted."""
    emitted = list(run_coupled(same_noise))
    assert np.abs(law_of_texts(iter(emitted)) - exact_law()).max() < BOUND
    mean = sum(weight * len(ids) for weight, ids in emitted)
    assert (mean > 2.2) == same_noise


def test_emitting_the_draft_is_caught() -> None:
    """Negative control: drafts in place of the target's draws have another law."""
    wrong = ((w, [*ids[:-1], 1 - ids[-1]]) if len(ids) > 2 else (w, ids) for w, ids in run_coupled(True))
    assert np.abs(law_of_texts(wrong) - exact_law()).max() > 100 * BOUND
