"""The host loop: requests into batch slots, steps until each is done, what was emitted and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from model.artifact import DECODE, FUSED, PREFILL
from model.errors import UserError
from model.speculative import StepInputs

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


@dataclass
class _Slot:
    index: int
    request: Request
    result: Result
    position: int
    token: int


class Engine:
    """Continuous batching over a runner; results do not depend on the order or the neighbours."""

    def __init__(self, runner: Runner, shape: Shape, speculative: bool = True) -> None:
        self.runner, self.shape = runner, shape
        self.tag, self.k = (FUSED, shape.k) if speculative else (DECODE, 0)

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
        numbers: dict[int, int] = {}
        tell = on_tokens or (lambda index, ids: None)
        while queue or slots:
            while queue and free:
                index, place = queue.pop(0), free.pop()
                numbers[place] = index
                slots[place] = self._prefill(place, waiting[index], results[index])
                tell(index, results[index].ids[:])
            active = [s for s in slots.values() if not s.result.reason]
            if active:
                for slot, new in self._step(active):
                    tell(numbers[slot.index], new)
            for place in [p for p, s in slots.items() if s.result.reason]:
                del slots[place]
                free.append(place)
        return results

    def _prefill(self, place: int, request: Request, result: Result) -> _Slot:
        length = len(request.ids)
        bucket = next(b for b in self.shape.buckets if b >= length)
        ids, mask = np.zeros((1, bucket), np.int32), np.zeros((1, bucket), np.int32)
        ids[0, :length], mask[0, :length] = request.ids, 1
        inputs = _inputs([(0, request)], 1, self.shape.k)._replace(
            input_ids=ids, attention_mask=mask, position_ids=np.arange(bucket, dtype=np.int32)[None],
            seq_ids=np.array([place], np.int32),
        )  # fmt: skip
        accepted = self.runner.run(PREFILL, bucket, inputs)[0]
        slot = _Slot(place, request, result, length, int(accepted[0, 0]))
        self._emit(slot, [slot.token])
        return slot

    def _step(self, active: list[_Slot]) -> list[tuple[_Slot, list[int]]]:
        last = max(s.position for s in active) + self.k
        bucket = next((b for b in self.shape.buckets if last < b), self.shape.max_len)
        inputs = _inputs([(s.index, s.request) for s in active], self.shape.batch, self.k)
        for slot in active:
            inputs.input_ids[slot.index] = slot.token
            inputs.position_ids[slot.index] = slot.position
        mask = np.arange(bucket, dtype=np.int32) < inputs.position_ids
        outputs = self.runner.run(self.tag, bucket, inputs._replace(attention_mask=mask.astype(np.int32)))
        emitted = []
        for slot in active:
            new = [int(t) for t in outputs[0][slot.index] if t >= 0]
            limit = min(int(inputs.k_limits[slot.index]), self.shape.max_len - 2 - slot.position)
            slot.result.count(max(0, limit), len(new) - 1)
            slot.position, slot.token = int(outputs[3][slot.index, 0]), new[-1]
            emitted.append((slot, self._emit(slot, new)))
        return emitted

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


def _inputs(rows: list[tuple[int, Request]], batch: int, k: int) -> StepInputs:
    """Inputs of a step with idle rows neutral; ids, mask and positions are the caller's to fill."""
    params, min_p = np.zeros((batch, 3), np.float32), np.zeros(batch, np.float32)
    seeds, limits = np.zeros((batch, 2), np.uint32), np.zeros(batch, np.int32)
    params[:, 1] = 1
    for row, request in rows:
        p = request.params
        params[row] = (p.top_k, p.top_p, p.temperature)
        min_p[row], seeds[row] = p.min_p, (p.seed % _WORD, p.seed // _WORD)
        limits[row] = k if request.k_limit is None else min(k, request.k_limit)
    zeros = np.zeros((batch, 1), np.int32)
    return StepInputs(zeros, zeros, zeros.copy(), np.arange(batch, dtype=np.int32), params, min_p,
                      seeds.view(np.int32), limits)  # fmt: skip
