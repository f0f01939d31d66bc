"""The worker: vLLM's scheduler says who runs, our engine runs the bundle's graphs, blocks of ids go back."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from model.bundle.manifest import PREFILL
from model.bundle.opening import open_bundle
from model.progress import progress
from model.serving.engine import Engine, Event
from model.serving.ready import shape_of
from model.serving.runtime import Graphs
from model.serving.switching import find_table
from serve.allowed import engine_request
from serve.metrics import Metrics
from serve.platform import k_of_batch, served_bundle, speculates

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class BundleWorker(WorkerBase):
    """Continuous batching over our engine. vLLM ends requests: it cuts at stops, ends and limits inside a block.

    vLLM admits no more requests than it has blocks, and a bundle has as many slots; so the engine always has one free.
    """

    def init_device(self) -> None:
        self.device = torch.device("cpu")

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.bundle = bundle = open_bundle(served_bundle().path)
        self.shape, self.graphs, self.metrics = shape_of(bundle), Graphs(bundle), Metrics()
        table = find_table(bundle.path, None)
        speculative = speculates(bundle, self.vllm_config)
        self.engine = Engine(self.graphs, self.shape, speculative, table, self.metrics.record)
        # vLLM's names of the requests that it has not ended, and the engine's numbers
        self.numbers: dict[str, int] = {}

    def get_kv_cache_spec(self) -> dict[str, Any]:
        # nothing is stored in it: a block is a slot
        return {"slots": FullAttentionSpec(self.shape.max_len, num_kv_heads=1, head_size=1, dtype=torch.float32)}

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

    def compile_or_warm_up_model(self) -> CompilationTimes:
        begin = time.perf_counter()
        tags = (PREFILL, *self._step_tags())
        # rows that filter have graphs of their own
        names = [(tag, bucket, f) for bucket in self.shape.buckets for tag in tags for f in (False, True)]
        with progress(f"compiling {self.bundle.path}", len(names), "graphs") as task:
            for tag, bucket, filters in names:
                self.graphs.prepare(tag, bucket, filters)
                task.advance()
        seconds = time.perf_counter() - begin
        print(self._what_is_served(seconds), file=sys.stderr, flush=True)
        return CompilationTimes(language_model=seconds, encoder=0.0)

    def _step_tags(self) -> tuple[str, ...]:
        """The graphs of steps: with a schedule by batch, those of its k."""
        schedule = k_of_batch(self.bundle, self.vllm_config) if self.engine.speculative else None
        ks = [k for *_, k in schedule] if schedule else [None]
        return tuple(dict.fromkeys(tag for k in ks for tag in self.engine.tags(k)))

    def _what_is_served(self, seconds: float) -> str:
        names = {role: entry["name"] for role, entry in self.bundle["models"].items()}
        drafts = f"{names['draft']}, {self.shape.k} a step" if self.engine.speculative else "none: the target alone"
        when = f"when {self.engine.table.source} says so" if self.engine.table else "at every step"
        return (
            f"trnspec serves {self.bundle.path}, every digest verified\n"
            f"  target   {names['target']}\n"
            f"  drafts   {drafts}{', ' + when if self.engine.speculative else ''}\n"
            f"  slots    {self.shape.batch}, each of {self.shape.max_len} tokens, prompt and answer together\n"
            f"  runner   CPU, {self.bundle['dtype']}, tp {self.bundle['tp']}; graphs ready in {seconds:.1f} s"
        )

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        for name in scheduler_output.finished_req_ids:
            self.engine.cancel(self.numbers.pop(name))
        arrived = scheduler_output.scheduled_new_reqs
        for data in arrived:
            request = engine_request(self.shape, tuple(data.prompt_token_ids or ()), data.sampling_params)
            self.numbers[data.req_id] = self.engine.add(request)
        scheduled = list(scheduler_output.num_scheduled_tokens)
        if not scheduled:
            return EMPTY_MODEL_RUNNER_OUTPUT
        ids = {self.numbers[name]: list[int]() for name in scheduled}
        running = bool(scheduler_output.scheduled_cached_reqs.req_ids)
        # a graph for each new prompt; prompts that come alone answer at once
        most = scheduler_output.num_spec_tokens_to_schedule
        for prompt in [True] * len(arrived) + [False] * running:
            for event in self._step(prompt, running, most):
                ids[event.number] += event.ids
        return ModelRunnerOutput(
            req_ids=scheduled,
            req_id_to_index={name: place for place, name in enumerate(scheduled)},
            sampled_token_ids=[ids[self.numbers[name]] for name in scheduled],
        )

    def _step(self, prompt: bool, running: bool, most: int) -> list[Event]:
        self.metrics.begin(running)
        events = self.engine.step(most)
        self.metrics.end(prompt, events)
        return events

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Placeholders: vLLM counts with them, the fused graph drafts by itself."""
        if not self.engine.speculative:
            return None
        running = list(self.numbers)
        return DraftTokenIds(running, [[-1] * self.shape.k for _ in running])

    def execute_dummy_batch(self) -> None:
        """No other rank waits for a step."""

    def synchronize_device(self) -> None:
        """A step has ended when it returns."""

    def shutdown(self) -> None:
        if hasattr(self, "metrics"):
            print(f"trnspec: worker {os.getpid()} ends; {self.metrics.summary()}", file=sys.stderr, flush=True)
            del self.engine, self.graphs
        # vLLM empties an accelerator's caches when any platform but its own CPU's ends; there is none here
        torch.accelerator.empty_cache = torch.accelerator.empty_host_cache = lambda: None
