"""A request that the engine could not go on with: vLLM hears of it in the step's output, and the others' ids go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.serve.server import NO_VLLM
from trnspec.engine.engine import Event
from trnspec.engine.request import Result

pytestmark = pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM)


@pytest.fixture
def worker() -> Any:
    """A worker of three running requests, and an engine that remembers which were cancelled."""
    from serve.metrics import Metrics  # noqa: PLC0415
    from serve.worker import BundleWorker  # noqa: PLC0415

    made = BundleWorker.__new__(BundleWorker)
    cancelled = list[int]()
    made.engine = SimpleNamespace(  # type: ignore[assignment]
        cancel=cancelled.append, cancelled=cancelled, speculative=True, begun=True, begun_k=None
    )
    made.shape, made.metrics = SimpleNamespace(k=3, has=lambda key: key.bucket == 128), Metrics("chain")  # type: ignore[assignment]
    made.numbers, made.masked, made.failed = {"a": 0, "b": 1, "c": 2}, {}, set()
    made.requests, made.preempted = dict.fromkeys("abc", ((1,), None)), {}
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


def test_steps_are_counted_by_k_and_summed_up(worker: Any) -> None:
    from prometheus_client import REGISTRY  # noqa: PLC0415

    def counted() -> float:
        return REGISTRY.get_sample_value("trnspec_steps_total", {"k": "3"}) or 0.0

    before = counted()
    worker.metrics.end(False, [Event(0, [5, 6], k=3, drafted=3, accepted=1), Event(1, [7], None, 3, 3, 0)], True)
    worker.metrics.end(True, [], False)
    assert counted() - before == 1
    assert worker.metrics.summary() == (
        "steps by k {3: 1}, 1.50 tokens a step and request, 1 of 6 draft tokens emitted (drafter chain)"
    )


def test_vllm_counts_with_the_drafts_of_the_step_that_runs(worker: Any) -> None:
    placeholders = {}
    for k in (None, 0, 1, 3):
        worker.engine.begun_k = k
        drafts = worker.take_draft_token_ids()
        placeholders[k] = drafts and list(map(len, drafts.draft_token_ids))
    # a step that has not begun may get any k yet
    assert placeholders == {None: [3, 3, 3], 0: None, 1: [1, 1, 1], 3: [3, 3, 3]}


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


def test_decoding_requests_come_first_and_prefill_gets_its_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine steps all decoding requests at once, so the budget may leave none of them out."""
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415

    from serve.scheduler import BundleScheduler  # noqa: PLC0415

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
    """One that comes alone, or comes back, is scheduled without the others, whose ids would be lost."""
    begun, filling = list[bool](), {2}
    worker.engine = SimpleNamespace(
        begun=False, filling=filling.__contains__, slots=SimpleNamespace(full=True),
        begin=lambda masks=False: begun.append(masks), follow=lambda: None,
    )  # fmt: skip
    worker.dead_ends, worker.metrics = set(), SimpleNamespace(begin=lambda: None)
    worker._pieces = lambda _: {}
    worker._output = worker._report_invalid_drafts = lambda *_: None
    for names, steps in ((("x",), 0), (("c",), 0), (("c", "a"), 1), ((), 0)):
        begun.clear()
        cached = SimpleNamespace(req_ids=list(names), new_block_ids=[None] * len(names))
        worker._serve(SimpleNamespace(scheduled_cached_reqs=cached))
        assert begun.count(True) == steps
