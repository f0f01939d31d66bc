"""The slot table: which request sits in which slot of the batch, and the inputs of a step over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from model.asks import BIASES
from model.graph_io import StepInputs, StepOutputs, zero_inputs
from model.sampling import NO_ID
from model.serving.masks import Allowed, Walk, masks_of_rows
from model.serving.request import ERROR, NO_DRAW, Params, Request, Result, Score


@dataclass
class Slot:
    """A request's place in the batch: `token` is its newest id, whose place in the caches is `position`.

    `allowed` are all its masks, those of its parameters too.
    """

    index: int
    number: int
    request: Request
    allowed: Allowed | None = None
    result: Result = field(default_factory=Result)
    position: int = 0
    token: int = -1

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt and the kept ids."""
        return (*self.request.ids, *self.result.ids)

    def keep(self, ids: Iterable[int], scores: Iterable[Score] = ()) -> list[int]:
        """Append new ids up to whatever ends the request; returns those kept."""
        request, result = self.request, self.result
        before = len(result.ids)
        for token in ids:
            if token == NO_ID:
                result.reason, result.error = ERROR, f"{NO_DRAW} after {len(result.ids)} new tokens"
                break
            result.ids.append(token)
            if token in request.stop_ids:
                result.reason = "eos"
            elif request.cut and (kept := request.cut(result.ids)) is not None and kept >= request.params.min_tokens:
                del result.ids[kept:]
                result.reason = "stop"
            elif len(result.ids) == request.max_new_tokens:
                result.reason = "length"
            if result.reason:
                break
        result.scores = [*result.scores, *scores][: len(result.ids)]
        return result.ids[before:]


class SlotTable:
    """The slots of a batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self._free = list(range(batch))[::-1]
        self._slots: dict[int, Slot] = {}
        # the sampling inputs of the seated requests; made again when the seats change
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

    def seat(self, number: int, request: Request, allowed: Allowed | None = None) -> Slot:
        """Give a request the next free slot."""
        slot = self._slots[number] = Slot(self._free.pop(), number, request, allowed)
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

        `allowed` are the masks of an asking graph. A graph that takes drafts has `rows` > 1: the newest id and then the
        `drafts` of each request, padded with zeros.
        """
        # new arrays: a device may read from the old ones
        ids_BT, positions_BT = np.zeros((self.batch, rows), np.int32), np.zeros((self.batch, rows), np.int32)
        for slot in self._slots.values():
            ids_BT[slot.index, 0], positions_BT[slot.index] = slot.token, slot.position
        if rows > 1:
            for slot, more in zip(self._slots.values(), drafts, strict=False):
                ids_BT[slot.index, 1 : 1 + len(more)] = more
            positions_BT += np.arange(rows, dtype=np.int32)
        mask_BS = (np.arange(bucket, dtype=np.int32) < positions_BT[:, :1]).astype(np.int32)
        return StepInputs(
            **self._requested(limits)
            | {"input_ids": ids_BT, "attention_mask": mask_BS, "position_ids": positions_BT, "allowed": allowed}
        )

    def inputs_after(self, outputs: StepOutputs, limits: tuple[int, ...]) -> StepInputs:
        """The inputs of a step after one of the same requests and bucket: its outputs, which the host has not read."""
        return StepInputs(
            **self._requested(limits)
            | {
                "input_ids": outputs.next_ids,
                "attention_mask": outputs.next_mask,
                "position_ids": outputs.next_pos,
            }
        )

    def _requested(self, limits: tuple[int, ...]) -> dict[str, np.ndarray]:
        """The sampling inputs of the seated requests, and each one's limit of drafts."""
        if self._sampling is None:
            self._sampling, self._limits = _sampling(self.seated, self.batch), None
        if self._limits != limits:
            limits_B = np.zeros(self.batch, np.int32)
            limits_B[[slot.index for slot in self._slots.values()]] = limits
            limits_B.flags.writeable = False
            self._limits = limits
            self._sampling["k_limits"] = limits_B
        return self._sampling


def prompt_inputs(slot: Slot, bucket: int, words: int) -> StepInputs:
    """The inputs of a slot's prefill; a mask has `words` words."""
    ids = slot.request.ids
    inputs = zero_inputs(B=1, T=bucket, S=bucket)
    inputs.input_ids[0, : len(ids)], inputs.attention_mask[0, : len(ids)] = ids, 1
    inputs.position_ids[0], inputs.seq_ids[0] = np.arange(bucket), slot.index
    _set(inputs, 0, slot.request)
    if not slot.request.asking:
        return inputs
    walks = {0: Walk(slot.allowed, slot.result.ids, 0, words)} if slot.allowed else {}
    return inputs._replace(allowed=masks_of_rows(walks, 1, 1, words), **_asked([slot.request]))


def _sampling(seated: list[Slot], batch: int) -> dict[str, np.ndarray]:
    """The sampling inputs of requests in their rows; idle rows are neutral."""
    inputs = zero_inputs(B=batch, T=1, S=0)
    inputs.seq_ids[:] = np.arange(batch)
    # a top-p of 1 filters nothing
    inputs.sampling_params[:, 1] = 1
    for slot in seated:
        _set(inputs, slot.index, slot.request)
    arrays = {name: array for name, array in inputs._asdict().items() if array is not None}
    if any(slot.request.asking for slot in seated):
        requests = {slot.index: slot.request for slot in seated}
        arrays |= _asked([requests.get(index) for index in range(batch)])
    for array in arrays.values():
        # a runner may keep arrays on its devices that no graph writes to
        array.flags.writeable = False
    return arrays


def _asked(requests: Sequence[Request | None]) -> dict[str, np.ndarray]:
    """An asking graph's inputs of requests, beside their masks; None for an idle row."""
    batch = len(requests)
    asked = np.tile(np.array([*Params().penalties, 0], np.float32), (batch, 1))
    bias_ids, bias = np.full((batch, BIASES), -1, np.int32), np.zeros((batch, BIASES), np.float32)
    for row, request in enumerate(requests):
        if request is not None:
            params = request.params
            asked[row] = (*params.penalties, request.allowed is not None)
            bias_ids[row, : len(params.logit_bias)] = list(params.logit_bias)
            bias[row, : len(params.logit_bias)] = list(params.logit_bias.values())
    return {"asked": asked, "bias_ids": bias_ids, "bias": bias}


def _set(inputs: StepInputs, row: int, request: Request) -> None:
    p = request.params
    inputs.sampling_params[row], inputs.min_p[row] = (p.top_k, p.top_p, p.draw_temperature), p.min_p
    inputs.seeds.view(np.uint32)[row] = p.seed_words
