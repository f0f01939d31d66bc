"""The host loop: schedule, run, postprocess. Requests take slots, each step runs one graph, and events come out."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from model.cache import KEY_TILE
from model.errors import UserError
from model.graph_io import StepInputs, StepOutputs, mask_words
from model.graph_key import GraphKey, Stage
from model.logits_processors import FORBIDDEN
from model.logprobs import TOP
from trnspec.engine import ngram
from trnspec.engine.blocks import Blocks
from trnspec.engine.masked import followed, masks, run_halves, walks_of
from trnspec.engine.masks import limited
from trnspec.engine.request import ERROR, Chunk, Request, Result, Score, Shape
from trnspec.engine.slots import Slot, SlotTable, prompt_inputs
from trnspec.engine.step_k import Always, Ended, StepK
from trnspec.engine.work import Runner, Work


@dataclass(frozen=True)
class Event:
    """One step of one request: the ids that it keeps, and its result if it has ended.

    `k` is that of the step's graph; `drafted` and `accepted` count the request's drafts; the end of the request may cut
    some that were accepted. `scores` are those of the ids, if requested; those of a prompt come with its first id.
    """

    number: int
    ids: list[int]
    result: Result | None = None
    k: int = 0
    drafted: int = 0
    accepted: int = 0
    scores: tuple[Score, ...] = ()
    prompt_scores: tuple[Score, ...] = ()


# chunks whose draft's part may wait together, while other requests wait for their step: each takes about a tenth of the
# target's (demo pair; LOG.md, 2026-11-24), so that together they take no longer than one of these
_MOST_OWED = 8
Proposer = Callable[[Slot, int], list[int]]


def by_ngram(slot: Slot, most: int) -> list[int]:
    """Drafts from the slot's own ids."""
    return ngram.propose(slot.ids, most) if most else []


