"""The engine's loop and slot table on a runner that computes nothing: slots, events, cancellation, launch-ahead."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from model.errors import UserError
from model.graph_key import GraphKey, Stage
from model.logits_processors import PROMPT_FLAG
from model.sampling import NO_ID
from tests.engine.ahead import ids_ahead
from tests.engine.synthetic_load import Synthetic, token_of
from trnspec.engine.adaptive_k import FixedK
from trnspec.engine.async_engine import AsyncEngine
from trnspec.engine.config import EngineConfig
from trnspec.engine.engine import Event
from trnspec.engine.request import Params, Request, Result
from trnspec.engine.slots import SlotTable

K, BATCH, MAX_LEN, BLOCK = 3, 2, 512, 128
PROMPTS = ((128, 128), (128, 512), (256, 256), (256, 512))
CONFIG = EngineConfig((K,), BATCH, MAX_LEN, (128, MAX_LEN), 1000, 1 + BATCH * 4, PROMPTS)


class ChosenK(FixedK):
    """A k that a test sets."""

    def __init__(self, k: int, *others: int) -> None:
        super().__init__(k)
        self.chosen, self.ks = k, (k, *others)  # type: ignore[assignment]

    def choose(self) -> int:
        return self.chosen


def _engine(owns_blocks: bool = True, step_k: Any = None, speculative: bool = True, **changes: Any) -> AsyncEngine:
    config = dataclasses.replace(CONFIG, **changes)
    return AsyncEngine(Synthetic(), config, speculative, step_k, owns_blocks=owns_blocks)  # type: ignore[arg-type]


def _keys(engine: AsyncEngine) -> list[GraphKey]:
    keys: list[GraphKey] = engine.runner.keys  # type: ignore[attr-defined]
    return keys


def _stages(engine: AsyncEngine) -> list[Stage]:
    return [key.stage for key in _keys(engine)]


def _request(seed: int, tokens: int = 9, prompt: int = 3, **more: Any) -> Request:
    return Request((1,) * prompt, Params(seed=seed), tokens, **more)


def _drain(engine: AsyncEngine) -> list[Event]:
    events = []
    while engine.busy:
        events += engine.step()
    return events


def _ids(events: list[Event], number: int) -> list[int]:
    return [i for e in events if e.number == number for i in e.ids]


def _expected(seed: int, tokens: int, prompt: int = 3) -> list[int]:
    return [token_of(seed, position) for position in range(prompt, prompt + tokens)]


def test_events_add_up_to_the_results() -> None:
    engine = _engine()
    numbers = [engine.add(_request(seed, 5 + seed)) for seed in range(1, 6)]
    events = _drain(engine)
    assert [_ids(events, n) for n in numbers] == [_expected(seed, 5 + seed) for seed in range(1, 6)]
    ended = [e for e in events if e.result]
    assert sorted(e.number for e in ended) == numbers
    assert all(e.result and e.result.ids == _ids(events, e.number) for e in ended)
    assert engine.step() == []


def test_a_step_runs_one_graph_and_prompts_go_first() -> None:
    engine = _engine()
    for seed in (1, 2, 3):
        engine.add(_request(seed))
    assert [len(engine.step()) for _ in range(3)] == [1, 1, 2]
    # the third request has no slot yet
    assert _stages(engine) == [Stage.PREFILL, Stage.PREFILL, Stage.STEP]


def test_between_the_chunks_of_a_prompt_others_decode() -> None:
    engine = _engine()
    engine.add(_request(1, 30))
    engine.step()
    engine.add(_request(2, 9, prompt=400))
    for _ in range(4):
        engine.step()
    assert _stages(engine) == [Stage.PREFILL] * 2 + [Stage.STEP, Stage.PREFILL, Stage.STEP]
    assert [(key.rows, key.bucket) for key in _keys(engine) if key.is_prefill] == [(128, 128), (256, 256), (256, 512)]


@pytest.mark.parametrize(
    ("length", "chunks"),
    [
        (3, [(3, 128, 128)]),
        (128, [(128, 128, 128)]),
        (129, [(129, 256, 256)]),
        (300, [(256, 256, 256), (44, 128, 512)]),
        (511, [(256, 256, 256), (255, 256, 512)]),
    ],
)
def test_chunks_take_the_smallest_graph_that_they_fill(length: int, chunks: list[tuple[int, ...]]) -> None:
    assert [(c.size, c.rows, c.keys) for c in CONFIG.chunks(length)] == chunks


def test_the_last_chunk_has_the_rows_of_a_drafter_s_state() -> None:
    config = dataclasses.replace(CONFIG, min_last_chunk=7)
    assert [(c.first, c.size) for c in config.chunks(258)] == [(0, 256), (251, 7)]


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["waiting", "after its prompt", "after two steps"])
def test_a_cancelled_request_has_no_more_events(steps: int) -> None:
    engine = _engine(batch=1)
    gone, left = engine.add(_request(1, 50)), engine.add(_request(2))
    for _ in range(steps):
        engine.step()
    engine.cancel(gone)
    events = _drain(engine)
    assert {e.number for e in events} == {left}
    assert _ids(events, left) == _expected(2, 9)
    assert not engine.slots.active
    assert not engine.slots.full


def test_steps_that_are_launched_ahead_change_no_token() -> None:
    """More requests than slots, of different lengths: one that ends in a step is in the next too, without events."""
    requests = [_request(seed, 6 + 5 * seed) for seed in range(1, 6)]
    ids, ahead = ids_ahead(_engine(), requests)
    assert ids == [_expected(seed, 6 + 5 * seed) for seed in range(1, 6)]
    assert ahead > 9


def test_a_slot_of_a_cancelled_request_is_used_while_its_step_runs() -> None:
    engine, events = _engine(), list[Event]()
    early, gone = engine.add(_request(1, 30)), engine.add(_request(2, 30))
    events += [*engine.step(), *engine.step()]
    for _ in range(3):
        events += engine.step()
        engine.launch()
    engine.cancel(gone)
    count, late = len(_ids(events, gone)), engine.add(_request(3, 12))
    while engine.busy:
        events += engine.step()
        engine.launch()
    assert len(_ids(events, gone)) == count > 0
    assert (_ids(events, early), _ids(events, late)) == (_expected(1, 30), _expected(3, 12))


def test_launched_work_without_requests_is_dropped() -> None:
    engine = _engine()
    gone = engine.add(_request(1, 30))
    engine.step()
    engine.launch()
    engine.cancel(gone)
    assert not engine.launched
    left = engine.add(_request(2))
    assert {e.number for e in _drain(engine)} == {left}


def test_prompts_are_launched_after_the_running_step() -> None:
    engine = _engine(batch=3, owns_blocks=False)
    numbers = [engine.admit(_request(1, 30), [1])]
    engine.prefill(numbers[0], 3)
    events = engine.step()
    engine.launch()
    for seed in (2, 3):
        numbers.append(engine.admit(_request(seed, 9), [seed]))
        engine.prefill(numbers[-1], 3)
    read = [engine.step() for _ in range(3)]
    assert [[e.number for e in some] for some in read] == [[n] for n in numbers]
    events += [*itertools.chain(*read), *_drain(engine)]
    for seed, number in enumerate(numbers, 1):
        assert _ids(events, number) == _expected(seed, 30 if seed == 1 else 9)


def test_a_preempted_request_goes_on_as_if_nothing_had_happened() -> None:
    """Limit and penalties count what it sampled before; its prompt's log-probabilities are not repeated."""
    request = Request((5, 6, 7), Params(seed=1, presence_penalty=0.5), 30, prompt_logprobs=0)
    engine, sampled = _engine(owns_blocks=False), list[int]()
    with_scores = engine.runner.run

    def run(key: GraphKey, inputs: Any) -> Any:
        outputs = with_scores(key, inputs)
        rows = key.rows if key.is_prefill else key.k + 1
        return outputs._replace(scores=np.zeros((len(outputs.accepted_tokens), rows, 42)))

    engine.runner.run = run  # type: ignore[method-assign]
    for _ in range(4):
        number = engine.admit(request, [1], ids=sampled)
        engine.prefill(number, 3 + len(sampled))
        counts_V = engine.runner.inputs[-1].prompt_token_counts[0]  # type: ignore[attr-defined]
        assert counts_V[[5, 6, 7]].tolist() == [PROMPT_FLAG + sampled.count(i) for i in (5, 6, 7)]
        assert all(counts_V[i] % PROMPT_FLAG == sampled.count(i) for i in sampled)
        first, after = engine.step(), engine.step()
        assert len(first[0].prompt_scores) == (0 if sampled else 2)
        assert engine.preempt(number) == [*sampled, *_ids(first + after, number)]
        sampled += _ids(first + after, number)
    number = engine.admit(request, [1], ids=sampled)
    engine.prefill(number, 3 + len(sampled))
    events = _drain(engine)
    result = events[-1].result
    assert result
    assert (result.reason, result.ids) == ("length", _expected(1, 30))


