"""The engine's law: a request's tokens and scores are its own, whatever is scheduled, launched ahead or preempted.

On a runner whose tokens are a function of all that a row can see (`tests/engine/machine.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import random
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from model.errors import UserError
from model.graph_key import Stage
from model.logits_processors import MAX_BIASES
from tests.engine.machine import BLOCK, CONFIG, LENGTH, K, Machine, V, graph_keys, score_of
from tests.engine.outer import Outer, ids_ahead
from tests.model.family import DRAFTERS, family_spec
from trnspec.bundle.plan import make_plan
from trnspec.engine import engine as engine_module
from trnspec.engine import masks, slots
from trnspec.engine.adaptive_k import AdaptiveK
from trnspec.engine.async_engine import AsyncEngine
from trnspec.engine.config import EngineConfig, engine_config
from trnspec.engine.engine import Engine, Event
from trnspec.engine.masks import mask_of
from trnspec.engine.request import Params, Request, Result, Score
from trnspec.engine.slots import SlotTable
from trnspec.engine.warmup import graphs_of, prepare_graphs

POOL = CONFIG.pool
HOST = dataclasses.replace(CONFIG, host_drafts=True)


def _engine(runner: Machine | None = None, config: EngineConfig = CONFIG, **more: Any) -> AsyncEngine:
    return AsyncEngine(runner or Machine(config), config, **more)  # type: ignore[arg-type]


def _machine(engine: Engine) -> Machine:
    assert isinstance(engine.runner, Machine)
    return engine.runner


def _request(seed: int, count: int = 9, length: int = 5, **more: Any) -> Request:
    return Request((7,) * length, more.pop("params", Params(0.8, seed=seed)), count, **more)


def _single(request: Request, config: EngineConfig = CONFIG) -> Result:
    """The result of a request that has the engine for itself."""
    return _engine(config=config).run([request])[0]


def _drain(engine: AsyncEngine, ahead: bool = False) -> list[Event]:
    events = []
    while engine.busy:
        if ahead:
            engine.launch()
            engine.launch_next()
        events += engine.step()
    return events


def _ids(events: Sequence[Event], number: int) -> list[int]:
    return [token for event in events if event.number == number for token in event.ids]


def _stages(engine: Engine) -> list[Stage]:
    return [key.stage for key in _machine(engine).keys]


def _grammar(ids: Sequence[int]) -> np.ndarray:
    assert min(ids, default=0) >= 0, "a draft that failed is no id"
    return mask_of(random.Random(f"{list(ids)}").sample(range(V), 12), V)


def _mixed(count: int, seed: int) -> list[Request]:
    """Prompts, many with a common prefix, up to the edges of blocks, with every kind of request."""
    rng = random.Random(seed)
    texts = [tuple(rng.randrange(1, V) for _ in range(LENGTH)) for _ in range(2)]
    kinds: list[dict[str, Any]] = [
        {}, {"params": {"frequency_penalty": 0.5}}, {"prompt_logprobs": 2}, {"allowed": _grammar},
        {"prompt_logprobs": 1}, {"params": {"frequency_penalty": 1.0, "min_tokens": 6}, "logprobs": 0}, {"k_limit": 1},
        {"params": {"bad_words": ((3, 4), (9,))}},
    ]  # fmt: skip
    requests = []
    for n in range(count):
        start = rng.choice(texts)[: rng.choice((1, 60, BLOCK - 1, BLOCK, BLOCK + 1, 200, 2 * BLOCK, 300))]
        more = dict(kinds[n % len(kinds)])
        params = Params(0.9 * (n % 2), seed=n, **more.pop("params", {}))
        ids = (*start, *(rng.randrange(1, V) for _ in range(rng.choice((0, 1, 20)))))
        requests.append(Request(ids, params, rng.randint(7, 60), stop_ids=(5,), **more))
    return requests


# long answers, for which steps are launched ahead, one of them up to the context's end
LONG = [Request((n,) * (100 + 10 * n), Params(0.8, seed=n), 150) for n in range(1, 8)]
LONG.append(Request((9,) * 450, Params(0.8, seed=9), 200))


REQUESTS = [*_mixed(32, 1), *LONG]


@functools.cache
def _expected() -> list[Result]:
    return [_single(request) for request in REQUESTS]


def _facts(outer: Outer) -> list[tuple[Any, ...]]:
    return list(zip(outer.sampled, outer.scores, outer.prompt_scores, strict=True))


def _outer(seed: int = 2, repeated: int = K) -> Outer:
    """A mixed load, then long answers; a last chunk has at least the rows that a parallel draft repeats."""
    config = dataclasses.replace(CONFIG, min_last_chunk=repeated)
    engine = _engine(Machine(strict=True), config, owns_blocks=False)
    return Outer(engine, REQUESTS, POOL, random.Random(seed), preemption=0.03)


@pytest.mark.parametrize("repeated", [0, K])
def test_preemption_prefix_sharing_and_chunks_change_no_token_and_no_score(repeated: int) -> None:
    """With penalties, masks, scores of new tokens and of prompts among the requests; no cached token runs again."""
    outer, expected = _outer(repeated=repeated), _expected()
    assert outer.run() == [result.ids for result in expected]
    assert _facts(outer) == [(result.ids, result.scores, result.prompt_scores) for result in expected]
    assert not outer.over_limit
    assert repeated or _machine(outer.engine).prefilled == outer.scheduled
    assert min(outer.hits, outer.preempted) > 8
    assert len({result.finish_reason for result in expected}) > 1
    assert Stage.VERIFY in _stages(outer.engine)


def test_an_engine_with_blocks_and_steps_ahead() -> None:
    expected = [result.ids for result in _expected()]
    engine = _engine()
    assert [result.ids for result in engine.run(REQUESTS)] == expected
    ids, ahead = ids_ahead(_engine(), REQUESTS)
    assert ids == expected
    assert ahead > 20
    assert sorted(engine._free_blocks) == list(range(1, POOL))


@pytest.mark.parametrize(
    ("k", "options"),
    [
        (K, {"config": HOST}),
        (0, {"config": dataclasses.replace(CONFIG, ks=())}),
        (0, {"speculative": False, "step_k": AdaptiveK([K])}),
        (0, {"speculative": False, "config": HOST}),
    ],
    ids=["of the host", "none", "unused", "of the host, unused"],
)
def test_host_drafts_and_no_drafts_give_the_same_tokens(k: int, options: dict[str, Any]) -> None:
    engine = _engine(**options)
    assert [result.ids for result in engine.run(REQUESTS)] == [result.ids for result in _expected()]
    assert max(key.k for key in _machine(engine).keys if key.stage is Stage.STEP) == k


def test_tokens_are_the_targets_whatever_the_host_proposes() -> None:
    requests, rng = [_request(seed, 40, 5 + seed) for seed in range(6)], random.Random(1)
    expected = [result.ids for result in _engine(speculative=False).run(requests)]
    texts = [(*request.ids, *new) for request, new in zip(requests, expected, strict=True)]

    def right(ids: tuple[int, ...], limit: int) -> list[int]:
        return list(next(text for text in texts if text[: len(ids)] == ids)[len(ids) :][:limit])

    def wrong(ids: tuple[int, ...], limit: int) -> list[int]:
        return [rng.randrange(V) for _ in range(rng.randint(0, limit))]

    engines = [_engine(config=HOST, propose=propose) for propose in (right, wrong)]
    known, wild = (engine.run(requests) for engine in engines)
    assert [result.ids for result in known] == [result.ids for result in wild] == expected
    assert {result.steps for result in known} == {10}, "a draft that knows the tokens is never refused"
    ks = {key.k for key in _machine(engines[1]).keys if key.stage is Stage.STEP}
    assert ks == {0, 1, 3}, "the smallest graph that holds the drafts"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_machine_has_the_graphs_of_a_bundle(family: Path, drafter: str) -> None:
    bundle: Any = SimpleNamespace(spec=family_spec(family, drafter, max_len=512).bundle)
    config = engine_config(bundle)
    assert {*graph_keys(config)} == {*make_plan(bundle.spec).by_key}
    assert config.min_last_chunk == (K if drafter == "parallel" else 0)


# name -> the function, and the change of its source
FAULTS: dict[str, tuple[Any, str, str, str]] = {
    "counts forgotten after preemption": (slots, "prompt_inputs", "np.bincount(slot.result.ids,", "np.bincount([],"),
    "sampled tokens scored as a prompt's": (Engine, "_prefilled", "slot.known == len(request.ids)", "True"),
    "a chunk's repeated rows scored": (Engine, "_prefilled", "len(result.prompt_scores) - chunk.first", "0"),
    "a block table for good": (SlotTable, "_other_inputs", '{bucket}", blocks', '{bucket}", len(blocks)'),
    "sampling parameters for good": (SlotTable, "_other_inputs", "(slot.index, slot.number)", "slot.index"),
    "blocks for one step": (AsyncEngine, "launch_next", "self._has_blocks(batch, 2)", "self._has_blocks(batch, 1)"),
    "a chunk one token late": (Engine, "_next_chunk", "slot.cached = chunk.end", "slot.cached = chunk.end + 1"),
    "no tokens from before": (AsyncEngine, "admit", "ids=list(ids)", ""),
    "a prompt's last token again": (slots, "prompt_inputs", "chunk.end == slot.known", "False"),
    "positions not moved": (Engine, "_postprocess", "slot.position += len(ids)", "slot.position += 1"),
    "masks of the first row": (masks, "masks_of_rows", "masks[:rows]", "masks[:1]"),
    "a limit ignored": (Engine, "_limits", "min(k, limit,", "min(k,"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one changes a token, a score or a count, or breaks a rule of the device."""
    expected = _expected()
    home, name, right, wrong = FAULTS[fault]
    function = getattr(home, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(right) == 1
    scope = function.__globals__
    exec(source.replace(right, wrong), scope, made := dict[str, Any]())
    for module in (home, engine_module, slots):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, made[name])

    def is_seen(seed: int) -> bool:
        outer = _outer(seed)
        try:
            outer.run()
        except (AssertionError, ValueError, IndexError, KeyError):
            return True
        return _facts(outer) != [(r.ids, r.scores, r.prompt_scores) for r in expected] or outer.over_limit

    assert any(map(is_seen, range(4)))


