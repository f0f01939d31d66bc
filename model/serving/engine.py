"""The host loop: requests into batch slots, steps until each is done, what was emitted and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from model.bundle.manifest import DECODE, FUSED, PREFILL
from model.errors import UserError
from model.graph_io import StepInputs, zero_inputs
from model.serving.switching import Belief, Pause, Table, decide

_WORD = 1 << 32


class Runner(Protocol):
    """What runs a graph: the compiled graphs, or eager torch in tests."""

    def run(self, tag: str, bucket: int, inputs: StepInputs) -> list[np.ndarray]: ...


@dataclass(frozen=True)
class Shape:
    """What an engine must know of a bundle."""

    k: int
    batch: int
    max_len: int
    buckets: tuple[int, ...]

    @property
    def rows(self) -> int:
        """N: the rows that the target verifies, and the most ids that a step emits."""
        return self.k + 1


@dataclass(frozen=True)
class Params:
    """Sampling parameters of one request; the defaults are greedy decoding without filters."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def check(self) -> None:
        """Raise UserError for a parameter outside its range."""
        rules = (
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "a number of at least 0"),
            ("top-k", self.top_k, 0 <= self.top_k < 1 << 24, "0 (off) or a count"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("min-p", self.min_p, 0 <= self.min_p <= 1, "a number in [0, 1]"),
            ("seed", self.seed, 0 <= self.seed < _WORD * _WORD, "an integer of 64 bits"),
        )
        for name, value, holds, expected in rules:
            if not holds:
                raise UserError(f"{name} is {value}; it must be {expected}")


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, and how to continue it.

    `cut` is asked after each step with all new ids and returns how many of them to keep, or None to
    go on: a stop string needs the text.
    """

    ids: tuple[int, ...]
    params: Params = Params()
    max_new_tokens: int = 128
    stop_ids: tuple[int, ...] = ()
    k_limit: int | None = None
    cut: Callable[[Sequence[int]], int | None] | None = None


@dataclass
class Result:
    """What a request got: new ids, why it ended, and what each step accepted."""

    ids: list[int] = field(default_factory=list)
    reason: str = ""
    steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    refreshes: int = 0

    def count(self, drafted: int, accepted: int) -> None:
        """Add one step with its drafts and how many were accepted, by position."""
        self.steps += 1
        for tally, reached in ((self.drafted, drafted), (self.accepted, accepted)):
            tally.extend([0] * (drafted - len(tally)))
            for position in range(reached):
                tally[position] += 1

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a target step emitted on average; the prompt's own token is not a step's."""
        return (len(self.ids) - 1) / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class Step:
    """What one speculative step did for one request: drafts it might accept, drafts accepted, where it began."""

    request: int
    drafted: int
    accepted: int
    position: int


