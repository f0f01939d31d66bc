"""vLLM's configuration, requests and scheduler with our platform and worker, over a runner without a model."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from model.errors import UserError
from tests.engine.machine import BATCH, BLOCK, CONFIG, LENGTH, K, Machine, V
from tests.model.demo_bundle import ROOT
from tests.serve.server import NO_VLLM
from trnspec.engine.engine import Engine, Event
from trnspec.engine.masks import mask_of
from trnspec.engine.request import Score

pytest.importorskip("vllm", reason=NO_VLLM)
from prometheus_client import REGISTRY, generate_latest
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.utils import strip_speculative_padding

from serve import platform
from serve import worker as module
from serve.grammar import stop_strings
from serve.metrics import Metrics
from serve.params import engine_request
from serve.platform import BundlePlatform
from serve.scheduler import BundleScheduler, StepOutput
from serve.vllm_patches import report_why_a_request_failed

# of Machine: its sampling fails with this seed
BROKEN = 7
MASKED = StructuredOutputsParams(regex="a")


def _runner() -> Machine:
    runner = Machine(strict=True)
    runner.broken = BROKEN
    return runner


@pytest.fixture
def bundle(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bundle with the graphs of CONFIG, served by this process."""
    sizes = {"batch": BATCH, "max_len": LENGTH, "k": K, "ks": CONFIG.ks, "rows": K + 1, "usable": CONFIG.pool}
    spec = SimpleNamespace(**sizes, drafter="chain", target="t", dtype="fp32", tp=1, prompts=CONFIG.prompts)
    manifest = SimpleNamespace(has_weights=True, digest="0")
    made = SimpleNamespace(path="demo", spec=spec, manifest=manifest, runner=_runner())
    monkeypatch.setattr(platform, "served_bundle", lambda: made)
    monkeypatch.setattr(platform, "engine_config", lambda _: CONFIG)
    monkeypatch.setattr(platform, "end_while_starting", end := mock.Mock())
    made.end_while_starting = end
    return made


def _vllm_config(**options: Any) -> Any:
    """vLLM's configuration of a command with these options, before a platform has changed it."""
    model = ModelConfig(str(ROOT / "demo/target"), max_model_len=LENGTH, dtype="float32")
    scheduler = SchedulerConfig(
        max_num_seqs=BATCH, max_num_batched_tokens=256, max_model_len=LENGTH, is_encoder_decoder=False,
        enable_chunked_prefill=True,
    )  # fmt: skip
    config = VllmConfig(model, CacheConfig(enable_prefix_caching=True), scheduler_config=scheduler)
    config.additional_config = options
    return config