def test_scores_are_the_device_s_with_as_many_of_the_best_as_the_request_wants() -> None:
    request = _request(1, logprobs=2, prompt_logprobs=2)
    result = _single(request)
    ids, scores = [*request.ids, *result.ids], [*result.prompt_scores, *result.scores]
    for place, score in enumerate(scores, 1):
        logprob, rank, first, *_ = score_of(ids[:place], ids[place]).tolist()
        assert score == Score(logprob, int(rank), ((0, first), (1, -math.inf)))
    assert len(scores) == len(ids) - 1


def test_a_prompt_goes_first_and_a_step_runs_between_chunks() -> None:
    engine = _engine()
    engine.add(_request(1, 30))
    engine.step()
    engine.add(_request(2, length=400))
    for _ in range(5):
        engine.step()
    p, s = Stage.PREFILL, Stage.STEP
    assert _stages(engine) == [p, p, s, p, s, s]


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["waiting", "after its prompt", "after two steps"])
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_a_cancelled_request_has_no_more_events(steps: int, ahead: bool) -> None:
    engine = _engine(config=dataclasses.replace(CONFIG, pool=5))
    gone, left = engine.add(_request(1, 400)), engine.add(_request(2))
    for _ in range(steps):
        engine.step()
        if ahead:
            engine.launch()
            engine.launch_next()
    engine.cancel(gone)
    assert not engine.launched, "the other one waits for its blocks"
    events = _drain(engine)
    assert {event.number for event in events} == {left}
    assert _ids(events, left) == _single(_request(2)).ids
    assert not engine.slots.active
    assert len(engine._free_blocks) == 4


