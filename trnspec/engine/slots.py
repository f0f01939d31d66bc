"""The slot table: which request sits in which slot of the batch, and the inputs of a step over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from model.cache import KEY_TILE
from model.graph_io import StepInputs, StepOutputs, mask_words, zero_inputs
from model.logits_processors import MAX_BIASES, PROMPT_FLAG
from model.sampling import NO_ID
from trnspec.engine.masks import Allowed, Walk, masks_of_rows
from trnspec.engine.request import ERROR, NO_DRAW, Chunk, Params, Request, Result, Score, Shape


@dataclass
class Slot:
    """A request's place in the batch: `token` is its newest id, whose place in the caches is `position`.

    `allowed` are all its masks, those of its parameters too. `known` ids are there before the next one is drawn: its
    prompt, and what it had drawn before it lost its place. The rows of the first `cached` of them are written, or their
    chunks have begun. `blocks` are those of its positions, in order.
    """

    index: int
    number: int
    request: Request
    allowed: Allowed | None = None
    result: Result = field(default_factory=Result)
    position: int = 0
    token: int = -1
    cached: int = 0
    known: int = 0
    blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known = len(self.ids)

    @property
    def filling(self) -> bool:
        """Whether chunks of its prompt have not begun."""
        return self.cached < self.known

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
        self._limits: tuple[tuple[int, int], ...] | None = None
        # bucket -> the blocks of the ready ones
        self._tables: dict[int, np.ndarray] = {}

    @property
    def full(self) -> bool:
        return not self._free

    @property
    def seated(self) -> list[Slot]:
        """The occupied slots, in the order of their requests' arrival."""
        return list(self._slots.values())

    @property
    def ready(self) -> list[Slot]:
        """The occupied slots whose prompts have ended."""
        return [slot for slot in self._slots.values() if slot.position]

    def has(self, number: int) -> bool:
        """Whether a request has a slot."""
        return number in self._slots

    def find(self, number: int) -> Slot:
        """The slot of a request."""
        return self._slots[number]

    def changed(self) -> None:
        """Blocks or readiness of a slot have changed."""
        self._tables = {}

    def table(self, bucket: int) -> np.ndarray:
        """(B, L) the blocks of a bucket's positions; none for slots that are not ready."""
        if bucket not in self._tables:
            table_BL = np.zeros((self.batch, bucket // KEY_TILE), np.int32)
            for slot in self.ready:
                table_BL[slot.index] = _row(slot, table_BL.shape[1])
            # a runner may keep it on its devices
            table_BL.flags.writeable = False
            self._tables[bucket] = table_BL
        return self._tables[bucket]

    def holds(self, slot: Slot) -> bool:
        """Whether a slot's request is still there."""
        return self._slots.get(slot.number) is slot

    def seat(
        self,
        number: int,
        request: Request,
        allowed: Allowed | None = None,
        blocks: Sequence[int] = (),
        ids: Sequence[int] = (),
    ) -> Slot:
        """Give a request the next free slot, these blocks and the ids that it has drawn before."""
        slot = Slot(self._free.pop(), number, request, allowed, Result(ids=list(ids)), blocks=list(blocks))
        self._slots[number], self._sampling = slot, None
        return slot

    def leave(self, number: int) -> None:
        """Free a request's slot, if it has one."""
        if slot := self._slots.pop(number, None):
            self._free.append(slot.index)
            self._sampling = None
            self.changed()

    def step_inputs(
        self,
        limits: tuple[int, ...],
        bucket: int,
        allowed: np.ndarray | None = None,
        drafts: Sequence[Sequence[int]] = (),
        rows: int = 1,
    ) -> StepInputs:
        """The inputs of a step of all ready requests, each with its limit of drafts; idle rows are neutral.

        `allowed` are the masks of an asking graph. A graph that takes drafts has `rows` > 1: the newest id and then the
        `drafts` of each request, padded with zeros.
        """
        # new arrays: a device may read from the old ones
        ids_BT, positions_B = np.zeros((self.batch, rows), np.int32), np.zeros(self.batch, np.int32)
        for slot in self.ready:
            ids_BT[slot.index, 0], positions_B[slot.index] = slot.token, slot.position
        if rows > 1:
            for slot, more in zip(self.ready, drafts or [()] * len(self.ready), strict=True):
                ids_BT[slot.index, 1 : 1 + len(more)] = more
        return StepInputs(
            **self._requested(limits, bucket) | {"input_ids": ids_BT, "positions": positions_B, "allowed": allowed}
        )

    def inputs_after(self, outputs: StepOutputs, limits: tuple[int, ...], bucket: int) -> StepInputs:
        """The inputs of a step after one of the same requests and bucket: its outputs, which the host has not read."""
        return StepInputs(
            **self._requested(limits, bucket) | {"input_ids": outputs.next_ids, "positions": outputs.next_positions}
        )

    def _requested(self, limits: tuple[int, ...], bucket: int) -> dict[str, np.ndarray]:
        """The sampling inputs of the seated requests, each ready one's limit of drafts, and their blocks."""
        if self._sampling is None:
            self._sampling, self._limits = _sampling(self.seated, self.batch), None
        of_slots = tuple((slot.index, limit) for slot, limit in zip(self.ready, limits, strict=True))
        if self._limits != of_slots:
            limits_B = np.zeros(self.batch, np.int32)
            for index, limit in of_slots:
                limits_B[index] = limit
            limits_B.flags.writeable = False
            self._limits = of_slots
            self._sampling["k_limits"] = limits_B
        return self._sampling | {"block_table": self.table(bucket)}


def prompt_inputs(slot: Slot, chunk: Chunk, shape: Shape) -> StepInputs:
    """The inputs of a chunk of a slot's prompt."""
    ids, blocks = slot.ids, chunk.keys // KEY_TILE
    inputs = zero_inputs(B=1, T=chunk.rows, L=blocks, F=1)
    inputs.input_ids[0, : chunk.size] = ids[chunk.first : chunk.last]
    inputs.positions[0], inputs.num_tokens[0], inputs.slots[0] = chunk.first, chunk.size, slot.index
    inputs.block_table[0] = _row(slot, blocks)
    inputs.next_prompt_id[0] = ids[chunk.last] if chunk.last < slot.known else -1
    _set(inputs, 0, slot.request)
    if not slot.request.asking:
        return inputs
    words, last = mask_words(shape.vocabulary), chunk.last == slot.known
    # the token after a chunk that is not the last one is dropped
    walks = {0: Walk(slot.allowed, slot.result.ids, 0, words)} if slot.allowed and last else {}
    allowed, counts = masks_of_rows(walks, 1, 1, words), _prompt_token_counts(slot, shape.vocabulary)
    return inputs._replace(allowed=allowed, prompt_token_counts=counts, **_asked([slot.request]))


def _row(slot: Slot, count: int) -> list[int]:
    """The first blocks of a slot, 0 for those that it does not have."""
    return (slot.blocks + [0] * count)[:count]


def _prompt_token_counts(slot: Slot, vocabulary: int) -> np.ndarray:
    """(1, V) how often each id is among the drawn ones, and whether it is in the prompt."""
    counts_V = np.bincount(slot.result.ids, minlength=vocabulary).astype(np.int32)
    counts_V[list(slot.request.ids)] += PROMPT_FLAG
    return counts_V[None]


def _sampling(seated: list[Slot], batch: int) -> dict[str, np.ndarray]:
    """The sampling inputs of requests in their rows; idle rows are neutral."""
    inputs = zero_inputs(B=batch, D=batch, T=1, L=0)
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
    bias_ids, bias = np.full((batch, MAX_BIASES), -1, np.int32), np.zeros((batch, MAX_BIASES), np.float32)
    for row, request in enumerate(requests):
        if request is not None:
            params = request.params
            asked[row] = (*params.penalties, request.allowed is not None)
            bias_ids[row, : len(params.logit_bias)] = list(params.logit_bias)
            bias[row, : len(params.logit_bias)] = list(params.logit_bias.values())
    return {"penalties": asked, "bias_ids": bias_ids, "bias": bias}


def _set(inputs: StepInputs, row: int, request: Request) -> None:
    p = request.params
    inputs.sampling_params[row], inputs.min_p[row] = (p.top_k, p.top_p, p.draw_temperature), p.min_p
    inputs.seeds.view(np.uint32)[row] = p.seed_words