def _worker(bundle: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker that is ready to serve the bundle."""
    bundle.plan = bundle.runner.bundle.plan
    for name, value in {
        "served_bundle": bundle, "open_bundle": bundle, "same_bundle": bundle, "engine_config": CONFIG,
        "load_runner": bundle.runner,
    }.items():  # fmt: skip
        monkeypatch.setattr(module, name, lambda *_, value=value: value)
    worker: Any = module.BundleWorker.__new__(module.BundleWorker)
    worker.vllm_config = config
    worker.load_model()
    monkeypatch.setattr("serve.scheduler.Grammar", lambda request, manager: Grammar())
    worker.compile_or_warm_up_model()
    return worker


def _mask(ids: Sequence[int]) -> np.ndarray:
    return mask_of(random.Random(f"{list(ids)}").sample(range(V), 12), V)


class Grammar:
    """In the place of ours: it holds vLLM's mask against its own."""

    next: np.ndarray | None = None

    def restore(self) -> None: ...

    def __call__(self, ids: Sequence[int]) -> np.ndarray:
        mask, self.next = self.next, None
        assert mask is None or (mask == _mask(ids)).all()
        return _mask(ids)


class Masks:
    """In the place of vLLM's StructuredOutputManager: a row for each draft and one more; the first one is read."""

    def grammar_bitmask(self, requests: Any, names: list[str], drafts: dict[str, list[int]]) -> np.ndarray:
        rows = [
            [_mask(requests[name].output_token_ids), *(_mask([-1]) for _ in drafts.get(name, ()))] for name in names
        ]
        return np.array([row for some in rows for row in some])

    def accept_tokens(self, request: Any, ids: list[int]) -> bool:
        return True

    def validate_tokens(self, request: Any, ids: list[int]) -> list[int]:
        return strip_speculative_padding(ids) if request.use_structured_output else ids


def _requests(count: int) -> list[tuple[list[int], Any]]:
    """Prompts, many with a common prefix, with every kind of parameters."""
    rng = random.Random(3)
    texts = [[rng.randrange(1, V) for _ in range(400)] for _ in range(2)]
    kinds: list[dict[str, Any]] = [
        {}, {"frequency_penalty": 0.5}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"structured_outputs": MASKED},
        {"structured_outputs": MASKED, "logprobs": 0},
        {"min_tokens": 5, "stop_token_ids": [5, 6]}, {"stop": ["1", "c"], "min_tokens": 3},
    ]  # fmt: skip
    requests = []
    for n in range(count):
        ids = rng.choice(texts)[: rng.choice((1, 100, 127, 128, 129, 240, 370))]
        ids = [*ids, *(rng.randrange(1, V) for _ in range(rng.choice((0, 1, 20))))]
        length = rng.choice((5, 20, 90))
        params = SamplingParams(temperature=0.9 * (n % 2), seed=n, max_tokens=length, **kinds[n % len(kinds)])
        requests.append((ids, params))
    return requests


class Client:
    """A vLLM engine's loop around our scheduler and worker; `outputs` by request, what our engine has `read`."""

    def __init__(self, worker: Any, masks: Any = None) -> None:
        groups = [KVCacheGroupSpec(["blocks"], worker.get_kv_cache_spec()["blocks"])]
        count = worker.vllm_config.cache_config.num_gpu_blocks
        blocks = KVCacheConfig(num_blocks=count, kv_cache_tensors=[], kv_cache_groups=groups)
        init_none_hash(sha256)
        self.worker, self.hasher = worker, get_request_block_hasher(BLOCK, sha256)
        self.scheduler: Any = BundleScheduler(worker.vllm_config, blocks, masks or Masks(), BLOCK, log_stats=True)
        self.outputs: dict[str, list[Any]] = {}
        self.preempted = self.hits = self.cached = self.drafted = self.accepted = 0
        # the requests that run, in the order of their admission
        self.admitted = list[str]()
        self.events, self.read, postprocess = list[Event](), Counter[str](), worker.engine._postprocess

        def watched(batch: Any, outputs: Any) -> list[Event]:
            events: list[Event] = postprocess(batch, outputs)
            self.events += events
            self.read["prefill_chunks_total" if batch.chunk else f'steps_total{{k="{batch.k}"}}'] += 1
            return events

        def admit(request: Any, blocks: Any, cached: int, ids: Any) -> int:
            self.cached += cached
            return int(admitted(request, blocks, cached, ids))

        def end(k: int | None, launched_ahead: bool) -> None:
            assert launched_ahead == (worker.engine.launched is not None)
            ended(k, launched_ahead)

        admitted, ended = worker.engine.admit, worker.metrics.end
        worker.engine._postprocess, worker.engine.admit, worker.metrics.end = watched, admit, end
        worker.metrics.begin = self.begin = mock.Mock(wraps=worker.metrics.begin)

    def add(self, name: str, ids: list[int], params: Any) -> None:
        request = Request(name, ids, params, None, block_hasher=self.hasher)
        if request.structured_output_request:
            request.structured_output_request.grammar = SimpleNamespace()
        self.outputs[name] = []
        self.scheduler.add_request(request)

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        preempted = scheduled.preempted_req_ids or set()
        self.admitted = [name for name in self.admitted if name in self.scheduler.requests]
        assert preempted == {*self.admitted[len(self.admitted) - len(preempted) :]}, "those that came last"
        self.admitted = [name for name in self.admitted if name not in preempted]
        self.preempted += len(preempted)
        again = scheduled.scheduled_cached_reqs
        computed = dict(zip(again.req_ids, again.num_computed_tokens, strict=True))
        self.hits += sum(data.num_computed_tokens for data in scheduled.scheduled_new_reqs)
        self.hits += sum(computed[name] for name in again.resumed_req_ids)
        self.admitted += [name for name in scheduled.num_scheduled_tokens if name not in self.admitted]
        output = self.worker.execute_model(scheduled)
        masks = self.scheduler.get_grammar_bitmask(scheduled)
        output = output or self.worker.sample_tokens(masks)
        for name, ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
            assert ids or name in output.failed or self.scheduler.requests[name].is_prefill_chunk, "a lost step"
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for one in outputs.outputs:
                self.outputs[one.request_id].append(one)
            if outputs.scheduler_stats and (stats := outputs.scheduler_stats.spec_decoding_stats):
                self.drafted += stats.num_draft_tokens
                self.accepted += stats.num_accepted_tokens
        if (placeholders := self.worker.take_draft_token_ids()) is not None:
            self.scheduler.update_draft_token_ids(placeholders)


