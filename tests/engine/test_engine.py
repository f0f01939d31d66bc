"""The engine's loop and its slot table, on a runner that computes nothing: slots, events, cancellation."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from model.errors import UserError
from model.graph_key import GraphKey, Stage
from model.sampling import NO_ID
from tests.engine.ahead import ids_ahead
from tests.model.synthetic_load import BySeated, Synthetic
from trnspec.engine import engine as engine_module
from trnspec.engine.adaptive_k import FixedK, StepResult
from trnspec.engine.async_engine import AsyncEngine
from trnspec.engine.engine import Event
from trnspec.engine.request import Params, Request, Result, Shape
from trnspec.engine.slots import SlotTable
from trnspec.runtime import pjrt

K, BATCH, MAX_LEN = 3, 2, 64


def _engine(batch: int = BATCH, step_k: StepK | None = None, ks: tuple[int, ...] = (K,), **more: Any) -> AsyncEngine:
    shape = Shape(ks, batch, MAX_LEN, (32, MAX_LEN), 1000, 1 + batch, **more)
    return AsyncEngine(Synthetic(), shape, step_k=step_k)


def _apart(**more: Any) -> AsyncEngine:
    """An engine whose draft has graphs of its own for prompts, which run in chunks of 16 ids."""
    prompts = tuple((16, keys) for keys in (16, MAX_LEN))
    return _engine(apart=True, prompts=prompts, **more)


def _prompt(seed: int, ids: int = 40, tokens: int = 2) -> Request:
    return Request((1,) * ids, Params(seed=seed), tokens)


def _place(engine: AsyncEngine, request: Request) -> int:
    return engine.admit(request, engine.blocks.take(1) if engine.blocks else ())


def _keys(engine: AsyncEngine) -> list[GraphKey]:
    keys: list[GraphKey] = engine.runner.keys  # type: ignore[attr-defined]
    return keys


def _stages(engine: AsyncEngine) -> list[Stage]:
    return [key.stage for key in _keys(engine)]


def _request(seed: int, tokens: int = 9, **more: object) -> Request:
    return Request((1, 2, 3), Params(seed=seed), tokens, **more)  # type: ignore[arg-type]


def _drain(engine: AsyncEngine) -> list[Event]:
    events = []
    while engine.busy:
        events += engine.step()
    return events


def _ids(events: list[Event], number: int) -> list[int]:
    return [i for e in events if e.number == number for i in e.ids]


def test_events_add_up_to_the_results() -> None:
    engine = _engine()
    numbers = [engine.add(_request(seed, 5 + seed)) for seed in range(1, 6)]
    events = _drain(engine)
    alone = [_engine().run([_request(seed, 5 + seed)])[0].ids for seed in range(1, 6)]
    assert [_ids(events, n) for n in numbers] == alone
    ended = [e for e in events if e.result]
    assert sorted(e.number for e in ended) == numbers
    assert all(e.result and e.result.ids == _ids(events, e.number) for e in ended)
    assert engine.step() == []


def test_a_step_runs_one_graph_and_prompts_go_first() -> None:
    engine = _engine()
    for seed in (1, 2, 3):
        engine.add(_request(seed))
    first, second, third = engine.step(), engine.step(), engine.step()
    assert [len(e) for e in (first, second, third)] == [1, 1, 2]
    # the third request has no slot yet
    assert _stages(engine) == [Stage.PREFILL, Stage.PREFILL, Stage.STEP]


def test_a_request_joins_while_others_run() -> None:
    engine = _engine()
    early = engine.add(_request(1, 12))
    events = engine.step() + engine.step()
    late = engine.add(_request(2, 12))
    events += _drain(engine)
    assert _ids(events, early) == _engine().run([_request(1, 12)])[0].ids
    assert _ids(events, late) == _engine().run([_request(2, 12)])[0].ids


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["waiting", "after its prompt", "after two steps"])
def test_a_cancelled_request_is_not_heard_of_again(steps: int) -> None:
    engine = _engine(batch=1)
    gone, left = engine.add(_request(1, 50)), engine.add(_request(2))
    for _ in range(steps):
        engine.step()
    engine.cancel(gone)
    events = _drain(engine)
    assert {e.number for e in events} == {left}
    assert _ids(events, left) == _engine().run([_request(2)])[0].ids
    engine.cancel(left)
    assert not engine.slots.seated
    assert not engine.slots.full


def test_a_step_that_begins_early_changes_no_id() -> None:
    engine, events, requests = _engine(), list[Event](), dict[int, Request]()

    def add(seed: int, tokens: int) -> int:
        request = _request(seed, tokens)
        requests[number := engine.add(request)] = request
        return number

    def step() -> None:
        events.extend(engine.step())
        if not engine.slots.full:
            return
        engine.launch()
        assert engine.launched

    early, gone = add(1, 30), add(2, 30)
    for _ in range(4):
        step()
    # while a step of both runs, one leaves, and a third one takes its slot after that step
    engine.cancel(gone)
    count, late = len(_ids(events, gone)), add(3, 12)
    while engine.busy:
        step()
    assert count
    assert len(_ids(events, gone)) == count
    for number in (early, late):
        assert _ids(events, number) == _engine().run([requests[number]])[0].ids


def test_prompts_are_handed_over_behind_the_step_that_runs() -> None:
    engine = _engine(batch=3)
    numbers = [engine.add(_request(1, 30))]
    events = engine.step()
    engine.launch()
    for seed in (2, 3):
        numbers.append(engine.admit(_request(seed, 9)))
        engine.prefill(numbers[-1], 3)
    assert _stages(engine)[-2:] == [Stage.PREFILL] * 2
    told = [engine.step() for _ in range(3)]
    assert [[e.number for e in some] for some in told] == [[n] for n in numbers]
    assert not engine.launched
    events += [*itertools.chain(*told), *_drain(engine)]
    for seed, number in enumerate(numbers, 1):
        assert _ids(events, number) == _engine().run([_request(seed, 30 if seed == 1 else 9)])[0].ids


def test_no_step_follows_a_prompt() -> None:
    engine = _engine()
    engine.prefill(engine.admit(_request(1, 40)), 3)
    assert not _follows(engine)


def test_a_begun_step_of_nobody_is_forgotten() -> None:
    engine = _engine()
    gone = engine.add(_request(1, 30))
    engine.step()
    engine.launch()
    engine.cancel(gone)
    left = engine.add(_request(2))
    assert {e.number for e in _drain(engine)} == {left}


def test_a_request_that_is_placed_again_ends_where_it_would_have() -> None:
    """Its limit counts the ids that it drew before."""
    request, engine = _request(1, 30), _engine()
    (alone,) = _engine().run([request])
    drawn = list[int]()
    for _ in range(4):
        number = engine.admit(request, ids=drawn)
        engine.prefill(number, 3 + len(drawn))
        new = [*engine.step(), *engine.step()]
        engine.launch()
        engine.launch_next()
        assert engine.preempt(number) == [*drawn, *_ids(new, number)]
        assert not engine.launched, "the steps of which no id is read"
        drawn += _ids(new, number)
    number = engine.admit(request, ids=drawn)
    engine.prefill(number, 3 + len(drawn))
    events = _drain(engine)
    result = events[-1].result
    assert result
    assert (result.reason, result.ids) == ("length", alone.ids) == (alone.reason, [*drawn, *_ids(events, number)])


def test_behind_a_lost_place_a_step_begins_early() -> None:
    """Its request waits for what the others free."""
    engine = _engine()
    for seed in (1, 2):
        number = engine.admit(_request(seed, 40))
        engine.prefill(number, 3)
        engine.step()
    engine.preempt(number)
    engine.launch()
    assert engine.launched


def test_with_masks_a_step_begins_when_they_are_there() -> None:
    engine = _engine()
    engine.prefill(engine.admit(_request(1, 30, allowed=lambda ids: np.full(32, -1, np.int32))), 3)
    engine.step()
    engine.launch()
    assert not engine.launched
    engine.launch(masks=True)
    assert engine.launched
    assert _stages(engine)[1:] == [Stage.DRAFT, Stage.VERIFY]
    assert all(key.asking for key in _keys(engine))
    # the masks of the step after it depend on the ids that it emits
    assert not _follows(engine)


def test_steps_that_follow_unread_ones_change_no_id() -> None:
    """More requests than slots, of different lengths: one that ends in a step is in the next too, without events."""
    requests = [_request(seed, 6 + 5 * seed) for seed in range(1, 6)]
    ids, followed = ids_ahead(_engine(), requests)
    assert ids == [r.ids for r in _engine().run(requests)]
    assert followed > 9


def _running(tokens: int = 40, positions: int = 3, **more: Any) -> AsyncEngine:
    """An engine with a step begun of one request with a prompt of so many ids."""
    engine = _engine(**more)
    engine.add(Request((1,) * positions, Params(seed=1), tokens))
    engine.step()
    engine.launch()
    return engine


def _follows(engine: AsyncEngine) -> bool:
    before = len(_keys(engine))
    engine.launch_next()
    return len(_keys(engine)) > before


class _Outputs:
    """Ids on a device: they are ready when it says so."""

    def __init__(self, ids: np.ndarray, ready: list[bool]) -> None:
        self._ids, self._ready = ids, ready

    def is_ready(self) -> bool:
        return self._ready[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._ids


def test_the_end_of_a_step_is_foretold_by_the_shortest_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow step moves it by a fiftieth, one whose outputs are there has ended, and one behind a draft's part of a
    prompt teaches nothing."""
    now, ready = [1.0], [False]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    engine = _running()
    run = engine.runner.run

    def on_a_device(*of: Any) -> Any:
        outputs = run(*of)
        return outputs._replace(accepted=_Outputs(outputs.accepted, ready))

    def passes(seconds: float) -> float:
        now[0] += seconds
        engine.step()
        engine.launch()
        return round(engine.left_s, 4)

    monkeypatch.setattr(engine.runner, "run", on_a_device)
    left = [passes(seconds) for seconds in (3.0, 4.0, 50.0, 4.0)]
    assert left == [3.0, 3.06, 3.1212, 3.1836]
    now[0] += 1
    assert round(engine.left_s, 4) == 2.1836
    ready[0] = True
    assert engine.left_s == 0
    ready[0], engine._delayed = False, True
    assert [passes(seconds) for seconds in (2.0, 0.5, 2.5)] == [3.0, 3.0, 2.5]


