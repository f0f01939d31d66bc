"""Ratios of servers are taken within a round, so that a machine that slows down between two rounds does not show."""

from __future__ import annotations

import argparse
import itertools
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from bench.serving import bursts, long_prompts
from bench.serving.__main__ import BASELINE, FIXED, NEVER, SPECULATIVE
from bench.serving.prompts import Prompt
from bench.serving.servers import Endpoint
from bench.wall.harness import interval
from model.errors import UserError
from tests.bench.endpoint import endpoint

# a machine's speed by round
DRIFT = (1.0, 2.0, 4.0, 8.0, 16.0)


def test_a_burst_s_best_fixed_k_is_by_its_median_and_ratios_are_by_round() -> None:
    speeds = {BASELINE: 100.0, NEVER: 80.0, FIXED: 200.0, SPECULATIVE: 190.0}
    rows: list[dict[str, Any]] = [
        {"tier": "open", "clients": 4, "round": n, "tokens_s": {name: s / slow for name, s in speeds.items()}}
        for n, slow in enumerate(DRIFT, 1)
    ]
    (row,) = bursts.summary(rows)
    assert (row["best"], row["of_best"][1], row["rounds"]) == (FIXED, 0.95, 5)
    assert row["times"][BASELINE][1] == 1.9
    assert "| open | 4 | 25 | 20 | 50 | 48 | 1.90 (1.90 to 1.90) | 0.95 (0.95 to 0.95) |" in bursts.table([row])


@pytest.mark.parametrize("count", [6, 9, 16, 40])
def test_the_median_is_inside_of_its_interval_19_times_of_20(count: int) -> None:
    rng, draws = random.Random(count), 4000
    samples = ([rng.lognormvariate(0, 1) for _ in range(count)] for _ in range(draws))
    inside = sum(low <= 1 <= high for low, high in map(interval, samples))
    assert 0.94 * draws <= inside
    # of few values no narrower interval does
    assert inside <= (0.99 if count < 10 else 0.98) * draws


def test_the_interval_of_a_few_values_holds_all_of_them() -> None:
    assert (interval([2.0]), interval([3.0, 1.0, 2.0])) == ([2.0, 2.0], [1.0, 3.0])


@pytest.mark.parametrize(("uneven", "least", "most"), [(False, 128, 128), (True, 64, 192)])
def test_every_server_of_a_round_gets_the_same_requests(
    monkeypatch: pytest.MonkeyPatch, uneven: bool, least: int, most: int
) -> None:
    sent = list[tuple[str, tuple[str, ...], tuple[int, ...]]]()

    def burst(server: Endpoint, prompts: Sequence[Prompt], clients: int, tokens: Sequence[int]) -> float:
        sent.append((server.model, tuple(p.name for p in prompts), tuple(tokens)))
        return 1.0

    monkeypatch.setattr(bursts, "burst", burst)
    options = argparse.Namespace(seed=0, prompt_set="random", concurrency=[4], rounds=1, each=16, tokens=128)
    options.uneven = uneven
    bursts.measure({name: Endpoint("", name) for name in bursts.SERVERS}, options)
    for round_ in (sent[:4], sent[4:]):
        assert {name for name, *_ in round_} == set(bursts.SERVERS)
        ((prompts, tokens),) = {asked[1:] for asked in round_}
        assert (len(prompts), len(tokens)) == (64, 64)
        assert set(tokens) <= set(range(least, most + 1))
        assert (len(set(tokens)) > 1) == uneven
    assert sent[0][1:] != sent[4][1:]


def test_a_long_prompt_s_ratio_is_stock_s_time_over_ours_by_round() -> None:
    rows = [
        {"round": n, "case": long_prompts.COLD, "prompt": 500, "endpoint": name, "first_ms": ms * slow, "all_ms": 9.0}
        for n, slow in enumerate(DRIFT, 1)
        for name, ms in ((long_prompts.OURS, 5.0), (long_prompts.STOCK, 10.0))
    ]
    ours, stock = long_prompts.summary(rows)
    assert ours["times"] == {"first_ms": 2.0, "all_ms": 1.0}
    assert ours["between"]["first_ms"] == [2.0, 2.0]
    assert "| 2.00 (2.00 to 2.00) | 1.00 (1.00 to 1.00) |" in long_prompts.table([ours])
    assert " to " not in long_prompts.table([stock])
    assert (ours["first_ms"], stock["first_ms"], "times" in stock) == (20.0, 40.0, False)


def test_a_round_sends_a_prompt_again_and_one_that_shares_nine_tenths() -> None:
    cold, again, most, beside, clients, in_step = long_prompts.cases([100], random.Random(0))
    assert cold[2] == again[2]
    assert most[2][:90] == cold[2][:90]
    assert most[2][90:] != cold[2][90:]
    assert (beside[0], len(beside[2])) == (long_prompts.BESIDE, 100)
    assert (clients[0], len(clients[2])) == (long_prompts.CLIENTS, 100)
    assert (in_step[0], len(in_step[2])) == (long_prompts.IN_STEP, 100)
    assert set(beside[2][:10]) != set(cold[2][:10])


def test_an_answer_without_ids_is_an_error() -> None:
    with endpoint(lambda body: {}) as address, pytest.raises(UserError, match="gave an empty answer"):
        long_prompts.answer(long_prompts.Endpoint(address, "m"), [1, 2], [], 2)


def test_gaps_are_those_that_reach_into_the_time_of_a_prompt() -> None:
    now = time.perf_counter()
    times = long_prompts.Times(now, [now + second for second in (1, 2, 4, 8)])
    assert [round(gap) for gap in times.gaps_ms(now + 3, now + 5)] == [2000, 4000]


@pytest.mark.parametrize(("equal", "least", "most"), [(True, 32, 32), (False, 16, 48)])
def test_clients_send_one_prompt_after_the_other(
    monkeypatch: pytest.MonkeyPatch, equal: bool, least: int, most: int
) -> None:
    """16 prompts, four at once, none twice; what is told are medians, and the time of all."""
    numbers, all_four, seen = itertools.count(1), threading.Barrier(4, timeout=30), dict[tuple[int, ...], int]()

    def alone(server: Endpoint, ids: Sequence[int], tokens: int) -> dict[str, float]:
        all_four.wait()
        time.sleep(0.01)
        seen[tuple(ids)] = tokens
        return {"first_ms": float(next(numbers)), "all_ms": 1.0}

    monkeypatch.setattr(long_prompts, "alone", alone)
    begin = time.perf_counter()
    found = long_prompts.at_once(Endpoint("", "m"), range(30), random.Random(0), equal)
    assert 4 * 10 <= found.pop("round_ms") <= 1e3 * (time.perf_counter() - begin)
    assert (len(seen), {len(ids) for ids in seen}) == (16, {30})
    assert set(seen.values()) <= set(range(least, most + 1))
    assert (len(set(seen.values())) > 1) == (not equal)
    assert found == {"first_ms": 8.5, "all_ms": 1.0}
