"""The worker's and the scheduler's bookkeeping: a request that fails ends by itself, the others go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.serve.server import NO_VLLM
from trnspec.engine.engine import Event
from trnspec.engine.request import Result

pytest.importorskip("vllm", reason=NO_VLLM)
from prometheus_client import generate_latest
from vllm.v1.core.sched.scheduler import Scheduler

from serve.metrics import Metrics
from serve.scheduler import BundleScheduler, StepOutput
from serve.worker import BundleWorker


@pytest.fixture
def worker() -> Any:
    """A worker of three running requests, and an engine that records which were cancelled."""
    made = BundleWorker.__new__(BundleWorker)
    cancelled = list[int]()
    made.engine = SimpleNamespace(  # type: ignore[assignment]
        cancel=cancelled.append, cancelled=cancelled, speculative=True, launched=True, launched_batch=None
    )
    made.config = SimpleNamespace(k=3)  # type: ignore[assignment]
    made.numbers, made.masked = {"a": 0, "b": 1, "c": 2}, {}
    made.requests, made.preempted = dict.fromkeys("abc", ((1,), None)), {}
    return made


def _step(*names: str) -> Any:
    return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 4), scheduled_new_reqs=[])


def test_an_event_with_an_error_ends_its_request_only(worker: Any, capsys: pytest.CaptureFixture[str]) -> None:
    events = {0: Event(0, [5, 6]), 1: Event(1, [7], Result(reason="error", error="its logits are no numbers"))}
    output = worker._output(_step("a", "b", "c"), events)
    assert output.sampled_token_ids == [[5, 6], [], []]
    assert output.failed == {"b"}
    assert worker.numbers == {"a": 0, "c": 2}
    assert worker.engine.cancelled == [1]
    assert worker.take_draft_token_ids().req_ids == ["a", "c"]
    assert "request b ends with an error: its logits are no numbers" in capsys.readouterr().err
    output = worker._output(_step("a", "c"), {0: Event(0, [5], Result(reason="context"))})
    assert (output.sampled_token_ids, output.failed) == ([[5], []], set())


def test_a_mask_without_a_token_reaches_the_engine(worker: Any) -> None:
    """The engine ends such a request with an error; rows of drafts lie between the masks of two requests."""
    given = list[Any]()
    worker.waiting = SimpleNamespace(scheduled_spec_decode_tokens={"a": [-1, -1]})
    worker.masked = {name: SimpleNamespace(next=None) for name in "ab"}
    worker._serve = given.append
    bitmask = np.arange(4, dtype=np.int32)[:, None] - 3
    worker.sample_tokens(SimpleNamespace(structured_output_request_ids=["a", "b"], grammar_bitmask=bitmask))
    assert (worker.masked["a"].next, worker.masked["b"].next) == ([-3], [0])
    assert given == [worker.waiting]


def test_vllm_gets_as_many_placeholders_as_the_launched_step_has_drafts(worker: Any) -> None:
    placeholders = {}
    for k in (None, 0, 1, 3):
        worker.engine.launched_batch = None if k is None else SimpleNamespace(k=k, chunk=None)
        drafts = worker.take_draft_token_ids()
        placeholders[k] = drafts and list(map(len, drafts.draft_token_ids))
    # a step that is not launched may still get any k
    assert placeholders == {None: [3, 3, 3], 0: None, 1: [1, 1, 1], 3: [3, 3, 3]}


def test_the_scheduler_ends_failed_requests_and_their_blocks_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, evicted = list[set[str]](), list[set[int]]()

    def update(self: Any, scheduler_output: Any, output: Any) -> None:
        ended.append(set(self.grammar_compile_error_reqs))

    monkeypatch.setattr(Scheduler, "update_from_output", update)
    scheduler: Any = BundleScheduler.__new__(BundleScheduler)
    scheduler.grammar_compile_error_reqs, scheduler.requests = {"x"}, {"b": None}
    scheduler.kv_cache_manager = SimpleNamespace(get_block_ids=lambda name: ([4, 7],), evict_blocks=evicted.append)
    scheduler.update_from_output(None, StepOutput(["b"], {"b": 0}, [[]], failed={"b"}))
    assert (ended, evicted) == ([{"x", "b"}], [{4, 7}])


def test_decoding_requests_come_first_and_prefill_gets_its_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine steps all decoding requests at once, so the budget may leave none of them out."""

    def request(prefill: bool) -> Any:
        return SimpleNamespace(is_prefill_chunk=prefill, num_tokens_with_spec=58, num_computed_tokens=50)

    seen = list[Any]()
    monkeypatch.setattr(
        Scheduler, "schedule", lambda self, _: seen.append((self.running[:], self.max_num_scheduled_tokens))
    )
    scheduler = BundleScheduler.__new__(BundleScheduler)
    # chunks of 512 tokens, and steps of four requests with 7 drafts
    scheduler.max_num_scheduled_tokens = 512 + 32
    scheduler.scheduler_config = SimpleNamespace(long_prefill_token_threshold=512)  # type: ignore[assignment]
    prefill, decoding = request(True), request(False)
    scheduler.running = [prefill, decoding]
    scheduler.schedule()
    assert seen == [([decoding, prefill], 512 + 8)]
    assert scheduler.max_num_scheduled_tokens == 512 + 32


def test_a_step_runs_only_for_requests_that_vllm_has_scheduled(worker: Any) -> None:
    """A new or resumed request is scheduled without the others, whose tokens would be lost."""
    launched, prefilling = list[bool](), {2}
    worker.engine = SimpleNamespace(
        launched=False, launched_batch=None, prefilling=prefilling.__contains__,
        launch=lambda masks=False: launched.append(masks), launch_next=lambda: None,
    )  # fmt: skip
    worker.metrics = SimpleNamespace(begin=lambda: None)
    worker._pieces = lambda _: {}
    worker._output = worker._report_invalid_drafts = lambda *_: None
    for names, steps in ((("x",), 0), (("c",), 0), (("c", "a"), 1), ((), 0)):
        launched.clear()
        cached = SimpleNamespace(req_ids=list(names), new_block_ids=[None] * len(names))
        worker._serve(SimpleNamespace(scheduled_cached_reqs=cached))
        assert launched.count(True) == steps


def test_steps_chunks_and_gaps_are_counted() -> None:
    """No gap before the first step, and one of 0 where the next step is launched."""
    names = [
        'steps_total{k="3"}',
        "prefill_chunks_total",
        "host_gap_seconds_count",
        'host_gap_seconds_bucket{le="0.0001"}',
    ]

    def counts() -> list[float]:
        values = (line.rsplit(" ", 1) for line in generate_latest().decode().splitlines() if line[0] != "#")
        found = {name: float(value) for name, value in values}
        return [found.get(f"trnspec_{name}", 0.0) for name in names]

    before, metrics = counts(), Metrics("chain")
    metrics.begin()
    metrics.end(3, launched_ahead=True)
    metrics.end(None, launched_ahead=False)
    metrics._ended -= 1
    metrics.begin()
    metrics.end(3, launched_ahead=False)
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [2, 1, 2, 1]
