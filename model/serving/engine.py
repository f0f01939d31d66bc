"""The host loop: requests into slots, one graph a step, what was emitted and why a request ended."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from model.bundle.manifest import PREFILL
from model.bundle.schema import DRAFT, FUSED, MASKED, VERIFY, step_tag
from model.errors import UserError
from model.graph_io import StepInputs, StepOutputs, words_of
from model.serving import ngram
from model.serving.masks import Walk, masks_of_rows
from model.serving.request import Request, Result, Shape, check, check_separate
from model.serving.slots import Slot, SlotTable, prompt_inputs
from model.serving.switching import Belief, Decision, Pause, Table, decide_graph


class Runner(Protocol):
    """What runs a graph: the compiled graphs, or eager torch in tests.

    Numpy arrays go in, what numpy can read comes out: whoever reads it waits for the graph. The next ids, mask and
    positions of the last run may go in unread.
    """

    def run(self, tag: str, bucket: int, inputs: StepInputs) -> StepOutputs: ...

    def draft(self, tag: str, bucket: int, inputs: StepInputs) -> Any: ...


@dataclass(frozen=True)
class SpecStep:
    """What one speculative step did for one request: drafts it might accept, drafts accepted, where it began."""

    request: int
    drafted: int
    accepted: int
    position: int


@dataclass(frozen=True)
class Event:
    """What a step did for a request: the ids it keeps, and its result if the request has ended.

    `k` is that of the step's graph, `drafted` the drafts that it might accept, `scores` those of the ids, if asked for.
    """

    number: int
    ids: list[int]
    result: Result | None = None
    k: int = 0
    drafted: int = 0
    scores: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True)
class _Work:
    """One step: its k, or None for a prompt, whose requests it serves, each one's limit of drafts, whose draft caches
    to refresh first."""

    k: int | None
    slots: list[Slot]
    limits: tuple[int, ...] = ()
    refresh: tuple[Slot, ...] = ()
    # where the host drafts
    drafts: tuple[list[int], ...] = ()
    # by slot, of those that have masks
    walks: dict[int, Walk] = field(default_factory=dict)

    @property
    def masked(self) -> bool:
        return any(slot.request.masked for slot in self.slots)


Proposer = Callable[[Slot, int], list[int]]


def by_ngram(slot: Slot, most: int) -> list[int]:
    """Drafts from the slot's own ids."""
    return ngram.propose(slot.ids, most) if most else []


