"""Same seed, same tokens: whatever the draft, k, the limit, the batch and its order."""

import random

import pytest

from model.serving.engine import Engine
from model.serving.request import Params, Request, Result
from model.serving.runtime import Graphs
from tests.model.ahead import ids_ahead
from tests.model.demo_bundle import PROMPTS, graphs, request, shape_of


def _requests(g: Graphs, count: int, seed: int, tokens: int = 24) -> list[Request]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        params = Params(
            rng.choice([0.0, 0.6, 0.8, 1.0, 1.3]),
            rng.choice([0, 0, 5, 40]),
            rng.choice([1.0, 0.9, 0.5]),
            rng.choice([0.0, 0.0, 0.05]),
            rng.getrandbits(64),
        )
        text = rng.choice(PROMPTS)
        made.append(request(g, text[: rng.randint(8, len(text))], params, tokens))
    return made


def _run(g: Graphs, requests: list[Request], speculative: bool = True) -> list[Result]:
    return Engine(g, shape_of(g.bundle), speculative).run(requests)


def _ids(g: Graphs, requests: list[Request], speculative: bool = True) -> list[list[int]]:
    return [r.ids for r in _run(g, requests, speculative)]


def _alone(g: Graphs, requests: list[Request], speculative: bool = True) -> list[list[int]]:
    return [_ids(g, [r], speculative)[0] for r in requests]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_speculation_batch_order_and_limit_change_nothing(base, dtype: str) -> None:
    g = graphs(base, k=15, dtype=dtype, max_len=128)
    # 200 requests in all: another hundred for each dtype
    requests = [r for r in _requests(g, 130, len(dtype) + ord(dtype[0])) if len(r.ids) < 90][:100]
    assert len(requests) == 100
    expected = _ids(g, requests, speculative=False)
    assert _ids(g, requests) == expected
    order = random.Random(2).sample(range(len(requests)), len(requests))
    shuffled = _ids(g, [requests[i] for i in order])
    assert [shuffled[order.index(i)] for i in range(len(requests))] == expected
    some = range(0, 100, 10)
    assert _alone(g, [requests[i] for i in some]) == [expected[i] for i in some]
    for limit in range(16):
        limited = [Request(**{**requests[i].__dict__, "k_limit": limit}) for i in range(limit, 100, 16)]
        assert _ids(g, limited) == [expected[i] for i in range(limit, 100, 16)]


@pytest.mark.parametrize("changes", [{"k": 1}, {"k": 4, "batch": 1}, {"draft": "draft_small"}], ids=str)
def test_other_graphs_emit_the_same(base, changes: dict) -> None:
    reference = graphs(base, k=15, dtype="fp32", max_len=128)
    requests = [r for r in _requests(reference, 130, 3) if len(r.ids) < 90][:100]
    expected = _ids(reference, requests, speculative=False)
    assert _ids(graphs(base, max_len=128, **changes), requests) == expected


def test_another_seed_is_noticed(base) -> None:
    g = graphs(base, k=15, dtype="fp32", max_len=128)
    one, other = (request(g, PROMPTS[-1], Params(1.0, seed=s), 24) for s in (1, 2))
    assert _ids(g, [one]) != _ids(g, [other])


def test_buckets_do_not_show(base) -> None:
    small, large = graphs(base, k=15, dtype="fp32", max_len=128), graphs(base, max_len=256)
    requests = [r for r in _requests(small, 12, 5, tokens=30) if len(r.ids) < 90]
    assert _ids(small, requests) == _ids(large, requests)


@pytest.mark.parametrize("speculative", [True, False], ids=["drafts", "alone"])
def test_what_the_devices_hand_to_the_next_step_does_not_show(base, speculative: bool) -> None:
    """Unread ids, masks and positions as the next step's inputs: more requests than slots, buckets that change."""
    g = graphs(base, max_len=256)
    requests = [r for r in _requests(g, 24, 7, tokens=80) if len(r.ids) < 90]
    ids, followed = ids_ahead(Engine(g, shape_of(g.bundle), speculative), requests)
    assert ids == _ids(g, requests, speculative)
    assert followed > 20


def test_the_end_of_the_context_is_reached_and_not_passed(base) -> None:
    g = graphs(base, k=15, dtype="fp32", max_len=128)
    for text in (PROMPTS[0], "Count from 1 to 100: 1, 2, 3,"):
        made = request(g, text, count=1000)
        with_, without = _run(g, [made])[0], _run(g, [made], speculative=False)[0]
        assert with_.ids == without.ids
        if with_.reason == "context":
            assert len(made.ids) + len(with_.ids) == 128
            break
    else:
        pytest.fail("no prompt reached the end of the context")


def test_eos_and_stop_cut_inside_an_accepted_block(base) -> None:
    g = graphs(base, k=15, dtype="fp32", max_len=128)
    made = request(g, "Count from 1 to 100: 1, 2, 3,", count=40)
    whole = _run(g, [made])[0]
    assert whole.tokens_per_step > 2, "the block must hold several tokens for this test to mean anything"
    for at in range(3, 20):
        token = whole.ids[at]
        first = whole.ids.index(token)
        cut = _run(g, [Request(made.ids, made.params, 40, (token,))])[0]
        assert (cut.ids, cut.reason) == (whole.ids[: first + 1], "eos")
