"""The slot table: which request sits in which slot of the batch, and the inputs of a step over all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from model.serving.request import Request, Result
from model.serving.switching import Belief
from model.speculative import StepInputs


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
    def cached(self) -> tuple[int, ...]:
        """The ids whose rows the target's cache holds."""
        return (*self.request.ids, *self.result.ids)[: self.position]

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
        self._sampling: StepInputs | None = None

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

    def step_inputs(self, limits: tuple[int, ...], bucket: int) -> StepInputs:
        """The inputs of a step of all seated requests, each with its limit of drafts; idle rows are neutral."""
        ids_B1, position_B1 = np.zeros((2, self.batch, 1), np.int32)
        limit_B = np.zeros(self.batch, np.int32)
        for slot, limit in zip(self._slots.values(), limits, strict=True):
            ids_B1[slot.index], position_B1[slot.index], limit_B[slot.index] = slot.token, slot.position, limit
        if self._sampling is None:
            self._sampling = _inputs([(s.index, s.request) for s in self.seated], self.batch)
        mask_BS = (np.arange(bucket, dtype=np.int32) < position_B1).astype(np.int32)
        return self._sampling._replace(
            input_ids=ids_B1, attention_mask=mask_BS, position_ids=position_B1, k_limits=limit_B
        )


def prompt_inputs(slot: Slot, ids: tuple[int, ...], bucket: int, k: int) -> StepInputs:
    """The inputs of the prompt's graph: these ids, from position 0 on, into a slot."""
    ids_1S, mask_1S = np.zeros((2, 1, bucket), np.int32)
    ids_1S[0, : len(ids)], mask_1S[0, : len(ids)] = ids, 1
    return _inputs([(0, slot.request)], 1)._replace(
        input_ids=ids_1S,
        attention_mask=mask_1S,
        position_ids=np.arange(bucket, dtype=np.int32)[None],
        seq_ids=np.array([slot.index], np.int32),
        k_limits=np.array([k], np.int32),
    )


def _inputs(rows: Iterable[tuple[int, Request]], batch: int) -> StepInputs:
    """What requests ask of the sampling in their rows; idle rows neutral, the caller fills the others."""
    params_B3, min_p_B = np.zeros((batch, 3), np.float32), np.zeros(batch, np.float32)
    seeds_B2 = np.zeros((batch, 2), np.uint32)
    params_B3[:, 1] = 1
    for row, request in rows:
        p = request.params
        params_B3[row] = (p.top_k, p.top_p, p.temperature)
        min_p_B[row], seeds_B2[row] = p.min_p, p.seed_words
    none_B1 = np.zeros((batch, 1), np.int32)
    sequences_B = np.arange(batch, dtype=np.int32)
    seeds_B2 = seeds_B2.view(np.int32)
    return StepInputs(none_B1, none_B1, none_B1, sequences_B, params_B3, min_p_B, seeds_B2, none_B1[:, 0])
