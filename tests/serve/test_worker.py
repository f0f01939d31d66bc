"""A request that the engine could not go on with: vLLM hears of it in the step's output, and the others' ids go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from model.serving.engine import Event
from model.serving.request import Result
from tests.serve.server import NO_VLLM

pytestmark = pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM)


@pytest.fixture
def worker() -> Any:
    """A worker of three running requests, and an engine that remembers which were cancelled."""
    from serve.worker import BundleWorker  # noqa: PLC0415

    made = BundleWorker.__new__(BundleWorker)
    cancelled = list[int]()
    made.engine = SimpleNamespace(cancel=cancelled.append, cancelled=cancelled, speculative=True, begun=True)  # type: ignore[assignment]
    made.shape = SimpleNamespace(k=3)  # type: ignore[assignment]
    made.numbers, made.masked, made.failed = {"a": 0, "b": 1, "c": 2}, {}, set()
    made.requests, made.drawn = dict.fromkeys("abc", ((1,), None)), {}
    return made


def _step(*names: str) -> Any:
    return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 4), scheduled_new_reqs=[])


def test_an_event_with_an_error_fails_its_request_alone(worker: Any, capsys: pytest.CaptureFixture[str]) -> None:
    events = {0: Event(0, [5, 6]), 1: Event(1, [7], Result(reason="error", error="its logits are no numbers"))}
    output = worker._output(_step("a", "b", "c"), events)
    assert output.sampled_token_ids == [[5, 6], [], []]
    assert output.failed == {"b"}
    assert worker.numbers == {"a": 0, "c": 2}
    assert worker.engine.cancelled == [1]
    assert worker.take_draft_token_ids().req_ids == ["a", "c"]
    assert "request b ends with an error: its logits are no numbers" in capsys.readouterr().err
    assert worker._output(_step("a", "c"), {}).failed == set(), "vLLM hears of it once"


def test_a_request_that_ends_by_itself_has_not_failed(worker: Any) -> None:
    output = worker._output(_step("a"), {0: Event(0, [5], Result(reason="context"))})
    assert (output.sampled_token_ids, output.failed) == ([[5]], set())


def test_the_scheduler_ends_what_the_worker_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415

    from serve.scheduler import BundleScheduler, StepOutput  # noqa: PLC0415

    ended = list[set[str]]()

    def update(self: Any, scheduler_output: Any, output: Any) -> None:
        ended.append(set(self.grammar_compile_error_reqs))

    monkeypatch.setattr(Scheduler, "update_from_output", update)
    scheduler = BundleScheduler.__new__(BundleScheduler)
    scheduler.grammar_compile_error_reqs, scheduler.requests = {"x"}, {}
    scheduler.update_from_output(None, StepOutput(["b"], {"b": 0}, [[]], failed={"b"}))
    assert ended == [{"x", "b"}]


def test_a_new_request_comes_alone_unless_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415
    from vllm.v1.request import RequestStatus  # noqa: PLC0415

    from serve.scheduler import BundleScheduler, StepOutput  # noqa: PLC0415

    seen = list[tuple[int, bool]]()
    runs, new = SimpleNamespace(next_decode_eligible_step=0), SimpleNamespace(status=RequestStatus.WAITING)
    compiles = SimpleNamespace(status=RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)

    def schedule(self: Any, throttle_prefills: bool = False) -> Any:
        self.current_step += 1
        held = self.current_step < runs.next_decode_eligible_step
        seen.append((self.max_num_active_reqs, held))
        return SimpleNamespace(num_scheduled_tokens={} if scarce and held else {"a": 1})

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    monkeypatch.setattr(Scheduler, "update_from_output", lambda *_: None)
    scheduler = BundleScheduler.__new__(BundleScheduler)
    scheduler.grammar_compile_error_reqs, scheduler.requests = set(), {}
    scheduler.max_num_active_reqs, scheduler.current_step, scheduler.running = 4, 0, [runs]
    scarce = False
    for waiting, begun in (([new, new], False), ([new], True), ([], False), ([compiles], False)):
        scheduler.update_from_output(None, StepOutput([], {}, begun=begun))
        scheduler.waiting = waiting
        scheduler.schedule()
    assert seen == [(2, True), (2, False), (4, False), (4, False)]
    assert scheduler.max_num_active_reqs == 4
    # no block is free: those that run go on, and free one
    seen.clear()
    scheduler.waiting, scarce = [new], True
    scheduler.schedule()
    scheduler.schedule()
    assert seen == [(2, True), (2, False)]