def test_one_step_follows_and_no_more() -> None:
    engine = _running()
    assert _follows(engine)
    assert not _follows(engine)


def test_behind_an_end_no_step_begins_early_while_the_slot_is_free() -> None:
    """Its client is likely to ask again, and the prompt would wait for the step."""
    engine = _engine()
    numbers = [engine.add(_request(seed, 40)) for seed in (1, 2)]
    while engine._waiting:
        engine.step()
    engine.cancel(numbers[0])
    begun = list[bool]()
    for _ in range(3):
        engine.launch()
        begun.append(engine.launched)
        engine.step()
    assert begun == [False, False, True]
    engine.cancel(numbers[1])
    engine.add(_request(3, 40))
    engine.add(_request(4, 40))
    engine.step()
    engine.step()
    engine.cancel(-1)
    engine.launch()
    assert engine.launched, "all slots are taken"


def test_no_step_follows_where_none_runs() -> None:
    engine = _running()
    engine.step()
    assert not _follows(engine)


# the step that runs writes K + 1 rows, as the one after it does; the first bucket has 32
@pytest.mark.parametrize(("positions", "follows"), [(32 - 2 * (K + 1), True), (33 - 2 * (K + 1), False)])
def test_no_step_follows_into_a_different_bucket(positions: int, follows: bool) -> None:
    assert _follows(_running(positions=positions)) == follows