def test_a_masked_step_is_launched_when_the_masks_are_there() -> None:
    engine = _engine(owns_blocks=False)
    masked = _request(1, 30, allowed=lambda ids: np.full(32, -1, np.int32))
    engine.prefill(engine.admit(masked, [1]), 3)
    engine.step()
    engine.launch()
    assert not engine.launched
    engine.launch(masks=True)
    assert engine.launched
    assert _stages(engine)[1:] == [Stage.DRAFT, Stage.VERIFY]
    assert all(key.asking for key in _keys(engine))
    # the masks of the step after it depend on the tokens that it emits
    assert not _launches_next(engine)


def _running(tokens: int = 40, positions: int = 3, blocks: int = 4, **more: Any) -> AsyncEngine:
    """An engine with a launched step of one request."""
    engine = _engine(owns_blocks=False, **more)
    engine.prefill(engine.admit(_request(1, tokens, positions), range(1, 1 + blocks)), positions)
    while not engine.slots.decoding:
        engine.step()
    engine.launch()
    return engine


def _launches_next(engine: AsyncEngine) -> bool:
    before = len(_keys(engine))
    engine.launch_next()
    return len(_keys(engine)) > before


def test_one_step_is_launched_ahead_and_no_more() -> None:
    engine = _running()
    assert _launches_next(engine)
    assert not _launches_next(engine)
    engine.step()
    engine.step()
    assert not _launches_next(engine), "no step runs"