def test_launched_steps_are_read_for_those_who_stay() -> None:
    engine = _engine()
    early, gone = engine.add(_request(1, 40)), engine.add(_request(2, 40))
    events = engine.step() + engine.step()
    engine.launch()
    engine.launch_next()
    ran = len(_machine(engine).keys)
    engine.cancel(gone)
    events += engine.step() + engine.step()
    assert len(_machine(engine).keys) == ran, "nothing is run again"
    assert _ids(events + _drain(engine), early) == _single(_request(1, 40)).ids


def _running(count: int = 40, length: int = 5, **more: Any) -> AsyncEngine:
    """An engine with a launched step of one request."""
    engine = _engine(**more)
    engine.add(_request(1, count, length))
    engine.step()
    if engine.slots.active[0].prefilling:
        engine.step()
    engine.launch()
    return engine


def _follows(engine: AsyncEngine) -> bool:
    before = len(_machine(engine).keys)
    engine.launch_next()
    return len(_machine(engine).keys) > before


# the step that runs writes K + 1 rows, and so does the next one; the first bucket has 128 positions, and limits of the
# second step are the first one's, while the last position is max_len - 1; one token is there before the step that runs
@pytest.mark.parametrize(
    ("more", "follows"),
    [
        *(
            ({"length": end - 2 * (K + 1)}, end in (BLOCK, LENGTH - 1))
            for end in (BLOCK, BLOCK + 1, LENGTH - 1, LENGTH)
        ),
        *(({"count": count}, count == K + 3) for count in (K + 2, K + 3)),
        ({"config": HOST}, False),
    ],
    ids=str,
)
def test_one_step_is_launched_ahead_where_no_result_can_change_it(more: dict[str, Any], follows: bool) -> None:
    engine = _running(**more)
    assert [_follows(engine), _follows(engine)] == [follows, False]


