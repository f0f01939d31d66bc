"""The worker: vLLM's scheduler chooses the requests, our engine runs the bundle's graphs, blocks of ids go back."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import DraftTokenIds, LogprobsLists, LogprobsTensors, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from model.attention import KEY_TILE
from model.graph_key import GraphKey, Stage
from model.progress import progress
from serve import arrivals
from serve.allowed import engine_request
from serve.drain import leave_ctrl_c_to_the_server
from serve.grammar import Grammar, Grammars
from serve.metrics import Metrics
from serve.platform import fixed_k, graphs_platform, served_bundle, speculates
from serve.scheduler import StepOutput
from serve.sentence import passed_on
from trnspec.bundle.opening import open_bundle
from trnspec.engine.engine import Event
from trnspec.engine.overlap import OverlappedEngine
from trnspec.engine.ready import open_graphs, served_shape, step_seconds
from trnspec.engine.request import Score
from trnspec.engine.step_k import Always, Paying

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, SchedulerOutput

# how long before the end of a step the one behind it is handed over, and how often is asked whether it has ended early
_LEAD_S, _POLL_S = 1e-3, 1e-3


class BundleWorker(WorkerBase):
    """Continuous batching over our engine. vLLM cuts at stops, ends and limits inside a block, as the engine does.

    vLLM runs no more requests than a bundle has slots, so the engine always has one free; and it owns the blocks of the
    caches: which request has which, whose beginnings are shared, who loses them to others.
    """

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        leave_ctrl_c_to_the_server()
        arrivals.watch()

    @passed_on()
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.bundle = bundle = open_bundle(served_bundle().path)
        speculative = speculates(bundle, self.vllm_config)
        self.drafter = bundle.spec.drafter if speculative else "none"
        self.platform = graphs_platform(self.vllm_config)
        self.shape = served_shape(bundle, self.platform)
        self.graphs, self.metrics = open_graphs(bundle, self.platform), Metrics(self.drafter)
        self.fixed_k = fixed_k(bundle, self.vllm_config)
        fixed = None if self.fixed_k is None else Always(self.fixed_k)
        self.engine = OverlappedEngine(self.graphs, self.shape, speculative, fixed, owns_blocks=False)
        # vLLM's names of the requests that it has not ended, and the engine's numbers
        self.numbers: dict[str, int] = {}
        # their prompts and parameters, and what those have drawn that have lost their blocks
        self.requests, self.drawn = dict[str, tuple[tuple[int, ...], Any]](), dict[str, list[int]]()
        self.grammars, self.masked = Grammars(self.vllm_config), dict[str, Grammar]()
        # the requests that could not go on, until vLLM gets the step's output
        self.failed = set[str]()
        # those whose grammar allows no id, until their step has run
        self.dead_ends = set[str]()

    def get_kv_cache_spec(self) -> dict[str, Any]:
        # nothing is stored in it: its blocks are those of the graphs' pools
        return {"blocks": FullAttentionSpec(KEY_TILE, num_kv_heads=1, head_size=1, dtype=torch.float32)}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]

    def set_kv_cache_layout(self, kv_cache_layout: str) -> None:
        """The caches are the graphs' own."""

    def determine_available_memory(self) -> int:
        return 1 << 40

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """The caches are the graphs' own."""

    def update_max_model_len(self, max_model_len: int) -> None:
        """The bundle's length holds."""

    @passed_on()
    def compile_or_warm_up_model(self) -> CompilationTimes:
        begin = time.perf_counter()
        with self.graphs.compiled_apart():
            if self.engine.speculative and self.fixed_k is None:
                self.engine.step_k = Paying(step_seconds(self.graphs, self.shape))
            keys = [key for key in self.bundle.plan.by_key if self._runs(key)]
            with progress(f"compiling {self.bundle.path}", len(keys), "graphs") as task:
                for key in keys:
                    self.graphs.prepare(key)
                    task.advance()
        seconds = time.perf_counter() - begin
        print(self._served(seconds), file=sys.stderr, flush=True)
        return CompilationTimes(language_model=seconds, encoder=0.0)

    def _runs(self, key: GraphKey) -> bool:
        """Whether the engine may run a graph."""
        if not self.shape.has(key):
            return False
        if key.is_prefill:
            return self.engine.apart or key.stage is Stage.PREFILL
        return key.k in self.engine.ks(asking=key.asking)

    def _served(self, seconds: float) -> str:
        bundle, spec = self.bundle, self.bundle.spec
        by = f"{self.drafter}, {bundle.title('draft')}" if spec.has_draft else self.drafter
        ks = ", ".join(map(str, sorted(self.engine.ks())))
        chosen = "of every step" if self.fixed_k is not None else "as it pays"
        drafts = f"{by}, k {ks} {chosen}" if self.engine.speculative else "none: the target alone"
        return (
            f"trnspec serves {bundle.path}, every digest verified\n"
            f"  target   {bundle.title('target')}\n"
            f"  drafts   {drafts}\n"
            f"  slots    {spec.batch}, each of {spec.max_len} tokens, prompt and answer together\n"
            f"  blocks   {self.shape.pool - 1} of {KEY_TILE} tokens\n"
            f"  runner   {self.platform}, {spec.dtype}, tp {spec.tp}; graphs ready in {seconds:.1f} s"
        )

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """A step of the running requests, then pieces of prompts; with masks, `sample_tokens` does it."""
        # a request that was cancelled in vLLM's queue never came here
        for name in scheduler_output.finished_req_ids & self.requests.keys():
            self._forget(name)
        for name in (scheduler_output.preempted_req_ids or set()) & self.numbers.keys():
            self.drawn[name] = self.engine.preempt(self.numbers.pop(name))
        if not scheduler_output.num_scheduled_tokens:
            return StepOutput([], {}, begun=self.engine.begun)
        for data in scheduler_output.scheduled_new_reqs:
            self.requests[data.req_id] = tuple(data.prompt_token_ids or ()), data.sampling_params
        if scheduler_output.has_structured_output_requests:
            self.waiting = scheduler_output
            return None
        return self._serve(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """The step that waited for its masks, a row for each draft that vLLM counts with and one more."""
        place = 0
        for name in grammar_output.structured_output_request_ids if grammar_output else ():
            mask = grammar_output.grammar_bitmask[place]  # type: ignore[union-attr]
            grammar = self._grammar(name)
            if not mask.any():
                # its rows are computed even so: vLLM may share its blocks from this step on
                self.dead_ends.add(name)
                mask, grammar.structured = np.full_like(mask, -1), None
            grammar.next = mask
            place += 1 + len(self.waiting.scheduled_spec_decode_tokens.get(name, ()))
        return self._serve(self.waiting)

    def _serve(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        cached = scheduler_output.scheduled_cached_reqs
        self._grow(cached)
        # one that gets blocks again is not seated yet
        going = [self.numbers[name] for name in cached.req_ids if name in self.numbers]
        if not (self.engine.begun or all(map(self.engine.filling, going))):
            self.metrics.begin()
            self.engine.begin(masks=True)
        # the work after the step that runs is handed over before that step ends
        pieces = self._pieces(scheduler_output)
        for number, length in pieces.items():
            self.engine.fill(number, length)
        if not (pieces or self.engine.slots.full):
            # the next step would stand between a request that comes meanwhile and its first id
            while (left := self.engine.left_s - _LEAD_S) > 0 and not arrivals.wait(min(left, _POLL_S)):
                pass
        if not (pieces or self._awaited):
            self.engine.follow()
        events = self._end()
        while pieces and self.engine.begun:
            events += self._end()
        if not (pieces or self.engine.begun or self._awaited):
            # vLLM and the clients get the ids while the next step runs; a first id goes out before anything else
            self.engine.begin()
            if self.engine.begun:
                self.metrics.begin()
        for name in self.dead_ends & self.requests.keys():
            self._fail(name, "its grammar allows no id here, not even the end")
        self.dead_ends.clear()
        of_number = {event.number: event for event in events}
        self._uncount(scheduler_output, of_number)
        return self._output(scheduler_output, of_number)

    @property
    def _awaited(self) -> bool:
        """Whether a request that has come gets a slot before the next step."""
        return arrivals.waiting() and not self.engine.slots.full

    def _grow(self, cached: CachedRequestData) -> None:
        """Give running requests the blocks that vLLM has added."""
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks and name in self.numbers:
                self.engine.grow(self.numbers[name], blocks[0])

    def _pieces(self, scheduler_output: SchedulerOutput) -> dict[int, int]:
        """The engine's numbers of the requests that have ids to cache, and how many of each are to be there."""
        cached = scheduler_output.scheduled_cached_reqs
        new = scheduler_output.scheduled_new_reqs
        places = {data.req_id: (data.num_computed_tokens, data.block_ids) for data in new}
        computed = {name: count for name, (count, _) in places.items()}
        for name, count, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            computed[name] = count
            if name in cached.resumed_req_ids and blocks:
                places[name] = count, blocks
        for name, (count, blocks) in places.items():
            if name in self.requests and name not in self.failed:
                self._place(name, blocks[0], count)
        scheduled = scheduler_output.num_scheduled_tokens
        numbers = {self.numbers[name]: computed[name] + scheduled[name] for name in scheduled if name in self.numbers}
        return {number: length for number, length in numbers.items() if self.engine.filling(number)}

    def _place(self, name: str, blocks: Sequence[int], cached: int) -> None:
        """Seat a request that has arrived, or that has got blocks again."""
        ids, sampling = self.requests[name]
        grammar = self._grammar(name) if sampling is not None and sampling.structured_outputs else None
        request = engine_request(self.shape, ids, sampling, grammar)
        self.numbers[name] = self.engine.place(request, blocks, cached, self.drawn.pop(name, []))

    def _forget(self, name: str) -> None:
        if name in self.numbers:
            self.engine.cancel(self.numbers.pop(name))
            self.metrics.publish()
        for held in (self.requests, self.masked, self.drawn):
            held.pop(name, None)  # type: ignore[attr-defined]

    def _fail(self, name: str, sentence: str) -> None:
        """End a request alone, with an error."""
        print(f"trnspec: request {name} ends with an error: {sentence}", file=sys.stderr, flush=True)
        self._forget(name)
        self.failed.add(name)

    def _end(self) -> list[Event]:
        """Read the running work: a step, or a chunk of a prompt."""
        if not self.engine.begun:
            return []
        prompt = self.engine.begun_chunk
        events = self.engine.step()
        self.metrics.end(prompt, events, followed=self.engine.begun)
        return events

    def _uncount(self, scheduler_output: SchedulerOutput, events: dict[int, Event]) -> None:
        """Report to vLLM how many placeholders had no draft, or one behind the request's end.

        It counts them like drafts that a grammar refuses.
        """
        scheduler_output.num_invalid_spec_tokens = {
            name: max(0, len(placeholders) - (event.drafted if len(event.ids) > event.accepted else len(event.ids) - 1))
            for name, placeholders in scheduler_output.scheduled_spec_decode_tokens.items()
            if (event := events.get(self.numbers.get(name, -1)))
        }

    def _grammar(self, name: str) -> Grammar:
        """A request's grammar, made when its first mask comes."""
        if name not in self.masked:
            self.masked[name] = self.grammars.of(name, self.requests[name][1])
        return self.masked[name]

    def _output(self, scheduler_output: SchedulerOutput, events: dict[int, Event]) -> ModelRunnerOutput:
        names, nothing = list(scheduler_output.num_scheduled_tokens), Event(-1, [])
        for name in names:
            ended = events.get(self.numbers.get(name, -1), nothing).result
            if ended and ended.error:
                self._fail(name, ended.error)
        of_names = [events.get(self.numbers.get(name, -1), nothing) for name in names]
        ids = [event.ids for event in of_names]
        failed, self.failed = self.failed, set()
        return StepOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=ids,
            logprobs=_logprobs(of_names) if any(event.scores for event in of_names) else None,
            failed=failed,
            begun=self.engine.begun,
            prompt_logprobs_dict={
                name: _of_prompt(self.requests[name][0], event.prompt_scores)
                for name, event in zip(names, of_names, strict=True)
                if event.prompt_scores
            },
        )

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Placeholders: vLLM counts with them, the fused graph drafts by itself.

        As many as the step that runs already has drafts: vLLM keeps no books of drafts for one of the target alone.
        """
        k = self.shape.k if self.engine.begun_k is None else self.engine.begun_k
        if not (self.engine.speculative and k):
            return None
        running = list(self.numbers)
        return DraftTokenIds(running, [[-1] * k for _ in running])

    def execute_dummy_batch(self) -> None:
        """No other rank waits for a step."""

    def synchronize_device(self) -> None:
        """A step has ended when it returns."""

    def shutdown(self) -> None:
        if hasattr(self, "metrics"):
            print(f"trnspec: worker {os.getpid()} ends; {self.metrics.summary()}", file=sys.stderr, flush=True)
            self.graphs.close()
            del self.engine, self.graphs
        # vLLM empties an accelerator's caches when any platform but its own CPU's ends; there is none here
        torch.accelerator.empty_cache = torch.accelerator.empty_host_cache = lambda: None


def _logprobs(events: list[Event]) -> LogprobsLists:
    """The emitted tokens' scores; requests without logprobs have zeros, which are ignored."""
    ids = [token for event in events for token in event.ids]
    scores = [score for e in events for score in e.scores or [Score(0.0, 0)] * len(e.ids)]
    ends = list(itertools.accumulate(len(event.ids) for event in events))
    return LogprobsLists(*_table(ids, scores), [0, *ends])


def _of_prompt(ids: Sequence[int], scores: Sequence[Score]) -> LogprobsTensors:
    """The scores of a prompt's ids from the second on."""
    return LogprobsTensors(*map(torch.from_numpy, _table(ids[1:], scores)))


def _table(ids: Sequence[int], scores: Sequence[Score]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A row for each id, it first and the best ids after it: ids, log-probabilities; and the id's rank."""
    width = 1 + max((len(score.best) for score in scores), default=0)
    tokens, logprobs = np.zeros((len(ids), width), np.int32), np.zeros((len(ids), width), np.float32)
    for row, (token, score) in enumerate(zip(ids, scores, strict=True)):
        pairs = [(token, score.logprob), *score.best]
        tokens[row, : len(pairs)], logprobs[row, : len(pairs)] = zip(*pairs, strict=True)
    return tokens, logprobs, np.array([score.rank for score in scores], np.int32)
