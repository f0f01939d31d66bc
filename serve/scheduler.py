"""vLLM's scheduler for an engine that steps all decoding requests at once; a request that failed ends with an error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from serve import platform
from serve.grammar import Grammar


@dataclass
class StepOutput(ModelRunnerOutput):
    """A step's output, and the requests that ended in it: with an error and its sentence, or at a stop string."""

    failed: dict[str, str] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)


class BundleScheduler(Scheduler):
    """Every step has all decoding requests; one request's prefill chunk gets a budget of its own.

    The order of `running` is vLLM's, by which it preempts the request that was admitted last.
    """

    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # a step has rows for k drafts, without speculation too, and the next one may be launched before it is read
        self.num_lookahead_tokens = platform.served_bundle().spec.k + 1

    def schedule(self, throttle_prefills: bool = False) -> Any:
        budget = self.max_num_scheduled_tokens
        if chunk := self.scheduler_config.long_prefill_token_threshold:
            # a chunk costs its full graph: tokens that decoding leaves of its share are not used for one
            decoding = (request for request in self.running if not request.is_prefill_chunk)
            rows = sum(request.num_tokens_with_spec - request.num_computed_tokens for request in decoding)
            self.max_num_scheduled_tokens = min(budget, chunk + rows)
        output = super().schedule(throttle_prefills)
        self.max_num_scheduled_tokens = budget
        new = (self.requests[data.req_id] for data in output.scheduled_new_reqs)
        masked = (request for request in new if request.use_structured_output)
        output.grammars = {request.request_id: Grammar(request, self.structured_output_manager) for request in masked}
        return output

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        super().update_draft_token_ids(draft_token_ids)
        # vLLM strips the placeholders of a request with a grammar, and would not count its drafts
        for name, placeholders in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(name)
            if request and not (request.is_finished() or request.is_prefill_chunk):
                request.spec_token_ids = placeholders

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        failed: dict[str, str] = getattr(model_runner_output, "failed", {})
        self._stopped: set[str] = getattr(model_runner_output, "stopped", set())
        for name in failed.keys() & self.requests.keys():
            # the blocks of a failed request may hold NaN: no other request may share them
            groups = self.kv_cache_manager.get_block_ids(name)
            self.kv_cache_manager.evict_blocks({block for group in groups for block in group})
        # vLLM ends these with a 500, or an error event in a stream
        self.grammar_compile_error_reqs |= failed.keys()
        by_client = super().update_from_output(scheduler_output, model_runner_output)
        for output in (output for outputs in by_client.values() for output in outputs.outputs):
            output.stop_reason = failed.get(output.request_id, output.stop_reason)
        return by_client

    def _update_request_with_output(self, request: Any, new_token_ids: Any, is_stale: bool = False) -> Any:
        ids, ended = super()._update_request_with_output(request, new_token_ids, is_stale)
        if request.request_id in self._stopped and not ended:
            # the API process finds the stop string and reports it as the reason
            request.status, ended = RequestStatus.FINISHED_LENGTH_CAPPED, True
        return ids, ended
