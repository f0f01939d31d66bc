"""Samples of both backends against the fp64 oracle, over the range of filters and temperatures that the API accepts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from model.approx_filters import approximate
from model.filters import Filters
from model.nki import simulated
from model.nki.context import make_context
from model.parallel import VocabShard
from model.sampling import NO_ID, SamplingParams
from tests.model.ranks import RankOps, on_ranks
from tests.model.sampler_oracle import Row, may_sample
from trnspec.engine.request import Params

ROWS, V = 32, 206
TEMPERATURES = (0.0, 1e-300, 0.01, 0.05, 0.3, 0.7, 1.0, 1.7, 30.0, 1e4, 1e10, 1e30)
TOP_K = (0, 0, 1, 2, 17, V, (1 << 24) - 1)
TOP_P = (1.0, 1.0, 1 - 2.0**-24, 0.95, 0.5, 1e-3, 1e-6, 1e-38, 1e-45, 1e-300)
MIN_P = (0.0, 0.0, 1e-300, 1e-38, 0.05, 0.5, 0.99, 0.9999999, 1.0)
# name -> (standard normal numbers -> logits)
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
    """ROWS random rows; parameters are rounded as by `Params` and to fp32."""
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
            allowed = rng.random(vocabulary) < rng.choice([0.02, 0.5, 0.98])
            allowed[rng.choice(np.flatnonzero(np.isfinite(logits)))] = True
        temperature, top_p, min_p = (
            float(np.float32(v)) for v in (params.sampling_temperature, params.top_p, params.min_p)
        )
        position = int(rng.integers(1 << 24))
        rows.append(Row(logits, temperature, params.top_k, top_p, min_p, params.seed_words, position, allowed))
    return rows


def sampled(
    cases: Sequence[Row], backend: str, filters: bool = True, ranks: int = 1, approx: bool = False
) -> list[int]:
    """The sampled ids, equal on all ranks; with `approx` sampled as drafts."""
    temperature_R, *of_filters = (
        torch.tensor(column, dtype=torch.float32) for column in zip(*map(_numbers, cases), strict=True)
    )
    seeds_R2 = torch.from_numpy(np.array([row.seed for row in cases], np.uint32).view(np.int32))
    params = SamplingParams(temperature_R, seeds_R2, Filters(*of_filters) if filters else None)
    positions_R = torch.tensor([row.position for row in cases], dtype=torch.int32)
    allowed_RV = np.stack([np.ones(len(row.logits), bool) if row.allowed is None else row.allowed for row in cases])
    logits_RV = torch.from_numpy(np.where(allowed_RV, np.stack([row.logits for row in cases]), -np.inf))

    def of_rank(ops: RankOps) -> list[int]:
        ctx, shard_RV = make_context(backend, ranks, ops, simulated.serve), logits_RV.chunk(ranks, 1)[ops.rank]
        width = shard_RV.shape[1]
        shard = VocabShard(ops.rank_11 * width, width, ops.rank_11)
        noise_RV = ctx.gumbel_noise(seeds_R2, positions_R, shard)
        samples = ctx.sample(shard_RV.contiguous(), approximate(params) if approx else params, noise_RV, shard)
        return samples.token_ids().tolist()

    first, *others = on_ranks(ranks, of_rank)
    assert all(ids == first for ids in others), "ranks differ"
    return first


def _numbers(row: Row) -> tuple[float, ...]:
    return row.temperature, row.top_k, row.top_p, row.min_p


# ((backend, filters, ranks), masks, vocabulary size, launches of ROWS rows)
CASES: dict[str, tuple[tuple[Any, ...], bool, int, int]] = {
    "reference": (("reference",), False, V, 24),
    "reference unfiltered": (("reference", False), False, V, 8),
    "reference masked": (("reference",), True, V, 24),
    "reference of the demo's ids": (("reference",), False, 2048, 1),
    "nki": (("nki",), False, V, 5),
    "nki unfiltered": (("nki", False), False, V, 3),
    "nki of two ranks masked": (("nki", True, 2), True, V, 5),
}


@pytest.mark.parametrize("name", CASES)
def test_a_sample_is_the_oracle_s(name: str) -> None:
    how, masks, vocabulary, launches = CASES[name]
    decided, rows = 0, 0
    for seed in range(launches):
        cases = random_rows(seed, how[1:2] != (False,), masks, vocabulary)
        for n, (row, token) in enumerate(zip(cases, sampled(cases, *how), strict=True)):
            ids = may_sample(row, from_best=how[0] == "reference")
            assert token in np.flatnonzero(ids), (seed, n, _numbers_of(row))
            decided, rows = decided + (ids.sum() == 1), rows + 1
    assert decided > 0.97 * rows, "the oracle must determine the id of almost every row"


def test_filters_before_the_mask_are_noticed() -> None:
    rows, keep = random_rows(0), Filters.keep
    logits_RV = torch.from_numpy(np.stack([row.logits for row in rows]))

    def early(self: Filters, ops: Any, shifted_RV: torch.Tensor, temperature_R: torch.Tensor) -> torch.Tensor:
        return keep(self, ops, logits_RV - logits_RV.amax(-1, keepdim=True), temperature_R)

    with mock.patch.object(Filters, "keep", early):
        actual = sampled(rows, "reference")
    wrong = [n for n, row in enumerate(rows) if actual[n] not in np.flatnonzero(may_sample(row, from_best=True))]
    assert wrong
    assert all(rows[n].allowed is not None for n in wrong)


@pytest.mark.parametrize(("filters", "ranks"), [(False, 8), (True, 1)])
def test_more_rows_than_a_launch_has_are_sampled_alike(filters: bool, ranks: int) -> None:
    parts = [random_rows(seed, filters, vocabulary=8 * 9) for seed in range(5)]
    together = sampled([row for part in parts for row in part], "nki", filters, ranks)
    assert together == [token for part in parts for token in sampled(part, "nki", filters)]


def _numbers_of(row: Row) -> dict[str, object]:
    return {f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name not in ("logits", "allowed")}


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
def test_a_row_without_a_sample_returns_no_id_and_changes_no_other_row(name: str) -> None:
    how, masks, *_ = CASES[name]
    rows = random_rows(1, how[1:2] != (False,), masks)
    broken = list(rows)
    # greedy, sampled and filtered rows
    for n, change in enumerate([*BROKEN.values()] * 4):
        logits = change(rows[3 * (n // 2) + n % 2].logits).astype(np.float32)
        broken[3 * (n // 2) + n % 2] = dataclasses.replace(rows[3 * (n // 2) + n % 2], logits=logits, allowed=None)
    before, after = sampled(rows, *how), sampled(broken, *how)
    for n in range(ROWS):
        assert after[n] == (before[n] if broken[n] is rows[n] else NO_ID), (n, _numbers_of(rows[n]))
    assert after.count(NO_ID) == 4 * len(BROKEN)


@pytest.mark.parametrize("backend", ["reference", "nki"])
def test_a_draft_s_sample_is_an_id_and_mostly_the_target_s(backend: str) -> None:
    """Its filters are approximate, so any finite id of a row is possible; without filters it is the target's."""
    filtered = equal = 0
    for seed in range(4):
        rows, hot = random_rows(seed), [row.temperature > 0 for row in random_rows(seed)]
        plain = [dataclasses.replace(row, top_k=0, top_p=1.0, min_p=0.0) for row in rows]
        drafts, exact = (sampled(rows, backend, approx=approx) for approx in (True, False))
        for row, token in zip(rows, drafts, strict=True):
            assert np.isfinite(row.logits[token]), _numbers_of(row)
            assert row.allowed is None or row.allowed[token], _numbers_of(row)
        for row, token in zip(plain, sampled(plain, backend, approx=True), strict=True):
            assert may_sample(row, from_best=backend == "reference")[token], _numbers_of(row)
        filtered += sum(hot)
        equal += sum(d == e for d, e, h in zip(drafts, exact, hot, strict=True) if h)
    assert equal > 0.9 * filtered, equal / filtered
