"""A request that the engine could not go on with: vLLM hears of it in the step's output, and the others' ids go on."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from model.graph_key import PROMPTS, GraphKey, Stage
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


def test_prometheus_has_every_count_when_a_request_ends_and_never_far_behind(worker: Any) -> None:
    from prometheus_client import REGISTRY  # noqa: PLC0415

    names = ("steps", "sequence_steps", "tokens", "drafted", "drafts_kept")

    def counted() -> tuple[float, ...]:
        of_k = REGISTRY.get_sample_value("trnspec_steps_of_k_total", {"k": "3"})
        return (*(REGISTRY.get_sample_value(f"trnspec_{name}_total") or 0.0 for name in names), of_k or 0.0)

    def since(before: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(now - then for now, then in zip(counted(), before, strict=True))

    running, begun = Event(0, [5, 6], k=3, drafted=3, accepted=1), counted()
    worker.metrics.end(False, [running], followed=True)
    worker.metrics.end(False, [running, Event(1, [7], Result(reason="eos"), 3, 3, 0)], followed=False)
    assert since(begun) == (2, 3, 5, 9, 2, 2), "a request has ended"
    worker.metrics.end(False, [running], followed=False)
    worker._forget("a")
    assert since(begun) == (3, 4, 7, 12, 3, 3), "vLLM has ended one"
    for _ in range(100):
        worker.metrics.end(False, [running], followed=False)
        assert worker.metrics.counts["steps"] - (counted()[0] - begun[0]) < 32
    assert worker.metrics.summary().startswith("103 steps, 1.99 tokens a step and request, 103 of 312 drafts kept")


def test_vllm_counts_with_the_drafts_of_the_step_that_runs(worker: Any) -> None:
    placeholders = {}
    for k in (None, 0, 1, 3):
        worker.engine.begun_k = k
        drafts = worker.take_draft_token_ids()
        placeholders[k] = drafts and list(map(len, drafts.draft_token_ids))
    # a step that has not begun may get any k yet
    assert placeholders == {None: [3, 3, 3], 0: None, 1: [1, 1, 1], 3: [3, 3, 3]}


def test_a_draft_s_prompts_are_compiled_where_a_step_may_draft(worker: Any) -> None:
    stages = (*PROMPTS, Stage.STEP)
    keys = [
        GraphKey(stage, 3, keys, asking=asking) for stage in stages for asking in (False, True) for keys in (64, 128)
    ]
    for apart, run in ((True, [*stages]), (False, [Stage.PREFILL, Stage.STEP])):
        worker.engine.apart, worker.engine.ks = apart, lambda asking: {3}
        assert [key.stage for key in keys if worker._runs(key) and not key.asking] == run


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


class Calls:
    """A scheduler of ours over one of vLLM's that admits what waits first, if it may: what the latter saw."""

    def __init__(self, patch: pytest.MonkeyPatch, *running: Any) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415

        from serve.scheduler import BundleScheduler  # noqa: PLC0415

        # the most requests that may run, and whether those that run were passed over
        self.seen = list[tuple[int, bool]]()
        self.admits = False
        calls = self

        def schedule(self: Any, throttle_prefills: bool = False) -> Any:
            self.current_step += 1
            held = {self.current_step < request.next_decode_eligible_step for request in self.running}
            calls.seen.append((self.max_num_active_reqs, held == {True}))
            calls.budget = self.max_num_scheduled_tokens
            return SimpleNamespace(
                scheduled_new_reqs=self.waiting if calls.admits else [],
                scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
            )

        patch.setattr(Scheduler, "schedule", schedule)
        patch.setattr(Scheduler, "update_from_output", lambda *_: None)
        self.scheduler = BundleScheduler.__new__(BundleScheduler)
        self.scheduler.grammar_compile_error_reqs, self.scheduler.requests = set(), {}
        self.scheduler.max_num_active_reqs, self.scheduler.current_step = 4, 0
        # pieces of 512 ids, and steps of four requests with 7 drafts
        self.scheduler.max_num_scheduled_tokens = 512 + 32
        self.scheduler.scheduler_config = SimpleNamespace(long_prefill_token_threshold=512)  # type: ignore[assignment]
        self.scheduler.running = list(running)

    def call(self, *waiting: str, begun: bool = False, admits: bool = True) -> tuple[int, bool]:
        """What vLLM's scheduler sees behind a call's output with requests of these states in its queue."""
        from vllm.v1.request import RequestStatus  # noqa: PLC0415

        from serve.scheduler import StepOutput  # noqa: PLC0415

        self.scheduler.update_from_output(None, StepOutput([], {}, begun=begun))
        self.scheduler.waiting = [SimpleNamespace(status=RequestStatus[state]) for state in waiting]
        self.admits = admits
        self.scheduler.schedule()
        assert (self.scheduler.max_num_active_reqs, self.scheduler.max_num_scheduled_tokens) == (4, 512 + 32)
        return self.seen[-1]


def _running(chunks: bool = False) -> Any:
    return SimpleNamespace(
        next_decode_eligible_step=0, is_prefill_chunk=chunks, num_tokens_with_spec=58, num_computed_tokens=50
    )


