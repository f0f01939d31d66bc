"""The vLLM worker that executes scheduler batches with the trnspec engine."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import DraftTokenIds, LogprobsLists, LogprobsTensors, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from model.cache import KEY_TILE
from serve.drain import ignore_ctrl_c_in_engine
from serve.grammar import stop_strings
from serve.metrics import Metrics
from serve.params import engine_request
from serve.platform import options, same_bundle, served_bundle
from serve.scheduler import StepOutput
from serve.startup import report_to_parent
from serve.vllm_patches import skip_accelerator_caches
from trnspec.bundle.opening import open_bundle
from trnspec.engine.adaptive_k import AdaptiveK
from trnspec.engine.async_engine import AsyncEngine
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Event
from trnspec.engine.request import Request, Score
from trnspec.engine.warmup import prepare_graphs
from trnspec.runtime.runner import load_runner, platform_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput


class BundleWorker(WorkerBase):
    """Continuous batching over our engine; vLLM's KV cache manager allocates the blocks.

    vLLM runs at most as many requests as the bundle has slots, so the engine always has a free one.
    """

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        ignore_ctrl_c_in_engine()

    @report_to_parent()
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.bundle = bundle = same_bundle(open_bundle(served_bundle().path))
        self.options = options(self.vllm_config, bundle)
        speculative = self.options.speculation and bundle.spec.k > 0
        self.config = engine_config(bundle)
        self.platform = platform_of(bundle, self.options.platform)
        self.runner = load_runner(bundle, self.platform)
        self.metrics = Metrics(bundle.spec.drafter if speculative else "none")
        step_k = AdaptiveK((0, *self.config.ks) if self.options.k is None else [self.options.k])
        self.engine = AsyncEngine(self.runner, self.config, speculative, step_k, owns_blocks=False)
        # vLLM's request id -> the engine's number, of the requests that are admitted
        self.numbers: dict[str, int] = {}
        # by request id; and the output ids of preempted requests
        self.requests, self.preempted = dict[str, Request](), dict[str, list[int]]()

    def get_kv_cache_spec(self) -> dict[str, Any]:
        # vLLM allocates block ids only; the memory is that of the graphs' block pools
        return {"blocks": FullAttentionSpec(KEY_TILE, num_kv_heads=1, head_size=1, dtype=torch.float32)}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]

    def set_kv_cache_layout(self, *layout: Any) -> None:
        """The runtime has the caches."""

    def determine_available_memory(self) -> int:
        return 1 << 40

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """The runtime has the caches."""

    @report_to_parent()
    def compile_or_warm_up_model(self) -> CompilationTimes:
        begin = time.perf_counter()
        # the graphs that the engine may run
        ks, keys = {full: self.engine.ks(full_sampling=full) for full in (False, True)}, self.bundle.plan.by_key
        prepare_graphs(self.engine, [key for key in keys if key.is_prefill or key.k in ks[key.full_sampling]])
        seconds = time.perf_counter() - begin
        print(self._banner(seconds), file=sys.stderr, flush=True)
        return CompilationTimes(language_model=seconds, encoder=0.0)

    def _banner(self, seconds: float) -> str:
        spec, ks = self.bundle.spec, ", ".join(map(str, sorted(self.engine.ks())))
        drafts = f"{spec.drafter}, k {ks}" if self.engine.speculative else "none"
        blocks = (self.vllm_config.cache_config.num_gpu_blocks_override or self.config.pool) - 1
        return (
            f"trnspec serves {self.bundle.path}, every digest verified\n"
            f"  target {spec.target}; drafts {drafts}; {spec.batch} slots of {spec.max_len} tokens, {blocks} blocks of "
            f"{KEY_TILE}\n  {self.platform}, {spec.dtype}, tp {spec.tp}; graphs ready in {seconds:.1f} s"
        )

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a decode step, then prefill chunks; with grammars, `sample_tokens` runs them when the masks are there."""
        # a request that was cancelled in vLLM's queue never came here
        for name in scheduler_output.finished_req_ids & self.requests.keys():
            self._forget(name)
        for name in (scheduler_output.preempted_req_ids or set()) & self.numbers.keys():
            self.preempted[name] = self.engine.preempt(self.numbers.pop(name))
        if not scheduler_output.num_scheduled_tokens:
            return StepOutput([], {})
        for data in scheduler_output.scheduled_new_reqs:
            ids, sampling = tuple(data.prompt_token_ids or ()), data.sampling_params
            grammar, stops = scheduler_output.grammars.get(data.req_id), stop_strings(self.vllm_config, ids, sampling)
            self.requests[data.req_id] = engine_request(self.config, ids, sampling, grammar, stops)
        if scheduler_output.has_structured_output_requests:
            self.waiting = scheduler_output
            return None
        return self._serve(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Run the batch that waited for its masks: one row for each placeholder draft and one more a request."""
        if grammar_output:
            names, masks = grammar_output.structured_output_request_ids, grammar_output.grammar_bitmask
            rows = [1 + len(self.waiting.scheduled_spec_decode_tokens.get(name, ())) for name in names]
            if sum(rows) != len(masks):
                # vLLM 0.33: as many for each request
                rows = [len(masks) // len(names)] * len(names)
            for name, end, count in zip(names, itertools.accumulate(rows), rows, strict=True):
                self.requests[name].allowed.next = masks[end - count]  # type: ignore[union-attr]
        return self._serve(self.waiting)

    def _serve(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        cached = scheduler_output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks and name in self.numbers:
                self.engine.add_blocks(self.numbers[name], blocks[0])
        # a request that is resumed is not admitted yet
        running = [self.numbers[name] for name in cached.req_ids if name in self.numbers]
        if not (self.engine.launched or all(map(self.engine.prefilling, running))):
            self.metrics.begin()
            self.engine.launch(masks=True)
            for grammar in filter(None, (request.allowed for request in self.requests.values())):
                grammar.restore()  # type: ignore[attr-defined]
        chunks = self._prefill_chunks(scheduler_output)
        for number, length in chunks.items():
            self.engine.prefill(number, length)
        # the next step runs while this one's output is read and scheduled; none is launched ahead of a chunk's
        self.engine.launch_next()
        events = self._end()
        while chunks and self.engine.launched:
            events += self._end()
        if not (chunks or self.engine.launched):
            self.engine.launch()
        by_number = {event.number: event for event in events}
        self._report_invalid_drafts(scheduler_output, by_number)
        return self._output(scheduler_output, by_number)

    def _prefill_chunks(self, scheduler_output: SchedulerOutput) -> dict[int, int]:
        """Admit new and resumed requests; engine number -> prompt tokens that are to be cached after this batch."""
        cached, scheduled = scheduler_output.scheduled_cached_reqs, scheduler_output.num_scheduled_tokens
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for data in scheduler_output.scheduled_new_reqs:
            computed[data.req_id] = data.num_computed_tokens
            self._admit(data.req_id, data.block_ids[0], data.num_computed_tokens)
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids and blocks:
                self._admit(name, blocks[0], computed[name])
        numbers = {self.numbers[name]: computed[name] + scheduled[name] for name in scheduled if name in self.numbers}
        return {number: length for number, length in numbers.items() if self.engine.prefilling(number)}

    def _admit(self, name: str, blocks: Sequence[int], cached: int) -> None:
        sampled = self.preempted.pop(name, [])
        self.numbers[name] = self.engine.admit(self.requests[name], blocks, cached, sampled)

    def _forget(self, name: str) -> None:
        if name in self.numbers:
            self.engine.cancel(self.numbers.pop(name))
        self.requests.pop(name, None)
        self.preempted.pop(name, None)

    def _end(self) -> list[Event]:
        """Wait for the oldest launched work: a decode step or a prefill chunk."""
        batch = self.engine.launched
        if batch is None:
            return []
        events = self.engine.step()
        self.metrics.end(None if batch.chunk else batch.k, launched_ahead=self.engine.launched is not None)
        return events

    def _report_invalid_drafts(self, scheduler_output: SchedulerOutput, events: dict[int, Event]) -> None:
        """Report placeholders without a draft, or with one after the request's end, which vLLM counts as invalid."""
        scheduler_output.num_invalid_spec_tokens = {
            name: max(0, len(placeholders) - (event.drafted if len(event.ids) > event.accepted else len(event.ids) - 1))
            for name, placeholders in scheduler_output.scheduled_spec_decode_tokens.items()
            if (event := events.get(self.numbers.get(name, -1)))
        }

    def _output(self, scheduler_output: SchedulerOutput, by_number: dict[int, Event]) -> ModelRunnerOutput:
        nothing = Event(-1, [])
        by_name = {n: by_number.get(self.numbers.get(n, -1), nothing) for n in scheduler_output.num_scheduled_tokens}
        failed = {name: event.result.error for name, event in by_name.items() if event.result and event.result.error}
        for name, error in failed.items():
            print(f"trnspec: request {name} ends with an error: {error}", file=sys.stderr, flush=True)
            self._forget(name)
            by_name[name] = nothing
        prompts = {n: _scores(self.requests[n].ids[1:], e.prompt_scores) for n, e in by_name.items() if e.prompt_scores}
        events = list(by_name.values())
        return StepOutput(
            req_ids=list(by_name),
            req_id_to_index={name: place for place, name in enumerate(by_name)},
            sampled_token_ids=[event.ids for event in events],
            logprobs=_logprobs(events) if any(event.scores for event in events) else None,
            failed=failed,
            stopped={name for name, e in by_name.items() if e.result and e.result.finish_reason == "stop"},
            prompt_logprobs_dict={n: LogprobsTensors(*map(torch.from_numpy, scores)) for n, scores in prompts.items()},
        )

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Placeholders, as many as the launched step drafts: the fused graph drafts by itself."""
        batch = self.engine.launched
        k = batch.k if batch and not batch.chunk else self.config.k
        if not (self.engine.speculative and k):
            return None
        return DraftTokenIds(list(self.numbers), [[-1] * k for _ in self.numbers])

    def shutdown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.close()
            del self.engine, self.runner
        skip_accelerator_caches()


def _logprobs(events: list[Event]) -> LogprobsLists:
    """Log-probabilities of the emitted tokens; requests without logprobs have zeros, which vLLM ignores."""
    ids = [token for event in events for token in event.ids]
    scores = [score for e in events for score in e.scores or [Score(0.0, 0)] * len(e.ids)]
    return LogprobsLists(*_scores(ids, scores), list(itertools.accumulate((len(e.ids) for e in events), initial=0)))


def _scores(ids: Sequence[int], scores: Sequence[Score]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(T, 1 + n) token ids and log-probabilities, the token itself first and the top n after it; (T,) ranks."""
    width = 1 + max((len(score.best) for score in scores), default=0)
    tokens, logprobs = np.zeros((len(ids), width), np.int32), np.zeros((len(ids), width), np.float32)
    for row, (token, score) in enumerate(zip(ids, scores, strict=True)):
        pairs = [(token, score.logprob), *score.best]
        tokens[row, : len(pairs)], logprobs[row, : len(pairs)] = zip(*pairs, strict=True)
    return tokens, logprobs, np.array([score.rank for score in scores], np.int32)