def test_a_step_follows_with_the_k_of_the_one_that_runs() -> None:
    """Rows of a larger k could end behind its bucket."""
    step_k = BySeated(1)
    engine = _running(step_k=step_k, ks=(1, 3))
    assert _follows(engine)
    assert [key.k for key in _keys(engine)[1:]] == [1, 1]
    step_k = BySeated(1)
    engine = _running(step_k=step_k, ks=(1, 3))
    step_k.of_seated = (3,)
    assert not _follows(engine)


# one id is there before the step that runs
@pytest.mark.parametrize(("tokens", "follows"), [(K + 2, False), (K + 3, True)])
def test_no_step_follows_one_that_may_be_all_requests_last(tokens: int, follows: bool) -> None:
    assert _follows(_running(tokens)) == follows


def test_no_step_follows_where_the_host_drafts_or_the_seats_change() -> None:
    assert not _follows(_running(host_drafts=True))
    waiting = _running()
    waiting.add(_request(2))
    assert not _follows(waiting)
    left = _running()
    left.slots.seat(9, _request(2, 40)).position = 3
    assert not _follows(left)


def test_a_run_that_fails_leaves_the_engine_empty() -> None:
    engine = _engine()

    def stop(index: int, ids: list[int]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run([_request(1), _request(2), _request(3)], stop)
    assert not engine.busy
    assert engine.run([_request(1)])[0].ids == _engine().run([_request(1)])[0].ids


def test_a_run_wants_the_engine_for_itself() -> None:
    engine = _engine()
    engine.add(_request(1))
    with pytest.raises(UserError, match="serving requests already"):
        engine.run([_request(2)])


def test_a_first_token_that_ends_the_request_frees_the_slot() -> None:
    engine = _engine(batch=1)
    for seed in (1, 2):
        engine.add(_request(seed, 1))
    assert [e.result.reason for e in _drain(engine) if e.result] == ["length", "length"]
    assert _stages(engine) == [Stage.PREFILL] * 2


T, D = Stage.PREFILL, Stage.PREFILL_DRAFT


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 ids: other requests may find those of a longer prompt."""
    monkeypatch.setattr(engine_module, "KEY_TILE", 16)


@pytest.mark.usefixtures("shared")
def test_a_first_id_waits_for_no_draft() -> None:
    """The draft's part of all chunks runs in order behind the first id, with the next step; nobody reads it."""
    engine = _apart()
    number = engine.add(_prompt(1))
    events = [engine.step() for _ in range(3)]
    assert [len(some) for some in events] == [0, 0, 1]
    assert _stages(engine) == [T, T, T]
    events.append(engine.step())
    assert _stages(engine) == [T, T, T, D, D, D, Stage.STEP]
    assert [first for _, first in engine.runner.first[:6]] == [0, 16, 32] * 2  # type: ignore[attr-defined]
    assert [key._replace(stage=D) for key in _keys(engine)[:3]] == _keys(engine)[3:6]
    assert _ids([*events[2], *events[3], *_drain(engine)], number) == _engine().run([_prompt(1)])[0].ids


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    ("most", "behind"), [(1, [T, D, Stage.STEP, T, D, Stage.STEP]), (8, [T, Stage.STEP, T, D, D, Stage.STEP])]
)
def test_the_draft_follows_so_many_chunks_while_others_wait_for_their_step(
    monkeypatch: pytest.MonkeyPatch, most: int, behind: list[Stage]
) -> None:
    """A step drafts for those whose prompts have ended, and so waits for their part alone."""
    monkeypatch.setattr(engine_module, "_MOST_OWED", most)
    engine = _apart()
    engine.add(_request(1, 40))
    engine.step()
    engine.add(_prompt(2))
    for _ in range(6):
        engine.step()
    assert _stages(engine) == [T, T, D, D, Stage.STEP, *behind]