# each step writes K + 1 rows; the first bucket has 128
@pytest.mark.parametrize(("positions", "launches"), [(128 - 2 * (K + 1), True), (129 - 2 * (K + 1), False)])
def test_no_step_is_launched_ahead_into_another_bucket(positions: int, launches: bool) -> None:
    assert _launches_next(_running(positions=positions)) == launches


def test_no_step_is_launched_without_blocks_for_its_rows() -> None:
    """Rows past a block that the request does not have would be lost."""
    assert _running(positions=BLOCK - K - 1, blocks=1).launched
    assert not _running(positions=BLOCK - K, blocks=1).launched
    for positions, launches in ((BLOCK - 2 * (K + 1), True), (BLOCK - 2 * (K + 1) + 1, False)):
        assert _launches_next(_running(positions=positions, blocks=1, buckets=(MAX_LEN,))) == launches


def test_added_blocks_are_in_the_next_step_s_table() -> None:
    engine = _running(positions=BLOCK - K, blocks=1)
    engine.add_blocks(0, [7])
    engine.launch()
    slot = engine.slots.get(0)
    assert slot
    assert engine.runner.inputs[-1].block_table[slot.index].tolist() == [1, 7, 0, 0]  # type: ignore[attr-defined]


def test_a_step_is_launched_ahead_with_the_k_of_the_one_that_runs() -> None:
    step_k = ChosenK(1, 3)
    engine = _running(step_k=step_k, ks=(1, 3))
    assert _launches_next(engine)
    assert [key.k for key in _keys(engine)[1:]] == [1, 1]
    engine = _running(step_k=step_k, ks=(1, 3))
    step_k.chosen = 3
    assert not _launches_next(engine)


# one token is there before the running step
@pytest.mark.parametrize(("tokens", "launches"), [(K + 2, False), (K + 3, True)])
def test_no_step_is_launched_after_one_that_may_be_the_last(tokens: int, launches: bool) -> None:
    assert _launches_next(_running(tokens)) == launches


def test_no_step_is_launched_ahead_with_host_drafts_or_other_requests() -> None:
    assert not _launches_next(_running(host_drafts=True))
    left = _running()
    left.slots.allocate(9, _request(2, 40), None, [1]).position = 3
    assert not _launches_next(left)


@pytest.mark.parametrize(("position", "limits"), [(3, K), (MAX_LEN - 4, 2), (MAX_LEN - 2, 0)])
def test_drafts_stop_before_max_len(position: int, limits: int) -> None:
    """A step emits one token more than it accepts drafts; the last position is max_len - 1."""
    engine = _engine(owns_blocks=False)
    engine.slots.allocate(0, _request(1), None, [1]).position = position
    engine.launch(masks=True)
    batch = engine._schedule_step()
    assert batch
    assert (batch.limits, batch.k) == ((limits,), K if limits else 0)


