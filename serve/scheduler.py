"""vLLM's scheduler for an engine that steps all decoding requests at once; a request that failed ends with an error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput


@dataclass
class StepOutput(ModelRunnerOutput):
    """A step's output, and the ids of the requests that ended in it with an error."""

    failed: set[str] = field(default_factory=set)


class BundleScheduler(Scheduler):
    """Decoding requests come first and all of them; prefill chunks get the rest of the token budget."""

    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # the next step may be launched before this one is read
        self.num_lookahead_tokens = self.num_spec_tokens + 1

    def schedule(self, throttle_prefills: bool = False) -> Any:
        budget = self.max_num_scheduled_tokens
        self.running.sort(key=lambda request: request.is_prefill_chunk)
        if chunk := self.scheduler_config.long_prefill_token_threshold:
            # a chunk costs its whole graph: what decoding leaves of its share of the budget is not one
            decoding = (request for request in self.running if not request.is_prefill_chunk)
            rows = sum(request.num_tokens_with_spec - request.num_computed_tokens for request in decoding)
            self.max_num_scheduled_tokens = min(budget, chunk + rows)
        output = super().schedule(throttle_prefills)
        self.max_num_scheduled_tokens = budget
        return output

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        super().update_draft_token_ids(draft_token_ids)
        # vLLM strips the placeholders of a request with a grammar, and would not count its drafts
        for name, placeholders in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(name)
            if request and not (request.is_finished() or request.is_prefill_chunk):
                request.spec_token_ids = placeholders

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        failed: set[str] = getattr(model_runner_output, "failed", set())
        for name in failed & self.requests.keys():
            # the blocks of a failed request may hold NaN: no other request may share them
            groups = self.kv_cache_manager.get_block_ids(name)
            self.kv_cache_manager.evict_blocks({block for group in groups for block in group})
        # vLLM ends these with a 500, or an error event in a stream
        self.grammar_compile_error_reqs |= failed
        return super().update_from_output(scheduler_output, model_runner_output)