# vLLM's API process finds the stop string
REASONS = {"length": "length", "context": "length", "eos": "stop", "error": "error", "stop": "length"}


def rows_of(scores: Any, best: int) -> list[tuple[list[int], list[float], int]]:
    """Ids, log-probabilities and rank of each token in vLLM's form, which a batch pads to its longest."""
    ids, logprobs, ranks = (np.asarray(field).tolist() for field in scores[:3])
    return [(i[: 1 + best], p[: 1 + best], rank) for i, p, rank in zip(ids, logprobs, ranks, strict=True)]


def expected_rows(ids: Sequence[int], scores: Sequence[Score]) -> list[tuple[list[int], list[float], int]]:
    pairs = [[(token, score.logprob), *score.best] for token, score in zip(ids, scores, strict=True)]
    return [([i for i, _ in row], [p for _, p in row], s.rank) for row, s in zip(pairs, scores, strict=True)]


def _counts() -> Counter[str]:
    """The counters of our metrics."""
    lines = (line.rsplit(" ", 1) for line in generate_latest().decode().splitlines() if line.startswith("trnspec_"))
    counters = ((name.removeprefix("trnspec_"), value) for name, value in lines if "_total" in name)
    return Counter({name: int(float(value)) for name, value in counters})


def test_tokens_and_scores_are_those_of_each_request_by_itself(bundle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With prefix hits, chunks, preemption, arrivals and departures, in steps of any k; one cannot be sampled."""
    config, requests, rng = _vllm_config(), _requests(36), random.Random(4)
    # blocks for one of the longest requests and a short one
    config.cache_config.num_gpu_blocks_override = config.cache_config.num_gpu_blocks = 6
    BundlePlatform.check_and_update_config(config)
    client, before = Client(_worker(bundle, config, monkeypatch)), _counts()
    waiting, gone = list(range(len(requests))), set[int]()
    while waiting or client.scheduler.has_requests():
        while waiting and rng.random() < 0.3:
            n = waiting.pop(0)
            client.add(str(n), *requests[n])
        if client.scheduler.running and rng.random() < 0.01:
            name = rng.choice(client.scheduler.running).request_id
            client.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            gone.add(int(name))
        client.step()
    for n, (ids, params) in enumerate(requests):
        grammar = Grammar() if params.structured_outputs else None
        request = engine_request(CONFIG, tuple(ids), params, grammar, stop_strings(config, ids, params))
        (result,) = Engine(_runner(), CONFIG).run([request])
        outputs = client.outputs[str(n)]
        tokens = [token for one in outputs for token in one.new_token_ids]
        assert tokens == result.ids[: len(tokens)]
        if n in gone:
            continue
        assert str(outputs[-1].finish_reason) == REASONS[result.finish_reason]
        # the tokens of a step that fails are lost
        assert len(tokens) == len(result.ids) or result.error
        for field, best, tokens, scores in (
            ("new_logprobs", params.logprobs, result.ids, result.scores),
            ("new_prompt_logprobs_tensors", params.prompt_logprobs, ids[1:], result.prompt_scores),
        ):
            if best is not None:
                parts = (part for one in outputs if (part := getattr(one, field)))
                assert [row for part in parts for row in rows_of(part, best)] == expected_rows(tokens, scores)
    worker, steps = client.worker, sum(count for name, count in client.read.items() if "steps" in name)
    assert not any((worker.numbers, worker.requests, worker.preempted))
    assert client.cached == client.hits, "no cached token is computed again"
    assert 0 < client.begin.call_count < 0.8 * steps, "the others are launched when the one before is read, or earlier"
    assert client.scheduler.num_lookahead_tokens == K + 1
    assert min(client.preempted, client.hits, len(gone)) > 0
    # vLLM counts drafted and emitted tokens, our metrics count steps
    events = [event for event in client.events if not (event.result and event.result.error)]
    emitted = [(e.drafted, e.accepted) if len(e.ids) > e.accepted else (len(e.ids) - 1,) * 2 for e in events]
    assert (client.drafted, client.accepted) == tuple(map(sum, zip(*emitted, strict=True)))
    assert _counts() - before == client.read
    assert {*bundle.runner.keys} <= bundle.runner.loaded


# a value of --additional-config that is refused, and the sentence
OPTIONS: list[tuple[dict[str, object], str]] = [
    ({"k": 2}, "k is 2; this bundle's graphs have k 0, 1, 3"),
    ({"k": "3"}, "additional-config.k is '3', expected a whole number"),
    ({"acceptance": "all"}, "acceptance is 'all', expected one of none, summary, detailed"),
    ({"platform": "tpu"}, "platform is 'tpu', expected one of auto, cpu, neuron, pjrt"),
]


@pytest.mark.parametrize(("options", "sentence"), OPTIONS, ids=str)
def test_an_additional_option_that_the_bundle_cannot_follow(bundle: Any, options: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        BundlePlatform.check_and_update_config(_vllm_config(**options))


@pytest.mark.parametrize("blocks", [None, 5, 9])
@pytest.mark.parametrize("options", [{}, {"speculation": False}, {"k": 0, "acceptance": "summary"}], ids=str)
def test_a_bundle_s_limits_are_vllm_s_settings(bundle: Any, options: dict[str, Any], blocks: int | None) -> None:
    """vLLM calls the platform once in each process with the same configuration."""
    config = _vllm_config(**options)
    config.cache_config.num_gpu_blocks_override = blocks
    for _ in range(2):
        BundlePlatform.check_and_update_config(config)
        scheduler, cache, speculative = config.scheduler_config, config.cache_config, config.speculative_config
        assert (scheduler.max_num_batched_tokens, scheduler.long_prefill_token_threshold) == (256 + 3 * 4, 256)
        assert (cache.block_size, cache.num_gpu_blocks_override) == (BLOCK, blocks or CONFIG.pool)
        assert not scheduler.async_scheduling
        drafts = K if options.get("speculation", True) else 0
        assert (speculative.num_speculative_tokens if speculative else 0) == drafts
        acceptance = config.observability_config.per_request_spec_decode_metrics
        assert acceptance == options.get("acceptance", "none")
    bundle.end_while_starting.assert_called_with()
    SamplingParams(min_p=0.1, logit_bias={1: 1.0})._validate_spec_decode(config.speculative_config)


def test_no_chunk_exceeds_the_budget_and_one_of_several_api_servers_has_vllm_s_handler(bundle: Any) -> None:
    config = _vllm_config()
    config.scheduler_config.long_prefill_token_threshold = 400
    config.parallel_config._api_process_count = 2
    BundlePlatform.check_and_update_config(config)
    assert config.scheduler_config.long_prefill_token_threshold == 256
    bundle.end_while_starting.assert_not_called()


TOKENS = {"type": "token", "prompt_token_ids": [5, 6]}


@pytest.mark.parametrize(
    ("prompt", "changes", "sentence"),
    [
        (TOKENS, {"temperature": 1e31}, "temperature is 1e"),
        (TOKENS, {"thinking_token_budget": 5}, "thinking_token_budget is not served"),
        ({"type": "token", "prompt_token_ids": [V]}, {}, f"the prompt holds the id {V}"),
        ({"type": "embeds"}, {}, "text or token ids"),
        (TOKENS, None, "no other task"),
    ],
)
def test_a_request_that_cannot_be_served_is_vllm_s_error(
    bundle: Any, prompt: Any, changes: dict[str, Any] | None, sentence: str
) -> None:
    params = SamplingParams()
    for name, value in (changes or {}).items():
        setattr(params, name, value)
    with pytest.raises(VLLMValidationError, match=sentence):
        BundlePlatform.validate_request(prompt, object() if changes is None else params)


def test_a_bundle_of_greedy_graphs_refuses_what_they_lack(bundle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "engine_config", lambda _: dataclasses.replace(CONFIG, greedy=True))
    for served in (SamplingParams(temperature=0.8), SamplingParams(temperature=0, top_p=0.9, stop_token_ids=[5])):
        BundlePlatform.validate_request(TOKENS, served)
    for lacking in (SamplingParams(frequency_penalty=0.5), SamplingParams(structured_outputs=MASKED)):
        with pytest.raises(VLLMValidationError, match="this bundle has greedy graphs: no top-k, top-p, min-p"):
            BundlePlatform.validate_request(TOKENS, lacking)


def test_a_sampled_request_without_a_seed_gets_one(bundle: Any) -> None:
    given = [SamplingParams(temperature=t, seed=seed) for t, seed in ((0.5, None), (0.5, None), (0.5, 3), (0.0, None))]
    for params in given:
        BundlePlatform.validate_request(TOKENS, params)
    one, two, *others = (params.seed for params in given)
    assert one != two
    assert 0 <= one < 2**53
    assert others == [3, None]


# options of a server, and the k of the graphs that it prepares
PREPARED: tuple[tuple[dict[str, Any], set[int]], ...] = (
    ({}, {0, 1, 3}), ({"k": 1}, {0, 1, 3}), ({"k": 0}, {0, 3}), ({"speculation": False}, {0, 3}),
)  # fmt: skip


@pytest.mark.parametrize(("options", "ks"), PREPARED, ids=str)
def test_the_graphs_that_a_server_prepares(
    bundle: Any, options: Any, ks: set[int], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A chosen k has its graphs, those of full sampling, and no others; what is served is printed."""
    config, speculative = _vllm_config(**options), options.get("speculation", True)
    BundlePlatform.check_and_update_config(config)
    worker = _worker(bundle, config, monkeypatch)
    assert {key.k for key in bundle.runner.loaded if not key.is_prefill} == ks
    assert (len(worker.engine.step_k.ks) > 1) == (not options)
    assert worker.engine.speculative == speculative
    assert (worker.take_draft_token_ids() is not None) == speculative
    assert "3 slots of 512 tokens, 8 blocks of 128" in capsys.readouterr().err


def test_a_bundle_that_is_replaced_while_the_server_starts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    read: Any = SimpleNamespace(path="demo", manifest=SimpleNamespace(digest="1"))
    monkeypatch.setenv("TRNSPEC_BUNDLE_DIGEST", "1")
    assert platform.same_bundle(read) is read
    read.manifest.digest = "2"
    with pytest.raises(UserError, match="demo was replaced while the server was starting"):
        platform.same_bundle(read)


def test_vllm_gets_as_many_placeholders_as_the_launched_step_has_drafts() -> None:
    """A step that is not launched may still get any k."""
    tokens = list[Any]()
    for batch in (None, *(SimpleNamespace(k=k, chunk=None) for k in (0, 1, 3)), SimpleNamespace(k=0, chunk="a chunk")):
        engine: Any = SimpleNamespace(launched=batch, speculative=True)
        worker: Any = SimpleNamespace(engine=engine, config=CONFIG, numbers={"a": 0})
        drafts = module.BundleWorker.take_draft_token_ids(worker)
        tokens.append(drafts and list(map(len, drafts.draft_token_ids)))
    assert tokens == [[3], None, [1], [3], [3]]


def test_the_scheduler_ends_failed_requests_and_their_blocks_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, evicted = list[set[str]](), list[set[int]]()

    def update(self: Any, scheduler_output: Any, output: Any) -> Any:
        ended.append(set(self.grammar_compile_error_reqs))
        return {0: SimpleNamespace(outputs=[SimpleNamespace(request_id=name, stop_reason=5) for name in "ab"])}

    monkeypatch.setattr(Scheduler, "update_from_output", update)
    scheduler: Any = BundleScheduler.__new__(BundleScheduler)
    scheduler.grammar_compile_error_reqs, scheduler.requests = {"x"}, {"b": None}
    scheduler.kv_cache_manager = SimpleNamespace(get_block_ids=lambda name: ([4, 7],), evict_blocks=evicted.append)
    by_client = scheduler.update_from_output(None, StepOutput(["b"], {"b": 0}, [[]], failed={"b": "why"}))
    assert (ended, evicted) == ([{"x", "b"}], [{4, 7}])
    assert [output.stop_reason for output in by_client[0].outputs] == [5, "why"]


def test_a_client_gets_the_sentence_of_a_request_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestState, "make_request_output", lambda *given, **more: (given[1:], more))
    report_why_a_request_failed.__wrapped__()
    made = functools.partial(RequestState.make_request_output, None, [], None)
    error = made(FinishReason.ERROR, "the grammar allows no id", None)
    assert isinstance(error, GracefulHTTPError), "AsyncLLM passes it on"
    assert isinstance(error, GenerationError), "a stream answers it"
    answer = create_error_response(error).error
    assert (answer.code, answer.message) == (500, "the grammar allows no id")
    for reason in ((FinishReason.STOP, "stop"), (FinishReason.ERROR, None), (None, None)):
        assert made(*reason, error=1) == (([], None, *reason), {"error": 1})


