"""vLLM's scheduler, which also ends a request that the worker could not go on with; the others run on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput


@dataclass
class StepOutput(ModelRunnerOutput):
    """A step's output, and the names of the requests that ended in it with an error."""

    failed: set[str] = field(default_factory=set)


class BundleScheduler(Scheduler):
    """A request has blocks for a second step, which may begin before the first is read.

    A failed request ends as one whose grammar does not compile: its client gets a 500, or an error in the stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_lookahead_tokens = self.num_spec_tokens + 1

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        failed: set[str] = getattr(model_runner_output, "failed", set())
        for name in failed & self.requests.keys():
            # what the engine has cleared is no prompt's beginning any more
            held = self.kv_cache_manager.get_block_ids(name)
            self.kv_cache_manager.evict_blocks({block for group in held for block in group})
        self.grammar_compile_error_reqs |= failed
        return super().update_from_output(scheduler_output, model_runner_output)