def test_no_step_is_launched_ahead_of_others_who_come_or_of_another_k() -> None:
    waiting, joined, read, chosen = _running(), _running(), _running(), AdaptiveK([1])
    waiting.add(_request(2))
    joined.slots.allocate(9, _request(2)).position = 3
    read.step()
    changed = _running(step_k=chosen)
    chosen.current = K
    assert not any(map(_follows, (waiting, joined, read, changed, _engine())))


@pytest.mark.parametrize(
    ("length", "launched", "ahead"), [(125, False, False), (124, True, False), (121, True, False), (120, True, True)]
)
def test_a_step_is_launched_if_all_its_rows_have_blocks(length: int, launched: bool, ahead: bool) -> None:
    """One block has the rows of a step from position 124 at most, and of two from 120."""
    config = dataclasses.replace(CONFIG, buckets=(LENGTH,))
    engine = _engine(config=config, owns_blocks=False)
    engine.prefill(engine.admit(_request(1, 40, length), blocks=(1,)), length)
    engine.step()
    engine.launch()
    assert (engine.launched is not None) == launched
    assert _follows(engine) == ahead


def test_with_a_grammar_a_step_is_launched_when_its_masks_are_there() -> None:
    engine = _engine()
    engine.add(_request(1, 30, allowed=_grammar))
    engine.step()
    engine.launch()
    assert not engine.launched
    engine.launch(masks=True)
    assert engine.launched
    assert _stages(engine)[1:] == [Stage.DRAFT, Stage.VERIFY]
    assert not _follows(engine)


def test_a_grammar_is_called_once_for_a_prompt_of_several_chunks() -> None:
    """vLLM's mask of the next token is there for one call."""
    calls, engine = list[list[int]](), _engine()

    def allowed(ids: Sequence[int]) -> np.ndarray:
        calls.append(list(ids))
        return _grammar(ids)

    engine.add(_request(1, length=400, allowed=allowed))
    engine.step()
    engine.step()
    assert (len(_machine(engine).keys), calls) == (2, [[]])


@pytest.mark.parametrize("config", [CONFIG, HOST], ids=["of the draft", "of the host"])
def test_ids_that_masks_force_are_proposed_and_accepted(config: EngineConfig) -> None:
    """The drafts of the others are wrong, or there are none."""
    engine = _engine(Machine(config, chance=0.0), config, propose=lambda ids, limit: [])
    request = _request(1, 21, allowed=lambda ids: mask_of([(11 * len(ids)) % 50 + 8], V))
    (result,) = engine.run([request])
    # the first token is the prefill's, and five steps emit four each
    assert (result.steps, result.accepted) == (5, [5, 5, 5])


def test_where_no_mask_is_known_after_a_draft_a_step_emits_one_token() -> None:
    """As long as a grammar is not compiled, vLLM gives the mask of the next token only."""
    engine, request = _engine(Machine(chance=1.0)), _request(1, 12, allowed=_grammar)

    def next_only(ids: Sequence[int]) -> np.ndarray | None:
        return _grammar(ids) if list(ids) == engine.slots.active[0].result.ids else None

    (result,) = engine.run([dataclasses.replace(request, allowed=next_only)])
    assert (result.ids, result.steps) == (_single(request).ids, 11)