@pytest.mark.usefixtures("shared")
def test_a_different_prompt_waits_for_no_draft() -> None:
    """It may have found the blocks of the first one by their ids: its own draft's part runs behind the first one's."""
    engine = _apart()
    numbers = [_place(engine, _prompt(seed)) for seed in (1, 2)]
    slots = [engine.slots.find(number).index for number in numbers]
    engine.prefill(numbers[0], 32)
    engine.prefill(numbers[1], 16)
    engine.prefill(numbers[0], 40)
    assert _stages(engine) == [T] * 4
    while not any(slot.position for slot in engine.slots.seated):
        engine.step()
    engine.launch()
    assert _stages(engine) == [*[T] * 4, *[D] * 4, Stage.STEP]
    order = [(slots[0], 0), (slots[0], 16), (slots[1], 0), (slots[0], 32)]
    assert engine.runner.first[:8] == order * 2  # type: ignore[attr-defined]


@pytest.mark.usefixtures("shared")
def test_the_draft_of_blocks_that_others_may_find_waits_for_no_step_that_drafts() -> None:
    engine = _apart()
    engine.add(Request(_prompt(1).ids, Params(seed=1), 20, k_limit=0))
    for _ in range(4):
        engine.step()
    assert _stages(engine) == [T, T, T, D, D, D, Stage.STEP]


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("lost", [AsyncEngine.cancel, AsyncEngine.preempt], ids=["cancelled", "preempted"])
def test_a_slot_is_left_with_its_draft_filled(lost: Any) -> None:
    """The blocks of its first chunks may be found by their ids."""
    engine = _apart()
    engine.prefill(number := _place(engine, _prompt(1)), 32)
    engine.step()
    assert D not in _stages(engine)
    lost(engine, number)
    engine.prefill(_place(engine, _prompt(2)), 16)
    assert _stages(engine) == [T, T, D, D, T]
    engine.prefill(_place(engine, _prompt(3)), 16)
    assert _stages(engine)[5:] == [T], "nothing is due any more"


