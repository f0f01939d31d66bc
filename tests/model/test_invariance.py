"""Same seed, same tokens, for any k limit, batch and order of requests; test_drafters.py covers the drafters.

Home: eager graphs; second look: a compiled bundle in both dtypes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.outer import ids_ahead
from tests.model.family import eager_engine, some_graphs
from trnspec.engine.async_engine import AsyncEngine
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request


def _requests(count: int, seed: int, tokens: int = 24) -> list[Request]:
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        params = Params(
            rng.choice([0.0, 0.6, 0.8, 1.0, 1.3]),
            rng.choice([0, 0, 5, 40]),
            rng.choice([1.0, 0.9, 0.5]),
            rng.choice([0.0, 0.0, 0.05]),
            rng.getrandbits(64),
        )
        requests.append(Request(tuple(rng.randrange(64) for _ in range(rng.randint(1, 80))), params, tokens))
    return requests


def _ids(engine: Engine, requests: list[Request]) -> list[list[int]]:
    return [r.ids for r in engine.run(requests)]


def _check(engines: Callable[[bool], Engine], requests: list[Request], k: int) -> None:
    """Compares `engines(True)` with `engines(False)`, also shuffled, one request at a time, and with each k limit."""
    count = len(requests)
    expected, actual = _ids(engines(False), requests), engines(True).run(requests)
    assert [r.ids for r in actual] == expected
    assert 0 < sum(sum(r.accepted) for r in actual) < sum(sum(r.drafted) for r in actual)
    order = random.Random(2).sample(range(count), count)
    shuffled = _ids(engines(True), [requests[i] for i in order])
    assert [shuffled[order.index(i)] for i in range(count)] == expected
    assert [_ids(engines(True), [requests[i]])[0] for i in range(0, count, 8)] == expected[::8]
    for limit in range(k + 1):
        limited = [Request(**{**vars(r), "k_limit": limit}) for r in requests[limit :: k + 1]]
        assert _ids(engines(True), limited) == expected[limit :: k + 1]


def test_speculation_batch_order_and_limit_change_nothing(family: Path) -> None:
    _check(lambda speculative: eager_engine(family, "chain", speculative, k=3, batch=8), _requests(16, 3, 12), 3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_compiled_speculation_batch_order_and_limit_change_nothing(family: Path, dtype: str) -> None:
    g = some_graphs(family, dtype=dtype, k=3)
    _check(lambda speculative: Engine(g, engine_config(g.bundle), speculative), _requests(48, ord(dtype[0])), 3)


def test_a_different_graph_emits_the_same(family: Path) -> None:
    requests = _requests(6, 3)
    expected = _ids(eager_engine(family, "chain", False, batch=8), requests)
    assert _ids(eager_engine(family, k="1", batch=1), requests) == expected


def test_filters_apply_in_a_batch_with_requests_without_filters(family: Path) -> None:
    """Top-k 1 is greedy."""
    params = Params(), Params(1.2, top_k=1, seed=3), Params(1.2, seed=3)
    greedy, filtered, free = _ids(eager_engine(family), [Request((9, 2, 7), p, 24) for p in params])
    assert greedy == filtered != free


def test_a_different_seed_is_noticed(family: Path) -> None:
    one, other = (Request((9, 2, 7), Params(1.0, seed=s), 24) for s in (1, 2))
    assert _ids(eager_engine(family), [one]) != _ids(eager_engine(family), [other])


def test_buckets_do_not_show(family: Path) -> None:
    requests = _requests(6, 5, tokens=20)
    assert _ids(eager_engine(family), requests) == _ids(eager_engine(family, max_len=256), requests)


@pytest.mark.parametrize("speculative", [True, False], ids=["drafts", "no drafts"])
def test_what_the_devices_hand_to_the_next_step_does_not_show(family: Path, speculative: bool) -> None:
    """Device-resident ids and positions as inputs of the next step; more requests than slots, changing buckets."""
    requests = _requests(8, 7, tokens=50)
    ahead = eager_engine(family, "chain", speculative, AsyncEngine, max_len=256)
    ids, followed = ids_ahead(ahead, requests)
    assert ids == _ids(eager_engine(family, "chain", speculative, max_len=256), requests)
    assert followed > 10


def test_the_end_of_the_context_is_reached_and_not_passed(family: Path) -> None:
    """Also by steps that are launched ahead, with the limits of the step before."""
    requests = [Request((9, 2, 7) * n, Params(0.9, seed=n), 1000) for n in range(5, 9)]
    expected = eager_engine(family, "chain", False).run(requests)
    assert {(len(q.ids) + len(r.ids), r.finish_reason) for q, r in zip(requests, expected, strict=True)} == {
        (128, "context")
    }
    actual = eager_engine(family, "itself").run(requests)
    assert [(r.ids, r.finish_reason) for r in actual] == [(r.ids, r.finish_reason) for r in expected]
    assert ids_ahead(eager_engine(family, "itself", True, AsyncEngine), requests)[0] == [r.ids for r in expected]


def test_eos_and_stop_cut_inside_an_accepted_block(family: Path) -> None:
    engine, request = eager_engine(family, "itself"), Request((9, 2, 7), Params(1.5, seed=2), 40)
    (full,) = engine.run([request])
    assert full.tokens_per_step > 1.3, "steps must emit several tokens for this test to mean anything"
    for at in range(3, 20, 2):
        token = full.ids[at]
        first = full.ids.index(token)
        (cut,) = engine.run([Request(request.ids, request.params, 40, (token,))])
        assert (cut.ids, cut.finish_reason) == (full.ids[: first + 1], "eos")