NEW, LOST, COMPILES = "WAITING", "PREEMPTED", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"


def test_a_new_request_comes_alone_unless_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, _running())
    assert calls.call(NEW, NEW) == (2, True)
    assert calls.call(NEW, begun=True) == (2, False)
    assert calls.call() == (4, False)
    assert calls.call(COMPILES) == (4, False)
    assert calls.call(LOST) == (2, True)


def test_those_that_run_go_on_until_a_request_has_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for state in (NEW, LOST):
        calls = Calls(monkeypatch, _running())
        assert calls.call(state, admits=False) == (2, True)
        assert [calls.call(state, admits=False) for _ in range(3)] == [(2, False)] * 3
        assert calls.call(state) == (2, False)
        assert calls.call(state) == (2, True)


def test_a_prompt_with_chunks_left_is_not_passed_over_and_takes_what_steps_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunks, steps = _running(chunks=True), _running()
    calls = Calls(monkeypatch, chunks, steps)
    assert calls.call(NEW) == (3, False)
    assert calls.scheduler.running == [steps, chunks]
    assert calls.budget == 512 + 8, "a piece, and the step of one request"
    chunks.is_prefill_chunk = False
    assert calls.call(NEW) == (3, True)
    assert calls.budget == 512 + 16


def test_requests_that_end_with_their_first_id_do_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, _running())
    assert [calls.call(NEW)[1] for _ in range(10)] == [True] * 4 + [False] + [True] * 4 + [False]


def test_a_step_runs_only_for_requests_that_vllm_has_scheduled(worker: Any) -> None:
    """One that comes alone, or comes back, is scheduled without the others, whose ids would be lost."""
    begun, filling = list[bool](), {2}
    worker.engine = SimpleNamespace(
        begun=False, filling=filling.__contains__, slots=SimpleNamespace(full=True),
        begin=lambda masks=False: begun.append(masks), follow=lambda: None,
    )  # fmt: skip
    worker.dead_ends, worker.metrics = set(), SimpleNamespace(begin=lambda: None)
    worker._pieces = lambda _: {}
    worker._output = worker._uncount = lambda *_: None
    for names, steps in ((("x",), 0), (("c",), 0), (("c", "a"), 1), ((), 0)):
        begun.clear()
        cached = SimpleNamespace(req_ids=list(names), new_block_ids=[None] * len(names))
        worker._serve(SimpleNamespace(scheduled_cached_reqs=cached))
        assert begun.count(True) == steps


def test_no_step_is_begun_early_while_one_that_has_come_would_get_a_slot(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415

    from serve import arrivals  # noqa: PLC0415
    from serve.scheduler import BundleScheduler  # noqa: PLC0415

    monkeypatch.setattr(EngineCore, "preprocess_add_request", lambda self, request: (request, 0))
    monkeypatch.setattr(Scheduler, "add_request", lambda self, request: None)
    arrivals.watch()
    calls, slots = list[str](), SimpleNamespace(full=False)
    worker.engine = SimpleNamespace(
        begun=False, filling=lambda _: False, slots=slots, left_s=0.0,
        begin=lambda masks=False: calls.append("scheduled" if masks else "early"), follow=lambda: calls.append("twice"),
    )  # fmt: skip
    worker.dead_ends, worker.metrics = set(), SimpleNamespace(begin=lambda: None)
    worker._pieces = lambda _: {}
    worker._output = worker._uncount = lambda *_: None
    step = SimpleNamespace(scheduled_cached_reqs=SimpleNamespace(req_ids=["a"], new_block_ids=[None]))

    def served() -> list[str]:
        calls.clear()
        worker._serve(step)
        return list(calls)

    def waits(pool: ThreadPoolExecutor) -> Future[list[str]]:
        calls.clear()
        runs = pool.submit(served)
        while not calls:
            time.sleep(0.001)
        time.sleep(0.1)
        return runs

    request, all_of_it = SimpleNamespace(request_id="new"), ["scheduled", "twice", "early"]
    assert served() == all_of_it
    assert EngineCore.preprocess_add_request(None, request) == (request, 0)  # type: ignore[arg-type, comparison-overlap]
    assert served() == ["scheduled"]
    slots.full = True
    assert served() == all_of_it
    slots.full = False
    BundleScheduler.add_request(BundleScheduler.__new__(BundleScheduler), request)  # type: ignore[arg-type]
    assert served() == all_of_it
    # while a step runs none is handed over behind it, until it nears its end or has ended early
    worker.engine.left_s = 60.0
    with ThreadPoolExecutor(1) as pool:
        runs = waits(pool)
        assert calls == ["scheduled"]
        worker.engine.left_s = 0.0
        assert runs.result(timeout=30) == all_of_it
        worker.engine.left_s = 60.0
        runs = waits(pool)
        EngineCore.preprocess_add_request(None, request)  # type: ignore[arg-type]
        assert runs.result(timeout=30) == ["scheduled"]
    slots.full = True
    assert served() == all_of_it, "nobody would get a slot: nothing waits"
    arrivals.known("new")