@pytest.mark.usefixtures("shared")
def test_the_id_of_a_request_of_one_waits_for_no_draft() -> None:
    """Nor does that of a prompt behind it; the draft's part runs before whatever is next."""
    engine = _apart()
    number = engine.add(_prompt(1, tokens=1))
    events = [event for _ in range(3) for event in engine.step()]
    assert [event.number for event in events if event.result] == [number]
    assert _stages(engine) == [T, T, T]
    engine.add(_request(2))
    engine.step()
    assert _stages(engine)[3:] == [D, D, D, T]


@pytest.mark.usefixtures("shared")
def test_a_last_chunk_has_no_draft_behind_it_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_MOST_OWED", 1)
    engine = _apart(batch=4)
    engine.prefill(_place(engine, _prompt(1, 16)), 16)
    engine.step()
    engine.prefill(_place(engine, _request(2, k_limit=0)), 3)
    engine.prefill(_place(engine, _prompt(3)), 16)
    assert _stages(engine) == [T, T, T, D, D, D], "a chunk that is not the last one, beside one that is ready"
    engine.prefill(_place(engine, _prompt(4, 16)), 16)
    assert _stages(engine)[6:] == [T]


@pytest.mark.usefixtures("shared")
def test_a_slot_that_owes_nothing_leaves_the_draft_of_others() -> None:
    engine = _apart()
    number = _place(engine, _prompt(1, 16))
    engine.prefill(number, 16)
    engine.step()
    engine.launch()
    engine.prefill(_place(engine, _prompt(2)), 40)
    engine.cancel(number)
    engine.prefill(_place(engine, _request(3)), 3)
    assert _stages(engine) == [T, D, Stage.STEP, T, T, T, T]


