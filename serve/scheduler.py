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
    """A failed request ends as one whose grammar does not compile: its client gets a 500, or an error in the stream."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.grammar_compile_error_reqs |= getattr(model_runner_output, "failed", set())
        return super().update_from_output(scheduler_output, model_runner_output)