@dataclass
class _Slot:
    index: int
    number: int
    request: Request
    result: Result
    position: int
    token: int
    belief: Belief


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
        record: Callable[[Step], None] | None = None,
    ) -> None:
        # a bundle of k 0 is the target alone
        self.runner, self.shape, self.speculative = runner, shape, speculative and shape.k > 0
        self.table = table.on_graph(shape.k) if table else None
        self.pause, self.record = Pause(), record or (lambda step: None)

    @property
    def tags(self) -> tuple[str, ...]:
        """The graphs that steps may run."""
        if not self.speculative:
            return (DECODE,)
        return (FUSED, DECODE) if self.table else (FUSED,)

    def check(self, request: Request) -> None:
        """Refuse a request before any compute."""
        request.params.check()
        if not request.ids:
            raise UserError("the prompt is empty; give at least one token")
        if len(request.ids) >= self.shape.max_len:
            raise UserError(
                f"the prompt has {len(request.ids)} tokens, the largest bucket is {self.shape.max_len} and "
                "one place is needed for an answer; shorten the prompt or build with a larger --max-len"
            )
        if request.max_new_tokens < 1:
            raise UserError(f"max-new-tokens is {request.max_new_tokens}; it must be at least 1")
        if request.k_limit is not None and not 0 <= request.k_limit <= self.shape.k:
            raise UserError(f"k-limit is {request.k_limit}; this bundle drafts 0 to {self.shape.k} tokens")

    def run(
        self, requests: Iterable[Request], on_tokens: Callable[[int, list[int]], None] | None = None
    ) -> list[Result]:
        """Serve all requests; `on_tokens(request index, new ids)` is told of every kept token."""
        waiting = list(requests)
        for request in waiting:
            self.check(request)
        results = [Result() for _ in waiting]
        queue, slots, free = list(range(len(waiting))), dict[int, _Slot](), list(range(self.shape.batch))[::-1]
        tell = on_tokens or (lambda index, ids: None)
        while queue or slots:
            while queue and free:
                index, place = queue.pop(0), free.pop()
                slots[place] = self._admit(place, index, waiting[index], results[index])
                tell(index, results[index].ids[:])
            active = [s for s in slots.values() if not s.result.reason]
            if active:
                for slot, new in self._step(active):
                    tell(slot.number, new)
            for place in [p for p, s in slots.items() if s.result.reason]:
                del slots[place]
                free.append(place)
        return results

    def _admit(self, place: int, number: int, request: Request, result: Result) -> _Slot:
        most = self.shape.k if request.k_limit is None else request.k_limit
        token = self._prefill(place, request, request.ids)
        slot = _Slot(place, number, request, result, len(request.ids), token, Belief(most))
        self._emit(slot, [token])
        return slot

    def _prefill(self, place: int, request: Request, known: tuple[int, ...]) -> int:
        """Write all known ids into both caches; the id drawn after them."""
        length = len(known)
        bucket = next(b for b in self.shape.buckets if b >= length)
        inputs = zero_inputs(B=1, T=bucket, S=bucket)
        inputs.input_ids[0, :length], inputs.attention_mask[0, :length] = known, 1
        inputs.position_ids[0], inputs.seq_ids[0] = np.arange(bucket), place
        _ask(inputs, 0, request, self.shape.k)
        return int(self.runner.run(PREFILL, bucket, inputs)[0][0, 0])

    def _limits(self, active: list[_Slot]) -> tuple[int, ...]:
        """How many drafts each request may accept in the next step; nothing: the target runs alone."""
        if not self.speculative:
            return ()
        if self.table is None:
            return tuple(s.belief.most for s in active)
        decision = decide(self.table, tuple(s.belief for s in active), self.pause)
        self.pause = decision.pause
        if decision.refresh:
            for slot, due in zip(active, decision.refresh, strict=True):
                if due:
                    self._refresh(slot)
        return decision.limits

    def _refresh(self, slot: _Slot) -> None:
        """Bring the draft's cache up to date: prefill all that the caches should hold."""
        known = (*slot.request.ids, *slot.result.ids)[: slot.position]
        slot.result.refreshes += 1
        slot.belief = slot.belief.refreshed()
        if self._prefill(slot.index, slot.request, known) != slot.token and self.table:
            # the prompt's graph computes other bits than the steps: leave the target's cache to the steps
            self.table = replace(self.table, refresh=None)

    def _step(self, active: list[_Slot]) -> list[tuple[_Slot, list[int]]]:
        limits = self._limits(active)
        tag, k = (FUSED, self.shape.k) if limits else (DECODE, 0)
        last = max(s.position for s in active) + k
        bucket = next((b for b in self.shape.buckets if last < b), self.shape.max_len)
        inputs = zero_inputs(B=self.shape.batch, T=1, S=bucket)
        inputs.seq_ids[:] = np.arange(self.shape.batch)
        # an idle row filters nothing: a top-p of 1
        inputs.sampling_params[:, 1] = 1
        for slot, limit in zip(active, limits or (0,) * len(active), strict=True):
            inputs.input_ids[slot.index] = slot.token
            inputs.position_ids[slot.index] = slot.position
            _ask(inputs, slot.index, slot.request, limit)
        inputs.attention_mask[:] = np.arange(bucket) < inputs.position_ids
        outputs = self.runner.run(tag, bucket, inputs)
        emitted = []
        for slot in active:
            new = [int(t) for t in outputs[0][slot.index] if t >= 0]
            room = max(0, self.shape.max_len - 2 - slot.position)
            self._learn(slot, bool(limits), min(int(inputs.k_limits[slot.index]), room), len(new) - 1)
            slot.position, slot.token = int(outputs[3][slot.index, 0]), new[-1]
            emitted.append((slot, self._emit(slot, new)))
        return emitted

    def _learn(self, slot: _Slot, speculated: bool, drafted: int, accepted: int) -> None:
        slot.result.count(drafted, accepted)
        if not speculated:
            # without a way to refresh it, a stale cache is what acceptance is about
            slot.belief = replace(slot.belief, stale=bool(self.table and self.table.refresh is not None))
            return
        slot.belief = slot.belief.after(drafted, accepted)
        if drafted:
            self.record(Step(slot.number, drafted, accepted, slot.position))

    def _emit(self, slot: _Slot, new: list[int]) -> list[int]:
        """Append new ids up to whatever ends the request; returns the ids kept."""
        request, result = slot.request, slot.result
        before = len(result.ids)
        for token in new:
            result.ids.append(token)
            if token in request.stop_ids:
                result.reason = "eos"
            elif request.cut and (kept := request.cut(result.ids)) is not None:
                del result.ids[kept:]
                result.reason = "stop"
            elif len(result.ids) == request.max_new_tokens:
                result.reason = "length"
            if result.reason:
                return result.ids[before:]
        if slot.position >= self.shape.max_len - 1:
            result.reason = "context"
        return result.ids[before:]


def _ask(inputs: StepInputs, row: int, request: Request, limit: int) -> None:
    """Write what a request asks of its row: sampling, seed, and the most drafts to accept."""
    p = request.params
    inputs.sampling_params[row] = (p.top_k, p.top_p, p.temperature)
    inputs.min_p[row], inputs.k_limits[row] = p.min_p, limit
    inputs.seeds.view(np.uint32)[row] = (p.seed % _WORD, p.seed // _WORD)