ENDS: dict[str, dict[str, Any]] = {
    "length": {"count": 6},
    "eos": {"count": 90, "stop_ids": tuple(range(0, V, 7))},
    "stop": {"count": 40, "cut": lambda ids: 5 if len(ids) > 6 else None},
    "context": {"count": 500, "length": LENGTH - 9},
}


@pytest.mark.parametrize("reason", ENDS)
def test_a_request_ends_inside_of_a_step_with_as_many_scores_as_tokens(reason: str) -> None:
    inside = 0
    for seed in range(12):
        engine = _engine(Machine(chance=0.9))
        number = engine.add(_request(seed, **ENDS[reason], logprobs=0))
        events = _drain(engine)
        result = next(event.result for event in events if event.result)
        assert result.finish_reason == reason
        assert [score.rank - 1 for score in result.scores] == result.ids
        assert result.ids == _ids(events, number) or reason == "stop"
        assert all(len(event.scores) == len(event.ids) for event in events)
        inside += events[-1].accepted + 1 > len(events[-1].ids)
        for count in ("drafted", "accepted"):
            assert sum(getattr(event, count) for event in events) == sum(getattr(result, count))
        assert reason != "context" or len(result.ids) == 9
    assert inside > 3 or reason == "context"


def test_a_run_that_fails_leaves_the_engine_empty() -> None:
    engine = _engine()

    def stop(ids: Sequence[int]) -> int | None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run([_request(seed, cut=stop) for seed in range(5)])
    assert not engine.busy
    engine.add(_request(1))
    with pytest.raises(UserError, match="serving requests already"):
        engine.run([_request(2)])


class RoundRobin:
    """The k of a list in turn; what was reported of each step."""

    def __init__(self, *ks: int) -> None:
        self.ks, self.reports = ks, list[tuple[int, float | None, Sequence[tuple[int, int]]]]()

    def choose(self) -> int:
        return self.ks[len(self.reports) % len(self.ks)]

    def ended(self, *report: Any) -> None:
        self.reports.append(report)


def test_any_k_of_a_step_gives_the_same_tokens_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its time and the host's part before it; a full-sampling step of perhaps two graphs has none."""
    now, step, step_k = [0.0], Machine._step, RoundRobin(3, 0, 1, 1, 3)

    def timed(self: Machine, key: Any, inputs: Any) -> Any:
        now[0] += 1
        return step(self, key, inputs)

    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Machine, "_step", timed)
    engine = _engine(step_k=step_k)
    numbers, ended = [engine.add(request) for request in REQUESTS], dict[int, Result]()
    while engine.busy:
        ended |= {event.number: event.result for event in engine.step() if event.result}
        now[0] += 0.25
    results = [ended[number] for number in numbers]
    assert [result.ids for result in results] == [result.ids for result in _expected()]
    keys = [key for key in _machine(engine).keys if key.stage in (Stage.STEP, Stage.VERIFY)]
    assert {key.k for key in keys if key.stage is Stage.STEP} == {0, 1, 3} == engine.ks()
    assert [r[:2] for r in step_k.reports] == [(key.k, None if key.full_sampling else 1.25) for key in keys]
    reported = [result for *_, results in step_k.reports for result in results]
    for counts, name in zip(zip(*reported, strict=True), ("drafted", "accepted"), strict=True):
        assert sum(counts) == sum(sum(getattr(r, name)) for r in results)