@pytest.mark.usefixtures("shared")
def test_what_a_failed_request_owes_runs_before_its_blocks_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, cleared = _apart(), list[list[Stage]]()
    run = engine.runner.run
    monkeypatch.setattr(
        engine.runner, "run", lambda key, inputs: run(key, inputs)._replace(accepted=np.array([[NO_ID]]))
    )
    monkeypatch.setattr(engine.runner, "clear", lambda slot, blocks: cleared.append(_stages(engine)))
    engine.add(_prompt(1))
    (event,) = [event for _ in range(3) for event in engine.step()]
    assert event.result
    assert event.result.error
    assert cleared == [[T, T, T, D, D, D]]


def test_the_draft_of_a_prompt_that_nobody_shares_waits_for_a_step_that_drafts() -> None:
    engine = _apart()
    engine.add(_request(1, 40, k_limit=0))
    for _ in range(2):
        engine.step()
    engine.add(_request(2, 40))
    for _ in range(3):
        engine.step()
    assert _stages(engine) == [T, Stage.STEP, T, D, D, Stage.STEP, Stage.STEP]
    first, second = (slot.index for slot in engine.slots.seated)
    assert [slot for slot, position in engine.runner.first if not position] == [first, second] * 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("lost", [AsyncEngine.cancel, AsyncEngine.preempt], ids=["cancelled", "preempted"])
def test_a_prompt_that_nobody_shares_leaves_no_draft_behind(lost: Any) -> None:
    """Its blocks may have other owners next."""
    engine = _apart()
    for seed, leaves in ((1, True), (2, False)):
        number = _place(engine, _request(seed))
        engine.prefill(number, 3)
        engine.step()
        if leaves:
            lost(engine, number)
    engine.step()
    assert _stages(engine) == [T, T, D, Stage.STEP]
    (slot,) = engine.slots.seated
    assert engine.runner.first[2] == (slot.index, 0)  # type: ignore[attr-defined]


def test_prompts_that_ask_share_the_draft_s_graph() -> None:
    engine = _apart()
    engine.add(Request((1, 2, 3), Params(seed=1, logit_bias={5: 1.0}), 2))
    for _ in range(2):
        engine.step()
    assert [(key.stage, key.asking) for key in _keys(engine)][:2] == [(T, True), (D, False)]


@pytest.mark.parametrize("more", [{"speculative": False}, {"step_k": FixedK(0)}], ids=["none", "k 0"])
def test_no_draft_is_filled_where_none_drafts(more: dict[str, Any]) -> None:
    shape = _apart().shape
    engine = AsyncEngine(Synthetic(), shape, **more)
    engine.run([_prompt(1)])
    assert _stages(engine) == [T, T, T, Stage.STEP]


class Timed(BySeated):
    """The k of every step, and of those whose time may be learned from."""

    def __init__(self) -> None:
        super().__init__(K)
        self.times: list[bool] = []

    def ended(self, k: int, bucket: int, seconds: float | None, requests: Sequence[StepResult]) -> None:
        self.times.append(seconds is not None)


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_the_time_of_a_step_behind_a_draft_s_prompt_is_not_its_own(ahead: bool) -> None:
    step_k = Timed()
    engine = _apart(step_k=step_k)
    engine.add(_request(1, 40))
    engine.step()
    for _ in range(2):
        if ahead:
            engine.launch()
            engine.launch_next()
        engine.step()
    assert step_k.times == [False, True]
    while engine.launched:
        engine.step()
    begun = len(step_k.times)
    engine.launch()
    number = _place(engine, _request(2, 40))
    engine.prefill(number, 3)
    # the step that had begun before the prompt, the prompt, and two steps of both
    for _ in range(4):
        engine.step()
    assert step_k.times[begun:] == [True, False, True]