class Engine:
    """Continuous batching over a runner; results do not depend on the order or the neighbours.

    With a tuner's table, steps speculate only while that is expected to gain; `record` is told of every
    speculative step. Where the host drafts, `propose` gives at most so many drafts for a slot, by default from the
    slot's own ids. With `separate`, a step drafts and verifies by two graphs, the reference for the fused one's.
    """

    def __init__(
        self,
        runner: Runner,
        shape: Shape,
        speculative: bool = True,
        table: Table | None = None,
        record: Callable[[SpecStep], None] | None = None,
        propose: Proposer | None = None,
        separate: bool = False,
    ) -> None:
        check_separate(shape, separate)
        # a bundle of k 0 is the target alone
        self.runner, self.shape, self.speculative = runner, shape, speculative and shape.k > 0
        self._use(table)
        self.pause, self.record = Pause(), record or (lambda step: None)
        self.slots = SlotTable(shape.batch)
        self.propose = (propose or by_ngram) if shape.host_drafts and self.speculative else None
        self.separate, self.words = separate, words_of(shape.vocabulary)
        self._waiting: deque[tuple[int, Request]] = deque()
        self._numbers = itertools.count()
        # what runs already and what is handed over behind it: a step and the one after it, or prompts
        self._begun: deque[tuple[_Work, StepOutputs]] = deque()

    def _use(self, table: Table | None) -> None:
        self.table, self._tables = table, table.on_graphs(self.shape.ks) if table else {}

    def tags(self, most: int, ending: str) -> tuple[str, ...]:
        """The graphs that steps of requests may run that take so many drafts at most, with this ending or without."""
        if self.speculative and (self.table or self.propose):
            ks = (*self.shape.ks, 0)
        else:
            ks = (self.shape.graph_k(most if self.speculative else 0),)
        parts = (DRAFT, VERIFY) if self._halves(ending.endswith(MASKED)) else (FUSED,)
        return tuple(dict.fromkeys(step_tag(k, self.shape.k, part) for k in ks for part in parts))

    def _halves(self, masked: bool) -> bool:
        """Whether a step with drafts is two graphs: between them, the host asks what may follow each draft."""
        return not self.shape.host_drafts and (self.separate or (masked and self.shape.row_masks))

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or seated."""
        return bool(self._waiting or self.slots.seated)

    def add(self, request: Request) -> int:
        """Queue a request; its number names it in events. UserError if the bundle cannot serve it."""
        check(self.shape, request)
        number = next(self._numbers)
        self._waiting.append((number, request))
        return number

    def cancel(self, number: int) -> None:
        """Forget a request, whether it waits, is seated or has ended; no event tells of it any more."""
        self._waiting = deque(w for w in self._waiting if w[0] != number)
        self.slots.leave(number)

    def step(self, most: int | None = None) -> list[Event]:
        """Run one graph: the prompt of a request that a slot is free for, else a step of all that are seated.

        `most` is the most drafts that a request may get in this step, for who knows more than the table does.
        """
        while self._begun:
            work, outputs = self._begun.popleft()
            if any(map(self.slots.holds, work.slots)):
                return self._postprocess(work, outputs)
        scheduled = self._schedule(self.shape.k if most is None else most)
        return self._postprocess(*self._run(scheduled)) if scheduled else []

    @property
    def begun(self) -> bool:
        """Whether the next step runs already."""
        return bool(self._begun)

    def begin(self, most: int, masks: bool = False) -> None:
        """Begin the next step of those that are seated, while the host does something else; `step` then waits for it.

        A request that is cancelled meanwhile has no event of it. `masks` says that those of the next ids are there.
        """
        seated = self.slots.seated
        if not self._begun and seated and (masks or not any(slot.request.masked for slot in seated)):
            self._begun.append(self._run(self._work(seated, most)))

    def admit(self) -> None:
        """Begin the prompts of all that wait and have a free slot, behind what runs; `step` reads each in turn."""
        while self._waiting and not self.slots.full:
            self._begun.append(self._run(self._seat()))

    def follow(self, most: int) -> None:
        """Hand over the step after the one that runs before the host has read that one: its inputs are on the devices.

        Only where nothing that is read could change what the step is: the same requests in the same bucket, of which
        one needs it for certain unless it writes an end; and no table, host or mask decides about drafts.
        """
        decides = self._waiting or self.propose or self.separate or (self.speculative and self.table)
        if decides or len(self._begun) != 1:
            return
        (work, outputs), seated = self._begun[0], self.slots.seated
        if work.k is None or work.masked:
            return
        ahead, bucket = work.k + 1, self._bucket(work)
        within = max(s.position for s in work.slots) + 2 * ahead <= bucket
        same = [s.number for s in work.slots] == [s.number for s in seated]
        if within and same and any(s.request.max_new_tokens - len(s.result.ids) > ahead for s in seated):
            after = self._work(seated, most)
            # a larger k could write behind the bucket
            if after.k == work.k:
                inputs = self.slots.inputs_after(outputs, after.limits)
                self._begun.append((after, self.runner.run(step_tag(work.k, self.shape.k), bucket, inputs)))

    def run(
        self, requests: Iterable[Request], on_tokens: Callable[[int, list[int]], None] | None = None
    ) -> list[Result]:
        """Serve these requests and no others; `on_tokens(request index, new ids)` is told of every kept token."""
        if self.busy:
            raise UserError("this engine is serving requests already; step it until it is idle, or make a new one")
        asked = list(requests)
        for request in asked:
            check(self.shape, request)
        index = {self.add(request): i for i, request in enumerate(asked)}
        results = [Result() for _ in asked]
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

    def _schedule(self, most: int) -> _Work | None:
        if self._waiting and not self.slots.full:
            return self._seat()
        seated = self.slots.seated
        return self._work(seated, most) if seated else None

    def _seat(self) -> _Work:
        """The prompt of the request that has waited longest."""
        number, request = self._waiting.popleft()
        return _Work(None, [self.slots.seat(number, request, Belief(request.most_drafts(self.shape)))])

    def _work(self, seated: list[Slot], most: int) -> _Work:
        decision = self._decide(seated, most)
        limits = decision.limits or (0,) * len(seated)
        walks = {
            slot.index: Walk(slot.request.allowed, slot.result.ids, limit, self.words)
            for slot, limit in zip(seated, limits, strict=True)
            if slot.request.allowed
        }
        if self.propose:
            drafts = tuple(self._proposed(s, n, walks.get(s.index)) for s, n in zip(seated, limits, strict=True))
            k = self.shape.graph_k(max(map(len, drafts)))
            return _Work(k, seated, tuple(map(len, drafts)), (), drafts if k else (), walks)
        k = self.shape.graph_k(max(limits)) if decision.k is None else decision.k
        due = tuple(s for s, stale in zip(seated, decision.refresh, strict=True) if stale) if decision.refresh else ()
        return _Work(k, seated, limits, due, walks=walks)

    def _proposed(self, slot: Slot, most: int, walk: Walk | None) -> list[int]:
        """The host's drafts: what a mask allows of them, and what it allows alone."""
        assert self.propose is not None
        drafts = self.propose(slot, most)
        if walk is None:
            return drafts
        walk.along(drafts)
        walk.force()
        return walk.drafts

    def _decide(self, seated: list[Slot], most: int) -> Decision:
        if not self.speculative:
            return Decision()
        limits = tuple(min(s.belief.most, most) for s in seated)
        if self.table is None or not any(limits):
            return Decision(limits)
        beliefs = tuple(replace(s.belief, most=limit) for s, limit in zip(seated, limits, strict=True))
        decision = decide_graph(self._tables, beliefs, self.pause)
        self.pause = decision.pause
        return decision

    def _run(self, work: _Work) -> tuple[_Work, StepOutputs]:
        """Run a step's graphs; what is left of the work's limits under masks, and what came out."""
        if work.k is None:
            return work, self._prompt(work.slots[0], work.slots[0].request.ids)
        for slot in work.refresh:
            self._refresh(slot)
        bucket = self._bucket(work)
        if work.k and self._halves(work.masked):
            return self._run_halves(work, work.k, bucket)
        drafted = (work.drafts, work.k + 1) if self.propose else ()
        inputs = self.slots.step_inputs(work.limits, bucket, self._masks(work), *drafted)
        return work, self.runner.run(step_tag(work.k, self.shape.k), bucket, inputs)

    def _bucket(self, work: _Work) -> int:
        """The bucket of a step: of all positions that it may write."""
        return self.shape.bucket(max(s.position for s in work.slots) + (work.k or 0) + 1)

    def _run_halves(self, work: _Work, k: int, bucket: int) -> tuple[_Work, StepOutputs]:
        """Draft, follow the drafts as far as masks allow, verify."""
        tag = step_tag(k, self.shape.k, DRAFT)
        inputs = self.slots.step_inputs(work.limits, bucket, self._masks(work))
        candidates_BN = np.array(self.runner.draft(tag, bucket, inputs))
        for index, walk in work.walks.items():
            # what a mask allows alone may be no id of the draft's vocabulary
            candidates_BN[index, 1 : 1 + len(walk.drafts)] = walk.drafts
            walk.along(candidates_BN[index, 1:].tolist())
        drafts = tuple(candidates_BN[slot.index, 1:].tolist() for slot in work.slots)
        limits = (
            min(limit, len(work.walks[s.index].drafts)) if s.index in work.walks else limit
            for s, limit in zip(work.slots, work.limits, strict=True)
        )
        work = replace(work, limits=tuple(limits), drafts=drafts)
        inputs = self.slots.step_inputs(work.limits, bucket, self._masks(work), drafts, k + 1)
        return work, self.runner.run(step_tag(k, self.shape.k, VERIFY), bucket, inputs)

    def _masks(self, work: _Work) -> np.ndarray | None:
        """The masks of a step: of each row where its graphs take them, else of each sequence."""
        if not work.masked:
            return None
        rows = 1 + (work.k or 0)
        masks_BNW = masks_of_rows(work.walks, self.shape.batch, rows, self.words)
        return masks_BNW if rows > 1 and self.shape.row_masks else masks_BNW[:, 0]

    def _prompt(self, slot: Slot, ids: tuple[int, ...]) -> StepOutputs:
        """Write ids into both caches; draws the id after them."""
        bucket = self.shape.prompt_bucket(len(ids))
        return self.runner.run(PREFILL, bucket, prompt_inputs(slot, ids, bucket, self.shape))

    def _refresh(self, slot: Slot) -> None:
        """Bring the draft's cache up to date: the prompt's graph over all that the caches should hold."""
        slot.result.refreshes += 1
        slot.belief = slot.belief.refreshed()
        if _first(self._prompt(slot, slot.cached)) != slot.token and self.table:
            # the prompt's graph computes other bits than the steps: leave the target's cache to the steps
            self._use(replace(self.table, refresh=None))

    def _postprocess(self, work: _Work, outputs: StepOutputs) -> list[Event]:
        if work.k is None:
            (slot,) = work.slots
            slot.position = len(slot.request.ids)
            return [self._emit(slot, Event(slot.number, [_first(outputs)], scores=_scores(slot, outputs, 0, 1)))]
        events, accepted_BN = [], np.asarray(outputs.accepted).tolist()
        for slot, limit in zip(work.slots, work.limits, strict=True):
            if not self.slots.holds(slot):
                continue
            new = [token for token in accepted_BN[slot.index] if token >= 0]
            drafted = min(limit, max(0, self.shape.max_len - 2 - slot.position))
            self._learn(slot, work.k, drafted, len(new) - 1)
            slot.position += len(new)
            scores = _scores(slot, outputs, slot.index, len(new))
            events.append(self._emit(slot, Event(slot.number, new, None, work.k, drafted, scores)))
        return events

    def _learn(self, slot: Slot, k: int, drafted: int, accepted: int) -> None:
        slot.result.count(k, drafted, accepted)
        if not k:
            # without a way to refresh it, a stale cache is what acceptance is about
            slot.belief = replace(slot.belief, stale=bool(self.table and self.table.refresh is not None))
            return
        slot.belief = slot.belief.after(drafted, accepted)
        if drafted:
            self.record(SpecStep(slot.number, drafted, accepted, slot.position))

    def _emit(self, slot: Slot, new: Event) -> Event:
        """The event of the new ids that the request keeps; its slot is free again if it has ended."""
        slot.token = new.ids[-1]
        kept, result = slot.keep(new.ids, new.scores), slot.result
        if not result.reason and slot.position >= self.shape.max_len - 1:
            result.reason = "context"
        if result.reason:
            self.slots.leave(slot.number)
        return replace(new, ids=kept, result=result if result.reason else None, scores=new.scores[: len(kept)])


def _first(outputs: StepOutputs) -> int:
    """The id after a prompt."""
    return int(np.asarray(outputs.accepted)[0, 0])


def _scores(slot: Slot, outputs: StepOutputs, row: int, count: int) -> tuple[tuple[float, int], ...]:
    """Log-probability and rank of each new id of a row, if its request asks for them."""
    if not slot.request.logprobs:
        return ()
    return tuple((float(logprob), int(rank)) for logprob, rank in np.asarray(outputs.scores)[row, :count])
