"""The slot table: which request sits in which slot of the batch, and the inputs of a step over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from model.graph_io import StepInputs, StepOutputs, words_of, zero_inputs
from model.serving.masks import Walk, masks_of_rows
from model.serving.request import Request, Result, Shape
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

    def keep(self, ids: Iterable[int], scores: Iterable[tuple[float, int]] = ()) -> list[int]:
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
        result.scores = [*result.scores, *scores][: len(result.ids)]
        return result.ids[before:]


class SlotTable:
    """The slots of a batch; it knows neither graphs nor what a token means."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self._free = list(range(batch))[::-1]
        self._slots: dict[int, Slot] = {}
        # what the seated ask of the sampling; made again when the seats change
        self._sampling: dict[str, np.ndarray] | None = None
        self._limits: tuple[int, ...] | None = None

    @property
    def full(self) -> bool:
        return not self._free

    @property
    def seated(self) -> list[Slot]:
        """The occupied slots, in the order of their requests' arrival."""
        return list(self._slots.values())

    def holds(self, slot: Slot) -> bool:
        """Whether a slot's request is still there."""
        return self._slots.get(slot.number) is slot

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
        self,
        limits: tuple[int, ...],
        bucket: int,
        allowed: np.ndarray | None = None,
        drafts: Sequence[Sequence[int]] = (),
        rows: int = 1,
    ) -> StepInputs:
        """The inputs of a step of all seated requests, each with its limit of drafts; idle rows are neutral.

        `allowed` are its masks, if it has some. Where the graph is given drafts, `rows` of each are the newest id and
        its `drafts`, filled up by zeros.
        """
        # new arrays: a device may read from the old ones
        ids_BT, positions_BT = np.zeros((self.batch, rows), np.int32), np.zeros((self.batch, rows), np.int32)
        for slot in self._slots.values():
            ids_BT[slot.index, 0], positions_BT[slot.index] = slot.token, slot.position
        for slot, more in zip(self._slots.values(), drafts, strict=False):
            ids_BT[slot.index, 1 : 1 + len(more)] = more
        if rows > 1:
            positions_BT += np.arange(rows, dtype=np.int32)
        mask_BS = (np.arange(bucket, dtype=np.int32) < positions_BT[:, :1]).astype(np.int32)
        return StepInputs(
            **self._asked(limits)
            | {"input_ids": ids_BT, "attention_mask": mask_BS, "position_ids": positions_BT, "allowed": allowed}
        )

    def inputs_after(self, outputs: StepOutputs, limits: tuple[int, ...]) -> StepInputs:
        """The inputs of the step after one of the same requests, in its bucket: what it returns, unread."""
        return StepInputs(
            **self._asked(limits)
            | {
                "input_ids": outputs.next_ids,
                "attention_mask": outputs.next_mask,
                "position_ids": outputs.next_pos,
            }
        )

    def _asked(self, limits: tuple[int, ...]) -> dict[str, np.ndarray]:
        """What the seated ask of the sampling, and each one's limit of drafts."""
        if self._sampling is None:
            self._sampling, self._limits = _sampling(self.seated, self.batch), None
        if self._limits != limits:
            limits_B = np.zeros(self.batch, np.int32)
            limits_B[[slot.index for slot in self._slots.values()]] = limits
            limits_B.flags.writeable = False
            self._limits = limits
            self._sampling["k_limits"] = limits_B
        return self._sampling


def prompt_inputs(slot: Slot, ids: tuple[int, ...], bucket: int, shape: Shape) -> StepInputs:
    """The inputs of the prompt's graph: these ids, from position 0 on, into a slot."""
    inputs = zero_inputs(B=1, T=bucket, S=bucket)
    inputs.input_ids[0, : len(ids)], inputs.attention_mask[0, : len(ids)] = ids, 1
    inputs.position_ids[0], inputs.seq_ids[0], inputs.k_limits[0] = np.arange(bucket), slot.index, shape.k
    _ask(inputs, 0, slot.request)
    if not slot.request.masked:
        return inputs
    words, allowed = words_of(shape.vocabulary), slot.request.allowed
    walks = {0: Walk(allowed, slot.result.ids, 0, words)} if allowed else {}
    return inputs._replace(allowed=masks_of_rows(walks, 1, 1, words)[:, 0])


def _sampling(seated: list[Slot], batch: int) -> dict[str, np.ndarray]:
    """What requests ask of the sampling in their rows; idle rows neutral."""
    inputs = zero_inputs(B=batch, T=1, S=0)
    inputs.seq_ids[:] = np.arange(batch)
    # a top-p of 1 filters nothing
    inputs.sampling_params[:, 1] = 1
    for slot in seated:
        _ask(inputs, slot.index, slot.request)
    asked = {name: array for name, array in inputs._asdict().items() if array is not None}
    for array in asked.values():
        # a runner may keep on its devices what nobody writes to
        array.flags.writeable = False
    return asked


def _ask(inputs: StepInputs, row: int, request: Request) -> None:
    p = request.params
    inputs.sampling_params[row], inputs.min_p[row] = (p.top_k, p.top_p, p.draw_temperature), p.min_p
    inputs.seeds.view(np.uint32)[row] = p.seed_words
