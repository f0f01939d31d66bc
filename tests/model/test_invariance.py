"""Same seed, same tokens, whatever k, the limit, the batch and its order.

test_drafters.py does the same for every drafter, tests/compile/test_sharded.py on eight ranks. Every option is met; 15
drafts a step in one dtype, because XLA compiles a graph for as long as it drafts.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.engine.ahead import ids_ahead
from tests.model.family import graphs, some_graphs
from trnspec.engine.async_engine import AsyncEngine
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request, Result
from trnspec.runtime.xla import XlaRunner

pytestmark = pytest.mark.released_code


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


def _run(g: XlaRunner, requests: list[Request], speculative: bool = True) -> list[Result]:
    return Engine(g, engine_config(g.bundle), speculative).run(requests)


def _ids(g: XlaRunner, requests: list[Request], speculative: bool = True) -> list[list[int]]:
    return [r.ids for r in _run(g, requests, speculative)]


@pytest.mark.parametrize(("dtype", "k"), [("fp32", 15), ("bf16", 3)])
def test_speculation_batch_order_and_limit_change_nothing(family: Path, dtype: str, k: int) -> None:
    g = some_graphs(family, dtype=dtype, k=k)
    # 128 requests in all: different ones for each dtype
    requests = _requests(64, ord(dtype[0]))
    expected = _ids(g, requests, speculative=False)
    found = _run(g, requests)
    assert [r.ids for r in found] == expected
    assert 0 < sum(sum(r.accepted) for r in found) < sum(sum(r.drafted) for r in found)
    order = random.Random(2).sample(range(len(requests)), len(requests))
    shuffled = _ids(g, [requests[i] for i in order])
    assert [shuffled[order.index(i)] for i in range(len(requests))] == expected
    assert [_ids(g, [requests[i]])[0] for i in range(0, 64, 8)] == expected[::8]
    for limit in range(k + 1):
        limited = [Request(**{**vars(r), "k_limit": limit}) for r in requests[limit :: k + 1]]
        assert _ids(g, limited) == expected[limit :: k + 1]


def test_a_different_graph_emits_the_same(family: Path) -> None:
    requests = _requests(40, 3)
    expected = _ids(graphs(family), requests, speculative=False)
    assert _ids(some_graphs(family, k="1", batch=1), requests) == expected


def test_a_different_seed_is_noticed(family: Path) -> None:
    one, other = (Request((9, 2, 7), Params(1.0, seed=s), 24) for s in (1, 2))
    assert _ids(graphs(family), [one]) != _ids(graphs(family), [other])


def test_buckets_do_not_show(family: Path) -> None:
    requests = _requests(12, 5, tokens=30)
    assert _ids(graphs(family), requests) == _ids(graphs(family, max_len=256), requests)


@pytest.mark.parametrize("speculative", [True, False], ids=["drafts", "alone"])
def test_what_the_devices_hand_to_the_next_step_does_not_show(family: Path, speculative: bool) -> None:
    """Unread ids, masks and positions as the next step's inputs: more requests than slots, buckets that change."""
    g = graphs(family, max_len=256)
    requests = _requests(24, 7, tokens=80)
    ids, followed = ids_ahead(AsyncEngine(g, engine_config(g.bundle), speculative), requests)
    assert ids == _ids(g, requests, speculative)
    assert followed > 20


def test_the_end_of_the_context_is_reached_and_not_passed(family: Path) -> None:
    g, request = graphs(family), Request((9, 2, 7), Params(0.9, seed=3), 1000)
    with_, without = _run(g, [request])[0], _run(g, [request], speculative=False)[0]
    assert (with_.ids, with_.reason) == (without.ids, "context")
    assert len(request.ids) + len(with_.ids) == 128


def test_eos_and_stop_cut_inside_an_accepted_block(family: Path) -> None:
    g, request = graphs(family), Request((9, 2, 7), Params(1.5, seed=2), 40)
    whole = _run(g, [request])[0]
    assert whole.tokens_per_step > 1.3, "a block must hold several tokens for this test to mean anything"
    for at in range(3, 20):
        token = whole.ids[at]
        first = whole.ids.index(token)
        cut = _run(g, [Request(request.ids, request.params, 40, (token,))])[0]
        assert (cut.ids, cut.reason) == (whole.ids[: first + 1], "eos")
