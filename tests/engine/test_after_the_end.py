"""Requests that end, leave or change their limits in the middle of a step, on a runner that computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from model.graph_io import StepInputs, StepOutputs
from model.graph_key import GraphKey
from model.sampling import NO_ID
from tests.model.synthetic_load import Synthetic
from tests.model.test_masks import words
from trnspec.engine.async_engine import AsyncEngine
from trnspec.engine.engine import Event
from trnspec.engine.masks import Walk
from trnspec.engine.request import Params, Request, Shape
from trnspec.engine.slots import Slot

K, MAX_LEN = 3, 64


@dataclass
class Scored(Synthetic):
    """With scores of every id, -1 for a padded one's rank; the request of seed `broken` draws NO_ID at a position."""

    broken: int = -1
    at: int = 0
    cleared: tuple[int, ...] = ()

    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        out, first = super().run(key, inputs), inputs.position_ids[:, 0] + 1
        if key.is_prefill:
            first = inputs.attention_mask.sum(1)
        accepted = out.accepted.copy()
        for row, seed in enumerate(inputs.seeds[:, 0]):
            place = self.at - int(first[row])
            if seed == self.broken and 0 <= place < accepted.shape[1] and accepted[row, place] >= 0:
                accepted[row, place] = NO_ID
        if inputs.allowed is None:
            return out._replace(accepted=accepted)
        scores = np.stack((-accepted / 1000, accepted), -1)
        if key.is_prefill:
            # a prompt's scores come with those of its first new id, which is behind them
            scores = np.pad(scores, ((0, 0), (int(first[0]) - 1, 0), (0, 0)))
        return out._replace(accepted=accepted, scores=scores)

    def clear(self, slot: int, blocks: Sequence[int]) -> None:
        self.cleared += (slot,)


def _engine(runner: Any = None, batch: int = 2, **more: Any) -> AsyncEngine:
    return AsyncEngine(runner or Scored(), Shape((K,), batch, MAX_LEN, (MAX_LEN,), 1000, 1 + batch, **more))


def _request(seed: int, tokens: int = 12, **more: Any) -> Request:
    return Request((1, 2, 3), Params(seed=seed), tokens, **more)


def _drain(engine: AsyncEngine, ahead: bool = False) -> list[Event]:
    events = []
    while engine.busy:
        if ahead:
            engine.launch()
            engine.launch_next()
        events += engine.step()
    return events


def _ids(events: Sequence[Event], number: int) -> list[int]:
    return [i for e in events if e.number == number for i in e.ids]


@pytest.mark.parametrize("begun", [1, 2])
def test_a_begun_step_is_read_for_those_who_stay(begun: int) -> None:
    """One of two requests leaves while a step of both runs, or two steps: the other's ids of these are not lost."""
    engine = _engine()
    early, gone = engine.add(_request(1, 30)), engine.add(_request(2, 30))
    events = engine.step() + engine.step()
    engine.launch()
    if begun == 2:
        engine.launch_next()
    ran = len(engine.runner.keys)  # type: ignore[attr-defined]
    engine.cancel(gone)
    for _ in range(begun):
        told = engine.step()
        assert [event.number for event in told] == [early]
        events += told
    assert len(engine.runner.keys) == ran, "what was begun is read, not run again"  # type: ignore[attr-defined]
    events += _drain(engine)
    assert _ids(events, early) == _engine().run([_request(1, 30)])[0].ids
    assert len(_ids(events, gone)) == 1


# ends in the middle of a step: at a limit, a stop id and a string, which keeps fewer ids than it has seen
ENDS: dict[str, dict[str, Any]] = {
    "limit": {"tokens": 6},
    "stop": {"tokens": 40, "stop_ids": tuple(range(0, 1000, 7))},
    "cut": {"tokens": 40, "cut": lambda ids: 5 if len(ids) > 6 else None},
}


