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
from model.serving.engine import Engine
from model.serving.ready import shape_of
from model.serving.request import Request
from model.serving.runtime import Graphs
from model.serving.switching import find_table
from serve.allowed import engine_params
from serve.metrics import Metrics
from serve.platform import served_bundle

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput


class BundleWorker(WorkerBase):
    """Continuous batching over our engine. vLLM ends requests: it cuts at stops, ends and limits inside a block.

    vLLM admits no more requests than it has blocks, and a bundle has as many slots; so the engine always has one free.
    """

    def init_device(self) -> None:
        self.device = torch.device("cpu")

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        bundle = open_bundle(served_bundle().path)
        self.bundle, self.shape, self.graphs = bundle, shape_of(bundle), Graphs(bundle)
        self.engine = Engine(self.graphs, self.shape, table=find_table(bundle.path, None))
        self.numbers: dict[str, int] = {}
        self.metrics = Metrics()

    def get_kv_cache_spec(self) -> dict[str, Any]:
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
        graphs = [(tag, bucket) for bucket in self.shape.buckets for tag in (PREFILL, *self.engine.tags)]
        for i, (tag, bucket) in enumerate(graphs, 1):
            print(f"trnspec: graph {i} of {len(graphs)}, {tag}, bucket {bucket}", file=sys.stderr)
            self.graphs.prepare(tag, bucket)
        seconds = time.perf_counter() - begin
        print(self._serving(seconds), file=sys.stderr)
        return CompilationTimes(language_model=seconds, encoder=0.0)

    def _serving(self, seconds: float) -> str:
        names = {role: entry["name"] for role, entry in self.bundle["models"].items()}
        drafts = f"{names['draft']}, {self.shape.k} drafts a step" if self.engine.speculative else "none"
        table = self.engine.table.source if self.engine.table else "always"
        return (
            f"trnspec serves {self.bundle.path}, every digest verified\n"
            f"  target   {names['target']}\n"
            f"  draft    {drafts}; speculation: {table}\n"
            f"  slots    {self.shape.batch}, each of {self.shape.max_len} tokens, prompt and answer together\n"
            f"  runner   CPU, {self.bundle['dtype']}, tp {self.bundle['tp']}; graphs ready in {seconds:.1f} s"
        )

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        for request in scheduler_output.finished_req_ids:
            if (number := self.numbers.pop(request, None)) is not None:
                self.engine.cancel(number)
        new = scheduler_output.scheduled_new_reqs
        for data in new:
            self.numbers[data.req_id] = self.engine.add(self._request(data))
        scheduled = list(scheduler_output.num_scheduled_tokens)
        if not scheduled:
            return EMPTY_MODEL_RUNNER_OUTPUT
        ids: dict[int, list[int]] = {self.numbers[r]: [] for r in scheduled}
        # the prompts of new requests first; alone, they answer at once
        for prompt in [True] * len(new) + [False] * bool(scheduler_output.scheduled_cached_reqs.req_ids):
            self.metrics.begin()
            events = self.engine.step()
            self.metrics.end(prompt, events, self.engine)
            for event in events:
                ids[event.number] += event.ids
        return ModelRunnerOutput(
            req_ids=scheduled,
            req_id_to_index={r: i for i, r in enumerate(scheduled)},
            sampled_token_ids=[ids[self.numbers[r]] for r in scheduled],
        )

    def _request(self, data: NewRequestData) -> Request:
        return Request(tuple(data.prompt_token_ids or ()), engine_params(data.sampling_params), self.shape.max_len)

    def take_draft_token_ids(self) -> DraftTokenIds:
        """Placeholders: vLLM counts with them, the fused graph drafts by itself."""
        running = list(self.numbers)
        return DraftTokenIds(running, [[-1] * self.shape.k for _ in running])

    def execute_dummy_batch(self) -> None:
        """No other rank waits for a step."""

    def synchronize_device(self) -> None:
        """A step has ended when it returns."""

    def shutdown(self) -> None:
        print(f"trnspec: worker {os.getpid()} ends; {self.metrics.summary()}", file=sys.stderr)
        del self.engine, self.graphs
        # vLLM empties an accelerator's caches when any platform but its own CPU's ends; there is none here
        torch.accelerator.empty_cache = torch.accelerator.empty_host_cache = lambda: None