def test_unused_slots_are_neutral_and_unchanged_inputs_are_the_same_arrays() -> None:
    """A temperature below 0.01 is 0.01, as in vLLM."""
    table, penalties = SlotTable(3), {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5}
    params = [Params(0.001, 4, 0.9, 0.1, 2**33 + n, logit_bias={7: 2.0, 9: -3.0}, **penalties) for n in range(2)]
    two = [table.allocate(n, _request(0, params=p, allowed=_grammar)) for n, p in enumerate(params)]
    table.free(0)
    two[1].token, two[1].position, two[1].blocks = 8, 5, (3,)
    inputs, row = table.step_inputs((2,), BLOCK), two[1].index
    none = [0] * (MAX_BIASES - 2)
    for name, used, unused in (
        ("input_ids", [8], [0]), ("positions", 5, 0), ("k_limits", 2, 0), ("block_table", [3], [0]),
        ("seeds", [1, 2], [0, 0]),
        ("sampling_params", [4, np.float32(0.9), np.float32(0.01)], [0, 1, 0]), ("min_p", np.float32(0.1), 0),
        ("penalties", [0.5, -0.5, 1.5, 1], [0, 0, 1, 0]), ("bias", [2, -3, *none], [0, 0, *none]),
        ("bias_ids", [7, 9, *(-1 for _ in none)], [-1] * MAX_BIASES),
    ):  # fmt: skip
        assert getattr(inputs, name).tolist() == [used if i == row else unused for i in range(3)], name
    again = table.step_inputs((2,), BLOCK)
    assert all(getattr(again, n) is getattr(inputs, n) for n in ("sampling_params", "block_table"))
    two[1].blocks += (7,)
    assert table.step_inputs((2,), 2 * BLOCK).block_table[row].tolist() == [3, 7]
    assert table.step_inputs((1,), BLOCK).k_limits[row] == 1
    assert table.allocate(5, _request(1)).index == two[0].index


@pytest.mark.parametrize("values", [*itertools.product((0.0, 0.5), (0, 3), (1.0, 0.9), (0.0, 0.1))], ids=str)
def test_a_request_filters_where_the_graph_of_its_step_does(values: tuple[Any, ...]) -> None:
    table, params = SlotTable(1), Params(*values)
    table.allocate(0, _request(0, params=params)).position = 5
    assert table.step_inputs((0,), BLOCK).graph(Stage.STEP, 0, BLOCK).filters == params.filters


FILTERED = Params(0.9, top_k=5)


@pytest.mark.parametrize(
    "more",
    [{}, {"logprobs": 0}, {"k_limit": 1}, {"count": 500}, {"length": 300}, {"params": FILTERED, "count": 200}],
    ids=str,
)
@pytest.mark.parametrize("config", [CONFIG, HOST], ids=["of the draft", "of the host"])
def test_what_a_request_runs_is_prepared(config: EngineConfig, more: dict[str, Any]) -> None:
    runner, prepared = Machine(config), list[tuple[Any, bool]]()
    runner.prepare = lambda key, warm: prepared.append((key, warm))  # type: ignore[attr-defined]
    engine, request = _engine(runner, config), _request(1, **more)
    prepare_graphs(engine, [*graphs_of(engine, request)] * 2)
    keys = [key for key, _ in prepared]
    assert keys == list(graphs_of(engine, request))
    assert all(warm for _, warm in prepared)
    engine.run([request])
    assert {*runner.keys} <= {*keys}
    assert {key.full_sampling for key in keys if not key.is_prefill} == {request.full_sampling}
    assert {key.filters for key in keys if key.stage is Stage.STEP} <= {request.params.filters}
    engine.add(request)
    prepare_graphs(engine, graphs_of(engine, request))
    assert not prepared[-1][1], "a graph that runs on zeros would write to active slots"


def test_sizes_are_the_smallest_that_fit_and_the_largest_beyond() -> None:
    assert [CONFIG.blocks(length) for length in (1, 128, 129, 600)] == [1, 1, 2, 4]
    assert [CONFIG.bucket(length) for length in (1, 128, 129, 600)] == [128, 128, 512, 512]
    assert [CONFIG.graph_k(drafts) for drafts in range(4)] == [0, 1, 3, 3]
    assert [CONFIG.graph_k(drafts, full_sampling=True) for drafts in range(4)] == [3] * 4


@pytest.mark.parametrize("sizes", [(128,), (128, 512, 2048), (128, 256)])
def test_chunks_cover_a_prompt_and_fill_half_of_their_rows(sizes: tuple[int, ...]) -> None:
    config = dataclasses.replace(CONFIG, max_len=4096, prompts=tuple((r, k) for r in sizes for k in (r, 4096)))
    for length in (1, 127, 128, 129, 300, 700, 1023, 1024, 1025, 3000, 4095):
        chunks = list(config.chunks(length))
        assert [c.first for c in chunks] == [0, *(c.end for c in chunks[:-1])]
        assert chunks[-1].end == length
        assert all(2 * c.size >= c.rows or c.rows == sizes[0] for c in chunks)
        assert all((c.rows, c.keys) in config.prompts and c.keys >= c.end for c in chunks)