def test_prefill_gets_its_chunk_and_decoding_its_rows_in_the_order_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine steps all decoding requests at once, so the budget may leave none of them out."""

    def request(prefill: bool) -> Any:
        return SimpleNamespace(is_prefill_chunk=prefill, num_tokens_with_spec=58, num_computed_tokens=50)

    seen = list[Any]()

    def schedule(self: Any, _: bool) -> Any:
        seen.append((self.running[:], self.max_num_scheduled_tokens))
        return SimpleNamespace(scheduled_new_reqs=[])

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    scheduler = BundleScheduler.__new__(BundleScheduler)
    # chunks of 512 tokens, and steps of four requests with 7 drafts
    scheduler.max_num_scheduled_tokens = 512 + 32
    scheduler.scheduler_config = SimpleNamespace(long_prefill_token_threshold=512)  # type: ignore[assignment]
    prefill, decoding = request(True), request(False)
    scheduler.running = [prefill, decoding]
    scheduler.schedule()
    assert seen == [([prefill, decoding], 512 + 8)]
    assert scheduler.max_num_scheduled_tokens == 512 + 32


def test_gaps_between_steps_are_counted() -> None:
    """No gap before the first step, and one of 0 where the next step is launched."""

    def counts() -> list[float]:
        tokens = (("count", {}), ("bucket", {"le": "0.0001"}))
        return [REGISTRY.get_sample_value(f"trnspec_host_gap_seconds_{name}", of) or 0.0 for name, of in tokens]

    before, metrics = counts(), Metrics("chain")
    metrics.begin()
    metrics.end(3, launched_ahead=True)
    metrics.end(None, launched_ahead=False)
    metrics._ended -= 1
    metrics.begin()
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [2, 1]
