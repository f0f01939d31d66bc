"""The slot table: which request sits in which slot of the batch, and the inputs of a step over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from model.graph_io import StepInputs, zero_inputs
from model.serving.request import Request, Result
from model.serving.switching import Belief


@dataclass
class Slot:
    """A request's place in the batch: `token` is its newest id, whose place in the caches is `position`."""

    index: int
    number: int
    request: Request
    belief: Belief
    result: Result = field(default_factory=Result)
    position: int = 0
    token: int = -1

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt and what was kept."""
        return (*self.request.ids, *self.result.ids)

    @property
    def cached(self) -> tuple[int, ...]:
        """The ids whose rows the target's cache holds."""
        return self.ids[: self.position]

    def keep(self, ids: Iterable[int]) -> list[int]:
        """Append new ids up to whatever ends the request; returns those kept."""
        request, result = self.request, self.result
        before = len(result.ids)
        for token in ids:
            result.ids.append(token)
            if token in request.stop_ids:
                result.reason = "eos"
            elif request.cut and (kept := request.cut(result.ids)) is not None:
                del result.ids[kept:]
                result.reason = "stop"
            elif len(result.ids) == request.max_new_tokens:
                result.reason = "length"
            if result.reason:
                break
        return result.ids[before:]


class SlotTable:
    """The slots of a batch; it knows neither graphs nor what a token means."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self._free = list(range(batch))[::-1]
        self._slots: dict[int, Slot] = {}
        # what the seated ask of the sampling; made again when the seats change
        self._sampling: dict[str, np.ndarray] | None = None

    @property
    def full(self) -> bool:
        return not self._free

    @property
    def seated(self) -> list[Slot]:
        """The occupied slots, in the order of their requests' arrival."""
        return list(self._slots.values())

    def seat(self, number: int, request: Request, belief: Belief) -> Slot:
        """Give a request the next free slot."""
        slot = self._slots[number] = Slot(self._free.pop(), number, request, belief)
        self._sampling = None
        return slot

    def leave(self, number: int) -> None:
        """Free a request's slot, if it has one."""
        if slot := self._slots.pop(number, None):
            self._free.append(slot.index)
            self._sampling = None

    def step_inputs(
        self, limits: tuple[int, ...], bucket: int, drafts: Sequence[Sequence[int]] = (), rows: int = 1
    ) -> StepInputs:
        """The inputs of a step of all seated requests, each with its limit of drafts; idle rows are neutral.

        Where the host drafts, `rows` of each are the newest id and its `drafts`, filled up by zeros beyond the limit.
        """
        inputs = zero_inputs(B=self.batch, T=rows, S=bucket)
        for slot, limit, more in zip(self._slots.values(), limits, drafts or [()] * len(limits), strict=True):
            inputs.input_ids[slot.index, : 1 + len(more)] = (slot.token, *more)
            inputs.position_ids[slot.index] = slot.position + np.arange(rows)
            inputs.k_limits[slot.index] = limit
        inputs.attention_mask[:] = np.arange(bucket) < inputs.position_ids[:, :1]
        if self._sampling is None:
            self._sampling = _sampling(self.seated, self.batch)
        return inputs._replace(**self._sampling)


def prompt_inputs(slot: Slot, ids: tuple[int, ...], bucket: int, k: int) -> StepInputs:
    """The inputs of the prompt's graph: these ids, from position 0 on, into a slot."""
    inputs = zero_inputs(B=1, T=bucket, S=bucket)
    inputs.input_ids[0, : len(ids)], inputs.attention_mask[0, : len(ids)] = ids, 1
    inputs.position_ids[0], inputs.seq_ids[0], inputs.k_limits[0] = np.arange(bucket), slot.index, k
    _ask(inputs, 0, slot.request)
    return inputs


def _sampling(seated: list[Slot], batch: int) -> dict[str, np.ndarray]:
    """What requests ask of the sampling in their rows; idle rows neutral."""
    inputs = zero_inputs(B=batch, T=1, S=0)
    inputs.seq_ids[:] = np.arange(batch)
    # a top-p of 1 filters nothing
    inputs.sampling_params[:, 1] = 1
    for slot in seated:
        _ask(inputs, slot.index, slot.request)
    names = ("seq_ids", "sampling_params", "min_p", "seeds")
    return {name: getattr(inputs, name) for name in names}


def _ask(inputs: StepInputs, row: int, request: Request) -> None:
    p = request.params
    inputs.sampling_params[row], inputs.min_p[row] = (p.top_k, p.top_p, p.draw_temperature), p.min_p
    inputs.seeds.view(np.uint32)[row] = p.seed_words
