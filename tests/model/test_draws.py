"""Compiled draws of both backings against the oracle: every filter and temperature that the API lets in."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from model.sampling import NO_ID
from tests.last_few import last_few
from tests.model.compiled_draws import Draws, drawing
from tests.model.sampler_oracle import Row, may_draw
from trnspec.engine.request import Params

pytestmark = [pytest.mark.released_code, pytest.mark.slow]
ROWS, V = 32, 206
TEMPERATURES = (0.0, 1e-300, 0.01, 0.05, 0.3, 0.7, 1.0, 1.7, 30.0, 1e4, 1e10, 1e30)
TOP_K = (0, 0, 1, 2, 17, V, (1 << 24) - 1)
TOP_P = (1.0, 1.0, 1 - 2.0**-24, 0.95, 0.5, 1e-3, 1e-6, 1e-38, 1e-45, 1e-300)
MIN_P = (0.0, 0.0, 1e-300, 1e-38, 0.05, 0.5, 0.99, 0.9999999, 1.0)
# name -> (numbers of a normal law -> logits)
LOGITS = {
    "normal": lambda x: 2 * x,
    "peaked": lambda x: 15 * x,
    "flat": lambda x: 1e-3 * x,
    "equal": lambda x: 0 * x + 3,
    "tied": lambda x: np.round(2 * x) / 2,
    "tied at the top": lambda x: np.minimum(x, 0.5) * 4,
    "far from 0": lambda x: x - 200,
    "half are -inf": lambda x: np.where(x > 0, 3 * x, -np.inf),
    "one is finite": lambda x: np.where(x == x.max(), x, -np.inf),
}


def random_rows(seed: int, filters: bool = True, masks: bool = True, vocabulary: int = V) -> list[Row]:
    """One row for each of ROWS, its numbers as `Params` and fp32 have them."""
    rng, rows = np.random.default_rng(seed), []
    names = list(LOGITS)
    for n in range(ROWS):
        logits = LOGITS[names[(seed * ROWS + n) % len(names)]](rng.standard_normal(vocabulary)).astype(np.float32)
        params = Params(
            float(rng.choice(TEMPERATURES)),
            int(rng.choice(TOP_K)) if filters else 0,
            float(rng.choice(TOP_P)) if filters else 1.0,
            float(rng.choice(MIN_P)) if filters else 0.0,
            int(rng.integers(1 << 63)),
        )
        params.check()
        allowed = None
        if masks and n % 3 == 0:
            # the best finite id stays in reach of some masks, and is forbidden by others
            allowed = rng.random(vocabulary) < rng.choice([0.02, 0.5, 0.98])
            allowed[rng.choice(np.flatnonzero(np.isfinite(logits)))] = True
        temperature, top_p, min_p = (
            float(np.float32(v)) for v in (params.draw_temperature, params.top_p, params.min_p)
        )
        position = int(rng.integers(1 << 24))
        rows.append(Row(logits, temperature, params.top_k, top_p, min_p, params.seed_words, position, allowed))
    return rows


@last_few
def draws(backing: str, filters: bool = True, masks: bool = True, tp: int = 1, vocabulary: int = V) -> Draws:
    return drawing(backing, ROWS, vocabulary, filters=filters, masks=masks, tp=tp)


# backing, filters, masks, ranks, ids; how many launches of ROWS rows
GRAPHS = {
    "reference": (("reference", True, False, 1, V), 24),
    "reference unfiltered": (("reference", False, False, 1, V), 8),
    "reference masked": (("reference", True, True, 1, V), 24),
    "reference of the demo's ids": (("reference", True, False, 1, 2048), 1),
    "nki": (("nki", True, False, 1, V), 5),
    "nki unfiltered": (("nki", False, False, 1, V), 3),
    "nki of two ranks masked": (("nki", True, True, 2, V), 5),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_compiled_draw_is_the_oracle_s(name: str) -> None:
    graph, launches = GRAPHS[name]
    backing, filters, masks, _, vocabulary = graph
    decided, rows = 0, 0
    for seed in range(launches):
        cases = random_rows(seed, filters, masks, vocabulary)
        for n, (row, drawn) in enumerate(zip(cases, draws(*graph)(cases), strict=True)):
            ids = may_draw(row, from_best=backing == "reference")
            assert drawn in np.flatnonzero(ids), (seed, n, _numbers_of(row))
            decided, rows = decided + (ids.sum() == 1), rows + 1
    # all ids of equal logits and of the noise alone are decided by the noise, which rounds little
    assert decided > 0.97 * rows, "an oracle that leaves much open proves little"


def _numbers_of(row: Row) -> dict[str, object]:
    return {f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name not in ("logits", "allowed")}


def _one_id(vocabulary: int) -> list[Row]:
    """Rows whose filters keep the best id alone, at every temperature."""
    rng, hot = np.random.default_rng(0), [t for t in TEMPERATURES if t >= 0.01]
    alone = [{"min_p": 1.0}, {"top_p": 1e-38}, {"top_p": float(np.float32(1e-45))}, {"top_k": 1}]
    rows = []
    for n in range(ROWS):
        logits = (rng.standard_normal(vocabulary) * rng.choice([0.5, 3, 20])).astype(np.float32)
        rows.append(Row(logits, float(np.float32(hot[n % len(hot)])), **alone[n // 3 % len(alone)]))  # type: ignore[arg-type]
    return rows


@pytest.mark.parametrize("name", ["reference", "reference of the demo's ids", "nki", "nki of two ranks masked"])
def test_a_filter_that_keeps_one_id_keeps_the_best(name: str) -> None:
    """As vLLM and transformers do: min-p 1, the smallest top-p and top-k 1, where masses cannot be told apart."""
    graph, _ = GRAPHS[name]
    rows = _one_id(graph[-1])
    drawn = draws(*graph)(rows)
    for n, row in enumerate(rows):
        if row.min_p < 1 or row.temperature < 1e4:
            assert drawn[n] == row.logits.argmax(), _numbers_of(row)


BROKEN = {
    "NaN": lambda x: np.where(np.arange(len(x)) == 77, np.nan, x),
    "the last is NaN": lambda x: np.where(np.arange(len(x)) == len(x) - 1, -np.nan, x),
    "+inf": lambda x: np.where(np.arange(len(x)) == 150, np.inf, x),
    "all -inf": lambda x: np.full_like(x, -np.inf),
    "all NaN": lambda x: np.full_like(x, np.nan),
}


@pytest.mark.parametrize(
    "name", ["reference", "reference masked", "reference unfiltered", "nki", "nki of two ranks masked"]
)
def test_a_row_without_a_draw_says_so_and_no_neighbour_notices(name: str) -> None:
    graph, _ = GRAPHS[name]
    rows = random_rows(1, *graph[1:3])
    broken = list(rows)
    # greedy, drawn and filtered rows
    for n, change in enumerate([*BROKEN.values()] * 4):
        logits = change(rows[3 * (n // 2) + n % 2].logits).astype(np.float32)
        broken[3 * (n // 2) + n % 2] = dataclasses.replace(rows[3 * (n // 2) + n % 2], logits=logits, allowed=None)
    before, after = draws(*graph)(rows), draws(*graph)(broken)
    for n in range(ROWS):
        assert after[n] == (before[n] if broken[n] is rows[n] else NO_ID), (n, _numbers_of(rows[n]))
    assert after.count(NO_ID) == 4 * len(BROKEN)


def test_a_mask_without_an_id_has_no_draw() -> None:
    for name in ("reference masked", "nki of two ranks masked"):
        rows = [dataclasses.replace(row, allowed=np.zeros(V, bool)) for row in random_rows(2)]
        assert set(draws(*GRAPHS[name][0])(rows)) == {NO_ID}


@pytest.mark.parametrize("backing", ["reference", "nki"])
def test_a_draft_s_draw_is_an_id(backing: str) -> None:
    """Its filters are guessed, so any finite id of a row may be drawn; without filters it is the target's."""
    guessed = drawing(backing, ROWS, V, rough=True)
    for seed in range(3):
        rows = random_rows(seed)
        plain = [dataclasses.replace(row, top_k=0, top_p=1.0, min_p=0.0) for row in rows]
        for row, drawn in zip(rows, guessed(rows), strict=True):
            assert np.isfinite(row.logits[drawn]), _numbers_of(row)
            assert row.allowed is None or row.allowed[drawn], _numbers_of(row)
        for row, drawn in zip(plain, guessed(plain), strict=True):
            assert may_draw(row, from_best=backing == "reference")[drawn], _numbers_of(row)
