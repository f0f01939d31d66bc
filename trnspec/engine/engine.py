"""The host loop: schedule, run, postprocess. A request is assigned a slot; a step runs a batch and returns events."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from model.errors import UserError
from model.graph_io import StepOutputs, mask_words
from model.graph_key import Stage
from model.logits_processors import FORBIDDEN
from model.logprobs import TOP
from trnspec.engine import ngram
from trnspec.engine.adaptive_k import AdaptiveK
from trnspec.engine.config import Chunk, EngineConfig
from trnspec.engine.masks import ConstrainedDraft, mask_fn
from trnspec.engine.request import ERROR, Request, Result, Score
from trnspec.engine.slots import Batch, Slot, SlotTable, prompt_inputs
from trnspec.runtime.runner import Runner


@dataclass(frozen=True)
class Event:
    """The output of one step for one request: its new tokens, and its result if it has finished.

    `accepted` also counts drafts after the request's last token. `scores` are the log-probabilities of the new tokens,
    `prompt_scores` those of the prompt, in the event of the first token.
    """

    number: int
    ids: list[int]
    result: Result | None = None
    drafted: int = 0
    accepted: int = 0
    scores: tuple[Score, ...] = ()
    prompt_scores: tuple[Score, ...] = ()


class Engine:
    """Continuous batching over a runner. A request's tokens do not depend on the order or on other requests.

    A prompt longer than the largest chunk is prefilled in chunks, with decode steps of the other requests between
    them. `step_k` chooses the k of each step, by default the largest. `propose(ids, limit)` returns host-side drafts.
    Without `owns_blocks` an outer scheduler allocates the KV blocks.
    """

    def __init__(
        self, runner: Runner, config: EngineConfig, speculative: bool = True, step_k: AdaptiveK | None = None,
        propose: Callable[[Sequence[int], int], list[int]] = ngram.propose, owns_blocks: bool = True,
    ) -> None:  # fmt: skip
        self.runner, self.config, self.speculative = runner, config, speculative and config.k > 0
        self.step_k = step_k if step_k and self.speculative else AdaptiveK([config.k if self.speculative else 0])
        self.propose = propose if config.host_drafts and self.speculative else None
        self.slots, self.words = SlotTable(config.batch), mask_words(config.vocab_size)
        # block 0 is the null block
        self.owns_blocks, self._free_blocks = owns_blocks, list(range(config.pool - 1, 0, -1))
        self._waiting: deque[tuple[int, Request]] = deque()
        self._numbers = itertools.count()
        # time at which the outputs of the last batch were read; None if no request is active
        self._last_read: float | None = None
        # whether a decode step comes before the next chunk
        self._decode_next = False

    def ks(self, k_limit: int | None = None, full_sampling: bool = False, to_end: bool = True) -> set[int]:
        """The k of each graph that requests with this draft limit may need; `to_end` includes steps near max_len."""
        limits = {k if k_limit is None else min(k_limit, k) for k in self.step_k.ks}
        # the host may have fewer drafts than it may propose, and the last tokens have no room for drafts
        if self.propose or to_end:
            limits |= set(range(max(limits)))
        return {self.config.graph_k(limit, full_sampling) for limit in limits}

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self.slots.active)

    def add(self, request: Request) -> int:
        """Queue a request that `check` accepts, and return the number that its events carry."""
        number = next(self._numbers)
        self._waiting.append((number, request))
        return number

    def cancel(self, number: int) -> None:
        """Remove a request, waiting, active or finished; it has no more events."""
        self._waiting = deque(w for w in self._waiting if w[0] != number)
        self._release(number)

    def step(self) -> list[Event]:
        """Run one batch, a prefill chunk or a decode step, and return its events."""
        decode = self._schedule_step() if self._decode_next else None
        self._decode_next = False
        batch = decode or self._schedule_prompt() or self._schedule_step()
        return self._postprocess(*self._run(batch)) if batch else []

    def run(self, requests: Iterable[Request]) -> list[Result]:
        """Run these requests to their ends; UserError if the engine has other requests."""
        if self.busy:
            raise UserError("this engine is serving requests already; step it until it is idle, or make a new one")
        numbers, results = [self.add(request) for request in requests], dict[int, Result]()
        try:
            while self.busy:
                results |= {event.number: event.result for event in self.step() if event.result}
        finally:
            for number in numbers:
                self.cancel(number)
        return [results[number] for number in numbers]

    def _schedule_prompt(self) -> Batch | None:
        """A chunk of the prompt in prefill, or of the request that has waited longest, if it can be admitted."""
        slot = next((slot for slot in self.slots.active if slot.prefilling), None) or self._admit()
        if slot is None:
            return None
        batch = self._next_chunk(slot, slot.known)
        self._decode_next = slot.prefilling
        return batch

    def _admit(self) -> Slot | None:
        """Admit the request that has waited longest, with KV blocks for its maximum length."""
        if not self._waiting or self.slots.full:
            return None
        number, request = self._waiting[0]
        count = self.config.blocks(len(request.ids) + request.max_new_tokens)
        if count > len(self._free_blocks):
            return None
        self._waiting.popleft()
        blocks = tuple(self._free_blocks.pop() for _ in range(count))
        return self.slots.allocate(number, request, mask_fn(request, self.config.vocab_size), blocks=blocks)

    def _release(self, number: int) -> None:
        if self.owns_blocks and (slot := self.slots.get(number)):
            self._free_blocks += slot.blocks[::-1]
        self.slots.free(number)
        if not self.busy:
            self._last_read = None

    def _next_chunk(self, slot: Slot, length: int) -> Batch:
        """The next chunk of a slot's first `length` tokens."""
        chunk = self.config.chunk(slot.cached, length, slot.request.prompt_logprobs is not None)
        slot.cached = chunk.end
        return Batch((slot,), chunk)

    def _schedule_step(self) -> Batch | None:
        """A decode step of all requests whose prefill has ended."""
        slots = tuple(self.slots.decoding)
        if not slots:
            return None
        limits, drafts = self._limits(slots), tuple[list[int], ...]()
        constrained = {
            slot.index: ConstrainedDraft(slot.allowed, slot.result.ids, limit, self.words)
            for slot, limit in zip(slots, limits, strict=True)
            if slot.allowed
        }
        if self.propose:
            proposed = (self.propose(slot.ids, limit) for slot, limit in zip(slots, limits, strict=True))
            masked = (constrained.get(slot.index) for slot in slots)
            drafts = tuple(c.follow(d) if c else d for c, d in zip(masked, proposed, strict=True))
            limits = tuple(map(len, drafts))
        full_sampling = any(slot.request.full_sampling for slot in slots)
        return Batch(slots, None, self.config.graph_k(max(limits), full_sampling), limits, drafts, constrained)

    def _limits(self, slots: tuple[Slot, ...]) -> tuple[int, ...]:
        """The draft limit of each request: the drafts and the token after them must fit in `max_len`."""
        k, last = self.step_k.choose(), self.config.max_len - 1
        limits = (k if slot.request.k_limit is None else slot.request.k_limit for slot in slots)
        return tuple(min(k, limit, last - 1 - slot.position) for slot, limit in zip(slots, limits, strict=True))

    def _run(self, batch: Batch) -> tuple[Batch, StepOutputs]:
        """Launch a batch; returns it with its final draft limits, and the outputs."""
        self._last_read = self._last_read or time.perf_counter()
        if chunk := batch.chunk:
            slot = batch.slots[0]
            inputs = prompt_inputs(slot, chunk, self.config.vocab_size)
            return batch, self.runner.run(inputs.graph(slot.request.prefill, self.config.k, chunk.keys), inputs)
        k, bucket = batch.k, self.config.bucket(batch.end)
        if batch.full_sampling and any(batch.limits) and not self.config.host_drafts:
            return self._run_split(batch, bucket)
        rows = 1 + k if self.config.host_drafts or batch.full_sampling else 1
        masks = batch.masks(self.config.batch, self.words)
        inputs = self.slots.step_inputs(batch.limits, bucket, masks, batch.drafts, rows)
        stage = Stage.VERIFY if batch.full_sampling else Stage.STEP
        return batch, self.runner.run(inputs.graph(stage, k, bucket), inputs)

    def _run_split(self, batch: Batch, bucket: int) -> tuple[Batch, StepOutputs]:
        """A full-sampling step with a draft model: draft, follow the drafts as far as the masks allow, verify.

        Returns the batch with the limits that are left. Without masks the host reads no draft.
        """
        k, masks = batch.k, batch.masks(self.config.batch, self.words)
        inputs = self.slots.step_inputs(batch.limits, bucket, masks)
        candidates = self.runner.draft(inputs.graph(Stage.DRAFT, k, bucket), inputs)
        if batch.constrained:
            # an id below 0 is no draft and never accepted
            candidates_BN = np.maximum(candidates, 0)
            for index, constrained in batch.constrained.items():
                # forced ids may be outside of the draft's vocabulary
                candidates_BN[index, 1 : 1 + len(constrained.drafts)] = constrained.drafts
                constrained.propose(candidates_BN[index, 1:].tolist())
            lengths = {index: len(constrained.drafts) for index, constrained in batch.constrained.items()}
            limits = (min(n, lengths.get(s.index, k)) for s, n in zip(batch.slots, batch.limits, strict=True))
            batch, candidates = replace(batch, limits=tuple(limits)), candidates_BN
            masks = batch.masks(self.config.batch, self.words)
        inputs = self.slots.step_inputs(batch.limits, bucket, masks, rows=k + 1)._replace(input_ids=candidates)
        return batch, self.runner.run(inputs.graph(Stage.VERIFY, k, bucket), inputs)

    def _postprocess(self, batch: Batch, outputs: StepOutputs) -> list[Event]:
        """Read a batch's outputs; a request that was cancelled meanwhile has no event."""
        accepted_BN = np.asarray(outputs.accepted_tokens)
        # time since the previous batch was read, including work on the host
        now = time.perf_counter()
        seconds, self._last_read = now - (self._last_read or now), now
        if batch.chunk:
            slot = batch.slots[0]
            return self._prefilled(slot, batch.chunk, outputs) if self.slots.is_current(slot) else []
        events = []
        for slot, limit in zip(batch.slots, batch.limits, strict=True):
            if self.slots.is_current(slot):
                ids = [token for token in accepted_BN[slot.index].tolist() if token != -1]
                slot.result.count(limit, len(ids) - 1)
                slot.position += len(ids)
                scores = _scores(slot.request.logprobs, outputs, slot.index, slice(len(ids)))
                events.append(self._emit(slot, Event(slot.number, ids, None, limit, len(ids) - 1, scores)))
        counts = [(event.drafted, event.accepted) for event in events]
        self.step_k.ended(batch.k, None if batch.full_sampling else seconds, counts)
        return events

    def _prefilled(self, slot: Slot, chunk: Chunk, outputs: StepOutputs) -> list[Event]:
        """The first event of a request, after the last chunk of its prompt."""
        request, result, last = slot.request, slot.result, chunk.end == slot.known
        row = 0
        if request.prompt_logprobs is not None:
            row = chunk.size - 1
            # after a preemption the last rows are sampled tokens, whose scores have been returned
            if slot.known == len(request.ids):
                rows = slice(len(result.prompt_scores) - chunk.first, chunk.size - last)
                result.prompt_scores += _scores(request.prompt_logprobs, outputs, 0, rows)
        if not last:
            return []
        slot.position = slot.known
        scores = _scores(request.logprobs, outputs, 0, slice(row, row + 1))
        token = int(np.asarray(outputs.accepted_tokens)[0, 0])
        return [self._emit(slot, Event(slot.number, [token], None, 0, 0, scores, result.prompt_scores))]

    def _emit(self, slot: Slot, new: Event) -> Event:
        """The event with the new tokens up to the request's end; a request that has ended releases its slot."""
        slot.token = new.ids[-1]
        emitted, result = slot.append(new.ids, new.scores), slot.result
        if not result.finish_reason and slot.position >= self.config.max_len - 1:
            result.finish_reason = "context"
        if result.finish_reason:
            result.seconds = time.perf_counter() - slot.admitted
            self._release(slot.number)
        if result.finish_reason == ERROR:
            self.runner.clear(slot.index, slot.blocks)
        return replace(
            new, ids=emitted, result=result if result.finish_reason else None, scores=new.scores[: len(emitted)]
        )


def _scores(best: int | None, outputs: StepOutputs, row: int, tokens: slice) -> tuple[Score, ...]:
    """Log-probabilities of a row's tokens, each with the `best` most likely ids; empty if not requested."""
    if best is None:
        return ()
    values = np.asarray(outputs.scores)[row, tokens]
    # the log-probability of an excluded token
    values = np.where(values < FORBIDDEN / 2, -np.inf, values).tolist()
    return tuple(
        Score(logprob, int(rank), tuple(zip(map(int, more[TOP : TOP + best]), more[:best], strict=True)))
        for logprob, rank, *more in values
    )
