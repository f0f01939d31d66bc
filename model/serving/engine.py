"""The host loop: requests into slots, one graph a step, what was emitted and why a request ended."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from model.bundle.manifest import DECODE, FUSED, PREFILL
from model.errors import UserError
from model.graph_io import StepInputs, StepOutputs
from model.serving.request import Request, Result, Shape, check
from model.serving.slots import Slot, SlotTable, prompt_inputs
from model.serving.switching import Belief, Decision, Pause, Table, decide


class Runner(Protocol):
    """What runs a graph: the compiled graphs, or eager torch in tests; numpy arrays in and out."""

    def run(self, tag: str, bucket: int, inputs: StepInputs) -> StepOutputs: ...


@dataclass(frozen=True)
class SpecStep:
    """What one speculative step did for one request: drafts it might accept, drafts accepted, where it began."""

    request: int
    drafted: int
    accepted: int
    position: int


@dataclass(frozen=True)
class Event:
    """What a step did for a request: the ids it keeps, and its result if the request has ended."""

    number: int
    ids: list[int]
    result: Result | None = None


@dataclass(frozen=True)
class _Work:
    """One step: a graph, whose requests it serves, each one's limit of drafts, whose draft caches to refresh first."""

    tag: str
    slots: list[Slot]
    limits: tuple[int, ...]
    refresh: tuple[Slot, ...] = ()


class Engine:
    """Continuous batching over a runner; results do not depend on the order or the neighbours.

    With a tuner's table, steps speculate only while that is expected to gain; `record` is told of every
    speculative step.
    """

    def __init__(
        self,
        runner: Runner,
        shape: Shape,
        speculative: bool = True,
        table: Table | None = None,
        record: Callable[[SpecStep], None] | None = None,
    ) -> None:
        # a bundle of k 0 is the target alone
        self.runner, self.shape, self.speculative = runner, shape, speculative and shape.k > 0
        self.table = table.on_graph(shape.k) if table else None
        self.pause, self.record = Pause(), record or (lambda step: None)
        self.slots = SlotTable(shape.batch)
        self._waiting: deque[tuple[int, Request]] = deque()
        self._numbers = itertools.count()

    @property
    def tags(self) -> tuple[str, ...]:
        """The graphs that steps may run."""
        if not self.speculative:
            return (DECODE,)
        return (FUSED, DECODE) if self.table else (FUSED,)

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

    def step(self) -> list[Event]:
        """Run one graph: the prompt of a request that a slot is free for, else a step of all that are seated."""
        work = self._schedule()
        return self._postprocess(work, self._run(work)) if work else []

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

    def _schedule(self) -> _Work | None:
        if self._waiting and not self.slots.full:
            number, request = self._waiting.popleft()
            most = self.shape.k if request.k_limit is None else request.k_limit
            return _Work(PREFILL, [self.slots.seat(number, request, Belief(most))], ())
        seated = self.slots.seated
        if not seated:
            return None
        decision = self._decide(seated)
        if not decision.limits:
            return _Work(DECODE, seated, (0,) * len(seated))
        due = tuple(s for s, stale in zip(seated, decision.refresh, strict=True) if stale) if decision.refresh else ()
        return _Work(FUSED, seated, decision.limits, due)

    def _decide(self, seated: list[Slot]) -> Decision:
        if not self.speculative:
            return Decision()
        if self.table is None:
            return Decision(tuple(s.belief.most for s in seated))
        decision = decide(self.table, tuple(s.belief for s in seated), self.pause)
        self.pause = decision.pause
        return decision

    def _run(self, work: _Work) -> StepOutputs:
        if work.tag == PREFILL:
            return self._prompt(work.slots[0], work.slots[0].request.ids)
        for slot in work.refresh:
            self._refresh(slot)
        last = max(s.position for s in work.slots) + (self.shape.k if work.tag == FUSED else 0)
        bucket = self.shape.bucket(last + 1)
        return self.runner.run(work.tag, bucket, self.slots.step_inputs(work.limits, bucket))

    def _prompt(self, slot: Slot, ids: tuple[int, ...]) -> StepOutputs:
        """Write ids into both caches; draws the id after them."""
        bucket = self.shape.bucket(len(ids))
        return self.runner.run(PREFILL, bucket, prompt_inputs(slot, ids, bucket, self.shape.k))

    def _refresh(self, slot: Slot) -> None:
        """Bring the draft's cache up to date: the prompt's graph over all that the caches should hold."""
        slot.result.refreshes += 1
        slot.belief = slot.belief.refreshed()
        if int(self._prompt(slot, slot.cached).accepted[0, 0]) != slot.token and self.table:
            # the prompt's graph computes other bits than the steps: leave the target's cache to the steps
            self.table = replace(self.table, refresh=None)

    def _postprocess(self, work: _Work, outputs: StepOutputs) -> list[Event]:
        if work.tag == PREFILL:
            (slot,) = work.slots
            slot.position = len(slot.request.ids)
            return [self._emit(slot, [int(outputs.accepted[0, 0])])]
        events = []
        for slot, limit in zip(work.slots, work.limits, strict=True):
            new = [token for token in np.asarray(outputs.accepted[slot.index]).tolist() if token >= 0]
            self._learn(slot, work.tag, min(limit, max(0, self.shape.max_len - 2 - slot.position)), len(new) - 1)
            slot.position += len(new)
            events.append(self._emit(slot, new))
        return events

    def _learn(self, slot: Slot, tag: str, drafted: int, accepted: int) -> None:
        slot.result.count(drafted, accepted)
        if tag == DECODE:
            # without a way to refresh it, a stale cache is what acceptance is about
            slot.belief = replace(slot.belief, stale=bool(self.table and self.table.refresh is not None))
            return
        slot.belief = slot.belief.after(drafted, accepted)
        if drafted:
            self.record(SpecStep(slot.number, drafted, accepted, slot.position))

    def _emit(self, slot: Slot, new: list[int]) -> Event:
        slot.token = new[-1]
        kept = slot.keep(new)
        if not slot.result.reason and slot.position >= self.shape.max_len - 1:
            slot.result.reason = "context"
        if not slot.result.reason:
            return Event(slot.number, kept)
        self.slots.leave(slot.number)
        return Event(slot.number, kept, slot.result)