@pytest.mark.parametrize("end", ENDS)
def test_there_are_as_many_scores_as_ids(end: str) -> None:
    cut_short = 0
    for seed in range(12):
        runner = Scored(alpha=0.9)
        engine = _engine(runner)
        number = engine.add(_request(seed, **ENDS[end], logprobs=0))
        events = _drain(engine)
        (result,) = (event.result for event in events if event.result)
        assert [score.rank for score in result.scores] == result.ids
        assert result.ids == _ids(events, number) or end == "cut"
        assert all(len(event.scores) == len(event.ids) for event in events) or end == "cut"
        cut_short += events[-1].accepted + 1 > len(events[-1].ids)
    assert cut_short > 3, "some must end before the last id of a step"


class Watched(Synthetic):
    """Holds each request's limit of drafts in every step, by its seed."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[dict[int, int]] = []

    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        if not key.is_prefill:
            rows = zip(inputs.seeds[:, 0].tolist(), inputs.k_limits.tolist(), strict=True)
            self.limits.append(dict(rows))
        return super().run(key, inputs)


def test_a_step_has_the_limits_of_its_own_requests() -> None:
    """Requests with limits and without, in slots that others have left; then limits that change while no seat does."""
    runner = Watched()
    limits = {1: 3, 2: 1, 3: 3, 4: 0, 5: 2, 6: 2}
    requests = [_request(seed, 6 + 5 * seed, k_limit=None if limit == 3 else limit) for seed, limit in limits.items()]
    _engine(runner).run(requests)
    # one after the other, so that the next has the same limit and nothing else
    _engine(runner, batch=1).run(requests)
    assert {seed for step in runner.limits for seed in step} - {0} == limits.keys()
    assert all(limits.get(seed, 0) == limit for step in runner.limits for seed, limit in step.items())
    runner, counts = Watched(), iter([3, 1, 2, 0, 3, 1] * 20)
    asked = []

    def propose(slot: Slot, most: int) -> list[int]:
        asked.append(next(counts))
        return [7] * asked[-1]

    shape = Shape((1, 2, 3), 1, MAX_LEN, (MAX_LEN,), 1000, 2, host_drafts=True)
    AsyncEngine(runner, shape, propose=propose).run([_request(9, 30)])
    assert [step[9] for step in runner.limits] == asked
    assert len({*asked}) == 4


def test_a_grammar_is_asked_about_ids_that_it_allows_alone() -> None:
    allowed = {(): {1, 2}, (1,): {3, 40}, (1, 40): {5, 6}, (1, 40, 5): {8, 9}}

    def strict(ids: Sequence[int]) -> np.ndarray:
        for n, token in enumerate(ids):
            assert token in allowed[tuple(ids[:n])], "a real matcher would be in no state here"
        return words([i in allowed[tuple(ids)] for i in range(64)])

    walk = Walk(strict, (), 3, 2)
    for drafts in ([1, 40, 7], [9, 40, 5], [1, 4, 5], [1, 40, 5], [NO_ID, 1], [63]):
        walk.along(drafts)
    assert walk.drafts == []


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("at", range(3, 14))
def test_a_request_without_a_next_id_ends_with_an_error_and_the_others_go_on(at: int, ahead: bool) -> None:
    """At its first token, in the middle of a step and at its end; the next request takes its slot, which is cleared."""
    runner = Scored(broken=2, at=at)
    engine = _engine(runner)
    whole = [r.ids for r in _engine().run([_request(seed, 14) for seed in (1, 2, 3)])]
    numbers = [engine.add(_request(seed, 14)) for seed in (1, 2, 3)]
    events = _drain(engine, ahead)
    results = {e.number: e.result for e in events if e.result}
    # the prompt has three ids: the id of position `at` is the one after at - 3 others
    expected = [whole[0], whole[1][: at - 3], whole[2]]
    assert [results[n].ids for n in numbers] == expected == [_ids(events, n) for n in numbers]
    assert [results[n].reason for n in numbers] == ["length", "error", "length"]
    assert len(runner.cleared) == 1


def test_scores_end_where_the_draws_do() -> None:
    engine = _engine(Scored(broken=2, at=8))
    (result,) = engine.run([replace(_request(2), logprobs=0)])
    assert (result.reason, len(result.scores), len(result.ids)) == ("error", 5, 5)