def test_idle_slots_are_neutral_and_the_seated_are_in_their_own() -> None:
    table = SlotTable(3)
    slots = [table.seat(n, Request((7,), Params(0.5 + n, 4, 0.9, 0.1, seed=2**33 + n))) for n in range(2)]
    table.leave(0)
    slots[1].token, slots[1].position = 8, 5
    inputs = table.step_inputs((2,), 16)
    row = slots[1].index
    assert inputs.input_ids[:, 0].tolist() == [8 if i == row else 0 for i in range(3)]
    assert inputs.attention_mask.sum(-1).tolist() == [5 if i == row else 0 for i in range(3)]
    assert inputs.k_limits.tolist() == [2 if i == row else 0 for i in range(3)]
    assert inputs.sampling_params.tolist() == [[4, np.float32(0.9), 1.5] if i == row else [0, 1, 0] for i in range(3)]
    assert inputs.seeds.tolist() == [[1, 2] if i == row else [0, 0] for i in range(3)]
    assert table.seat(5, Request((1,))).index == slots[0].index
    assert not table.full


def test_the_k_of_a_step_follows_its_requests() -> None:
    engine = _engine(4, BySeated(3, 1, 1, 0), (1, 3))
    for seed, tokens in enumerate((4, 12, 40, 60), 1):
        engine.add(_request(seed, tokens))
    seated, ks = list[int](), list[int]()
    for _ in range(4):
        engine.step()
    while engine.busy:
        seated.append(len(engine.slots.seated))
        ks += {event.k for event in engine.step()}
    assert ks == [(3, 1, 1, 0)[n - 1] for n in seated]
    assert {*ks} == {0, 1, 3} == engine.ks()


@pytest.mark.parametrize(
    ("limit", "host", "ks"),
    [(None, False, {0, 3}), (1, False, {0, 1}), (0, False, {0}), (None, True, {0, 1, 3}), (1, True, {0, 1})],
)
def test_the_graphs_that_a_request_may_reach(limit: int | None, host: bool, ks: set[int]) -> None:
    assert _engine(step_k=BySeated(3, 0), ks=(1, 3), host_drafts=host).ks(limit) == ks


def test_a_step_runs_the_smallest_graph_that_holds_its_drafts() -> None:
    engine = _engine(ks=(1, 3, 7))
    assert [engine.config.graph_k(n) for n in range(8)] == [0, 1, 3, 3, 7, 7, 7, 7]
    engine.run([_request(1, 30, k_limit=2), _request(2, 60, k_limit=1)])
    assert sorted({key.k for key in _keys(engine) if not key.is_prefill}) == [1, 3]


def test_a_result_counts_its_steps_by_k() -> None:
    result = Result()
    for k, drafted, accepted in ((3, 3, 2), (1, 1, 0), (3, 2, 2)):
        result.count(k, drafted, accepted)
    assert (result.steps_of_k, result.drafted, result.accepted) == ({3: 2, 1: 1}, [3, 2, 1], [2, 2, 0])


def test_events_count_the_drafts_of_a_step() -> None:
    engine = _engine()
    number = engine.add(_request(1, 40))
    events = [event for event in _drain(engine) if event.number == number]
    (result,) = _engine().run([_request(1, 40)])
    assert sum(event.drafted for event in events) == sum(result.drafted)
    assert sum(event.accepted for event in events) == sum(result.accepted) > 0


@pytest.mark.parametrize("missing", [None, *pjrt.EARLY], ids=str)
def test_a_jax_that_woke_first_is_noticed(missing: str | None) -> None:
    """With more threads a device the time of a step would be another, with other products its bits."""
    setting = {name: value for name, value in pjrt.EARLY.items() if name != missing}
    code = (
        "import jax; jax.devices(); from model.errors import run_cli;"
        "from trnspec.runtime.pjrt import devices_of; run_cli(lambda: devices_of('cpu', 1))"
    )
    ran = subprocess.run([sys.executable, "-c", code], env=setting, capture_output=True, text=True, check=False)
    assert ran.returncode == (2 if missing else 0), ran.stderr
    assert ("before trnspec.runtime.pjrt was imported" in ran.stderr) == bool(missing)
    assert missing is None or f"start the process with {missing}={pjrt.EARLY[missing]}\n" in ran.stderr