def test_a_request_at_max_len_ends_with_its_context() -> None:
    (result,) = _engine().run([_request(1, 600, prompt=500)])
    assert (result.reason, result.ids) == ("context", _expected(1, MAX_LEN - 500, 500))


def test_a_run_that_fails_leaves_the_engine_empty() -> None:
    engine = _engine()

    def stop(index: int, ids: list[int]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run([_request(1), _request(2), _request(3)], stop)
    assert not engine.busy
    assert engine.run([_request(1)])[0].ids == _expected(1, 9)
    engine.add(_request(1))
    with pytest.raises(UserError, match="serving requests already"):
        engine.run([_request(2)])


def test_a_first_token_that_ends_the_request_frees_the_slot() -> None:
    engine = _engine(batch=1)
    for seed in (1, 2):
        engine.add(_request(seed, 1))
    assert [e.result.reason for e in _drain(engine) if e.result] == ["length", "length"]
    assert _stages(engine) == [Stage.PREFILL] * 2


def test_logits_without_a_sample_end_their_request_and_its_blocks_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine()
    run = engine.runner.run
    monkeypatch.setattr(
        engine.runner, "run", lambda key, inputs: run(key, inputs)._replace(accepted_tokens=np.array([[NO_ID]]))
    )
    engine.add(_request(1))
    (event,) = engine.step()
    assert event.result
    assert (event.result.reason, event.ids) == ("error", [])
    assert "NaN or infinity" in event.result.error
    ((slot, blocks),) = engine.runner.cleared  # type: ignore[attr-defined]
    assert (slot, len(blocks)) == (0, 1)


def test_idle_slots_are_neutral_and_active_ones_are_in_their_rows() -> None:
    table = SlotTable(3)
    requests = [Request((7,), Params(0.5 + n, 4, 0.9, 0.1, seed=2**33 + n)) for n in range(2)]
    slots = [table.allocate(n, request, None, [n + 1]) for n, request in enumerate(requests)]
    table.free(0)
    slots[1].token, slots[1].position = 8, 5
    inputs = table.step_inputs((2,), 128)
    row = slots[1].index

    def rows(active: Any, idle: Any) -> list[Any]:
        return [active if i == row else idle for i in range(3)]

    assert inputs.input_ids[:, 0].tolist() == rows(8, 0)
    assert inputs.positions.tolist() == rows(5, 0)
    assert inputs.block_table.tolist() == rows([2], [0])
    assert inputs.k_limits.tolist() == rows(2, 0)
    assert inputs.sampling_params.tolist() == rows([4, np.float32(0.9), 1.5], [0, 1, 0])
    assert inputs.seeds.tolist() == rows([1, 2], [0, 0])
    assert table.allocate(5, Request((1,))).index == slots[0].index


@pytest.mark.parametrize(
    ("limit", "host", "to_end", "ks"),
    [
        (None, False, False, {0, 3}),
        (1, False, False, {0, 1}),
        (0, False, False, {0}),
        (None, True, False, {0, 1, 3}),
        (1, True, False, {0, 1}),
        (None, False, True, {0, 1, 3}),
    ],
)
def test_the_graphs_that_a_request_may_need(limit: int | None, host: bool, to_end: bool, ks: set[int]) -> None:
    assert _engine(step_k=ChosenK(3, 0), ks=(1, 3), host_drafts=host).ks(limit, to_end=to_end) == ks


def test_a_step_runs_the_smallest_graph_that_holds_its_drafts() -> None:
    engine = _engine(ks=(1, 3, 7))
    assert [engine.config.graph_k(n) for n in range(8)] == [0, 1, 3, 3, 7, 7, 7, 7]
    engine.run([_request(1, 30, k_limit=2), _request(2, 60, k_limit=1)])
    assert sorted({key.k for key in _keys(engine) if not key.is_prefill}) == [1, 3]
    assert {key.k for key in _keys(_ran(speculative=False)) if not key.is_prefill} == {0}


def _ran(**more: Any) -> AsyncEngine:
    engine = _engine(**more)
    engine.run([_request(1)])
    return engine


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
