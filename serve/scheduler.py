"""vLLM's scheduler, with two additions: first ids come first, and a request that cannot go on ends alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

from serve import arrivals


@dataclass
class StepOutput(ModelRunnerOutput):
    """A step's output, the names of the requests that ended in it with an error, and whether the next step runs."""

    failed: set[str] = field(default_factory=set)
    begun: bool = False


class BundleScheduler(Scheduler):
    """New requests come one in a call, and alone unless a step has begun, so that a first id goes out when it is there.

    Those that run are not passed over while a prompt among them has chunks left, nor for a request that has no blocks
    yet, nor more often in a row than there are slots.

    A request has blocks for a second step, which may begin before the first is read. A failed request ends as one whose
    grammar does not compile: its client gets a 500, or an error in the stream.
    """

    max_num_active_reqs: int
    max_num_scheduled_tokens: int
    # whether the engine's next step runs, whether a request waits for blocks, and how often in a row those that run
    # were passed over
    _begun, _stuck, _passed = False, False, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_lookahead_tokens = self.num_spec_tokens + 1

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        arrivals.known(request.request_id)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        most, alone, budget = self.max_num_active_reqs, False, self.max_num_scheduled_tokens
        if piece := self.scheduler_config.long_prefill_token_threshold:
            # what is left of a part that is meant for steps would be a piece of its own, by a graph of its own
            self.max_num_scheduled_tokens = min(budget, piece + self._of_steps)
        # the engine's step is of all whose prompts have ended: chunks get what these leave of the budget
        self.running.sort(key=lambda request: request.is_prefill_chunk)
        if self._has_arrivals and len(self.running) < most:
            self.max_num_active_reqs = len(self.running) + 1
            chunks = any(request.is_prefill_chunk for request in self.running)
            alone = not (self._begun or self._stuck or chunks or self._passed == most)
        if alone:
            for request in self.running:
                request.next_decode_eligible_step = self.current_step + 2
        output = super().schedule(throttle_prefills)
        self.max_num_scheduled_tokens = budget
        self.max_num_active_reqs, self._passed = most, self._passed + 1 if alone else 0
        arrived = output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids
        # a request that waits for blocks lets those run that will free them
        self._stuck = not arrived and self._has_arrivals and len(self.running) < most
        return output

    @property
    def _of_steps(self) -> int:
        """The tokens of the requests whose prompts have ended."""
        ended = (request for request in self.running if not request.is_prefill_chunk)
        return sum(request.num_tokens_with_spec - request.num_computed_tokens for request in ended)

    @property
    def _has_arrivals(self) -> bool:
        """Whether a request waits for a place and for nothing else; one that has lost its blocks does."""
        return not all(self._is_blocked_waiting_status(request.status) for request in self.waiting)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._begun = getattr(model_runner_output, "begun", False)
        failed: set[str] = getattr(model_runner_output, "failed", set())
        for name in failed & self.requests.keys():
            # what the engine has cleared is no prompt's beginning any more
            held = self.kv_cache_manager.get_block_ids(name)
            self.kv_cache_manager.evict_blocks({block for group in held for block in group})
        self.grammar_compile_error_reqs |= failed
        return super().update_from_output(scheduler_output, model_runner_output)