class Engine:
    """Continuous batching over a runner. A request's ids do not depend on the order or the neighbours.

    A prompt that is longer than the largest chunk runs in several, with a step of the other requests between two. Where
    the draft's part of a prompt is a graph of its own, it runs with the step behind the first id, which so waits for no
    draft; behind every eighth chunk where other requests wait for their step. That of a prompt of less than a block,
    which no other request can share, waits for the first step that drafts for it.

    `step_k` chooses the k of each step, by default always the bundle's largest. Where the host drafts, `propose`
    returns drafts for a slot, at most a given number, by default from the slot's own ids.
    """

    def __init__(
        self,
        runner: Runner,
        shape: Shape,
        speculative: bool = True,
        step_k: StepK | None = None,
        propose: Proposer | None = None,
        owns_blocks: bool = True,
    ) -> None:
        self.runner, self.shape, self.speculative = runner, shape, speculative and shape.k > 0
        self.step_k: StepK = (step_k or Always(shape.k)) if self.speculative else Always(0)
        self.propose = (propose or by_ngram) if shape.host_drafts and self.speculative else None
        self.slots, self.words = SlotTable(shape.batch), mask_words(shape.vocabulary)
        # the free blocks; None where they are given with each request
        self.blocks = Blocks(shape.pool) if owns_blocks else None
        self._waiting: deque[tuple[int, Request]] = deque()
        self._numbers = itertools.count()
        # since when the work of seated requests has run without a pause
        self._since: float | None = None
        # whether a step comes before the next chunk
        self._between = False
        # the draft's part of the chunks that have run, in order, with their slot
        self._owed: list[tuple[Slot, GraphKey, StepInputs]] = []
        # whether such a part was handed over behind the last step
        self._delayed = False

    @property
    def apart(self) -> bool:
        """Whether the draft's part of a prompt runs as a graph of its own: not where no step drafts."""
        return False

    def ks(self, k_limit: int | None = None, asking: bool = False) -> set[int]:
        """The k of every graph that a step of requests with this limit may run."""
        limits = {k if k_limit is None else min(k_limit, k) for k in self.step_k.ks}
        # the host may have fewer drafts than it may propose
        fewer = {k for k in (0, *self.shape.ks) if k < max(limits)} if self.propose else set()
        return {self.shape.graph_k(limit, asking) for limit in limits | fewer}

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or seated."""
        return bool(self._waiting or self.slots.seated)

    def add(self, request: Request) -> int:
        """Queue a request that `check` has passed; its number names it in events."""
        number = next(self._numbers)
        self._waiting.append((number, request))
        return number

    def cancel(self, number: int) -> None:
        """Forget a request, whether it waits, is seated or has ended; it has no more events."""
        self._waiting = deque(w for w in self._waiting if w[0] != number)
        self._leave(number)

    def step(self) -> list[Event]:
        """Run a chunk of the prompt of a request that has a slot, else a step of all whose prompts have ended."""
        work = self._schedule()
        return self._postprocess(*self._run(work)) if work else []

    def run(
        self, requests: Iterable[Request], on_tokens: Callable[[int, list[int]], None] | None = None
    ) -> list[Result]:
        """Serve these requests and no others; `on_tokens(index of the request, new ids)` is called after each step."""
        if self.busy:
            raise UserError("this engine is serving requests already; step it until it is idle, or make a new one")
        index = {self.add(request): i for i, request in enumerate(requests)}
        results = [Result() for _ in index]
        try:
            while self.busy:
                for event in self.step():
                    if on_tokens:
                        on_tokens(index[event.number], event.ids)
                    if event.result:
                        results[index[event.number]] = event.result
        finally:
            for number in index:
                self.cancel(number)
        return results

    def _schedule(self) -> Work | None:
        # a step between the chunks of a prompt
        first = self._schedule_step() if self._between else None
        self._between = False
        return first or self._schedule_prompt() or self._schedule_step()

    def _schedule_prompt(self) -> Work | None:
        """A chunk of the prompt that is being filled, or of the one that has waited longest, if it gets a place."""
        slot = next((slot for slot in self.slots.seated if slot.filling), None) or self._seat()
        if slot is None:
            return None
        work = self._chunk(slot, slot.known)
        self._between = slot.filling
        return work

    def _seat(self) -> Slot | None:
        """The slot of the request that has waited longest, if there is one, with blocks to its end."""
        if not self._waiting or self.slots.full:
            return None
        number, request = self._waiting[0]
        length = len(request.ids) + request.max_new_tokens
        blocks = self.blocks.take(self.shape.blocks(length)) if self.blocks else []
        if blocks is None:
            return None
        self._waiting.popleft()
        return self.slots.seat(number, request, limited(request, self.shape.vocabulary), blocks)

    def _leave(self, number: int) -> None:
        if self.slots.has(number):
            slot = self.slots.find(number)
            # its blocks may have other owners next, or be found by their ids
            if not _shares(slot):
                self._owed = [owed for owed in self._owed if owed[0] is not slot]
            if self.blocks:
                self.blocks.give(slot.blocks)
        self.slots.leave(number)

    def _chunk(self, slot: Slot, length: int) -> Work:
        """The next chunk of a slot's first `length` ids."""
        chunk = self.shape.chunk(slot.cached, length)
        slot.cached = chunk.last
        return Work((slot,), chunk=chunk)

    def _schedule_step(self) -> Work | None:
        """A step of all requests whose prompts have ended."""
        seated = tuple(self.slots.ready)
        if not seated:
            return None
        limits = self._limits(seated)
        walks, drafts = walks_of(seated, limits, self.words), tuple[list[int], ...]()
        if self.propose:
            proposed = (self.propose(slot, limit) for slot, limit in zip(seated, limits, strict=True))
            drafts = tuple(followed(d, walks.get(s.index)) for s, d in zip(seated, proposed, strict=True))
            limits = tuple(map(len, drafts))
        asking = any(slot.request.asking for slot in seated)
        return Work(seated, self.shape.graph_k(max(limits), asking), limits, drafts, walks)

    def _limits(self, seated: tuple[Slot, ...]) -> tuple[int, ...]:
        """The most drafts of each request in a step of all of these."""
        k, last = self.step_k.choose(seated), self.shape.max_len - 1
        # a step emits a token more than it accepts drafts, none of them past the last position
        return tuple(min(k, k if (most := s.request.k_limit) is None else most, last - 1 - s.position) for s in seated)

    def _run(self, work: Work) -> tuple[Work, StepOutputs]:
        """Run the graphs of some work; the work as it was done, and the outputs."""
        self._since = self._since or time.perf_counter()
        if self._due(work.k):
            self._fill_draft()
        if work.k is None:
            assert work.chunk
            return work, self._run_chunk(work.slots[0], work.chunk)
        k, work = work.k, self._timed(work)
        bucket = self._bucket(work)
        if work.asking and k and not self.shape.host_drafts:
            return run_halves(self.runner, self.slots, work, bucket, self.words)
        rows = 1 + k if self.shape.host_drafts else 1
        inputs = self.slots.step_inputs(
            work.limits, bucket, masks(work, self.shape.batch, self.words), work.drafts, rows
        )
        stage = Stage.VERIFY if work.asking and k else Stage.STEP
        return work, self.runner.run(inputs.graph(stage, k, bucket), inputs)

    def _run_chunk(self, slot: Slot, chunk: Chunk) -> StepOutputs:
        """Run a chunk of a prompt; the draft's part of it, which may read those before it, waits behind these."""
        inputs, k = prompt_inputs(slot, chunk, self.shape), self.shape.k
        outputs = self.runner.run(inputs.graph(Stage.PREFILL, k, chunk.keys), inputs)
        if self.apart:
            self._owed.append((slot, inputs.graph(Stage.PREFILL, k, chunk.keys), inputs))
            if _shares(slot) and chunk.last < slot.known and self.slots.ready and len(self._owed) >= _MOST_OWED:
                self._fill_draft()
        return outputs

    def _due(self, k: int | None) -> bool:
        """Whether the draft's part of the chunks that have run comes before work of this k, None for a chunk.

        Before any if a slot has been left that owes some; before a step if a first id has been read that one needs for
        its drafts, or whose blocks others may find. Earlier it would take the time of those who send that id out.
        """
        return any(
            not self.slots.holds(slot) or (k is not None and slot.position and (k > 0 or _shares(slot)))
            for slot, *_ in self._owed
        )

    def _fill_draft(self) -> None:
        """Run the draft's part of the chunks that have run."""
        owed, self._owed = self._owed, []
        for _, key, inputs in owed:
            self.runner.draft(key, inputs)
        self._delayed |= bool(owed)

    def _timed(self, work: Work) -> Work:
        """A step that is handed over now, which knows whether its time is its own."""
        if work.delayed != self._delayed:
            work = replace(work, delayed=self._delayed)
        self._delayed = False
        return work

    def _bucket(self, work: Work) -> int:
        """The bucket of a step: of all positions that it may write."""
        return self.shape.bucket(self._reach(work))

    def _reach(self, work: Work) -> int:
        """The end of the positions that a step may write."""
        return max(slot.position for slot in work.slots) + (work.k or 0) + 1

    def _postprocess(self, work: Work, outputs: StepOutputs) -> list[Event]:
        accepted_BN = np.asarray(outputs.accepted_tokens)
        seconds = self._lap()
        if work.k is None:
            assert work.chunk
            return self._filled(work.slots[0], work.chunk, outputs)
        events, reach = [], self._reach(work)
        for slot, limit in zip(work.slots, work.limits, strict=True):
            # its request may have left while the step ran
            if not self.slots.holds(slot):
                continue
            ids = [token for token in accepted_BN[slot.index].tolist() if token != -1]
            slot.result.count(work.k, limit, len(ids) - 1)
            slot.position += len(ids)
            scores = _scores(slot.request.logprobs, outputs, slot.index, slice(len(ids)))
            events.append(self._emit(slot, Event(slot.number, ids, None, work.k, limit, len(ids) - 1, scores)))
        requests = [Ended(event.drafted, event.accepted) for event in events]
        self._ended(work.k, reach, None if work.asking or work.delayed else seconds, requests)
        return events

    def _ended(self, k: int, reach: int, seconds: float | None, requests: list[Ended]) -> None:
        """A step has ended; without seconds where its time is not that of its k, reach and requests."""
        self.step_k.ended(k, reach, seconds, requests)

    def _filled(self, slot: Slot, chunk: Chunk, outputs: StepOutputs) -> list[Event]:
        """The first event of a request, after the last chunk of its prompt."""
        # its request may have left while the chunk ran
        if not self.slots.holds(slot):
            return []
        request, result, last = slot.request, slot.result, chunk.last == slot.known
        if slot.known == len(request.ids):
            rows = slice(len(result.prompt_scores) - chunk.first, chunk.size - last)
            result.prompt_scores += _scores(request.prompt_logprobs, outputs, 0, rows)
        if not last:
            return []
        slot.position = slot.known
        self.slots.changed()
        of_first = _scores(request.logprobs, outputs, 0, slice(chunk.size - 1, chunk.size))
        token = int(np.asarray(outputs.accepted_tokens)[0, 0])
        return [self._emit(slot, Event(slot.number, [token], None, 0, 0, 0, of_first, result.prompt_scores))]

    def _lap(self) -> float:
        """Wall seconds of the work that has just been read, with the host's part since the work before it."""
        now = time.perf_counter()
        seconds, self._since = now - (self._since or now), now
        return seconds

    def _emit(self, slot: Slot, new: Event) -> Event:
        """The event with the new ids that the request keeps; its slot is free again if it has ended."""
        slot.token = new.ids[-1]
        kept, result = slot.keep(new.ids, new.scores), slot.result
        if not result.reason and slot.position >= self.shape.max_len - 1:
            result.reason = "context"
        if result.reason:
            self._leave(slot.number)
            if not self.busy:
                self._since = None
        if result.reason == ERROR:
            self._fill_draft()
            self.runner.clear(slot.index, slot.blocks)
        return replace(new, ids=kept, result=result if result.reason else None, scores=new.scores[: len(kept)])


def _shares(slot: Slot) -> bool:
    """Whether other requests may find blocks of a slot's prompt by their ids: whole ones."""
    return slot.known >= KEY_TILE


def _scores(best: int | None, outputs: StepOutputs, row: int, ids: slice) -> tuple[Score, ...]:
    """The scores of some ids of a row, each with this number of the best ids, if its request wants them."""
    if best is None:
        return ()
    numbers = np.asarray(outputs.scores)[row, ids]
    # the log-probability of a forbidden id
    numbers = np.where(numbers < FORBIDDEN / 2, -np.inf, numbers).tolist()
    return tuple(
        Score(logprob, int(rank), tuple(zip(map(int, more[TOP : TOP + best]), more[:best], strict=True)))
        for logprob, rank, *more in numbers
    )
