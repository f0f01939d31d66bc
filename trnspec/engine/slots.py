"""Slots: which request has which slot and which KV blocks, what runs, and the inputs of a step over all slots."""

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from model.cache import KEY_TILE
from model.graph_io import StepInputs, StepOutputs, mask_words
from model.logits_processors import MAX_BIASES, PROMPT_FLAG
from model.sampling import NO_ID
from trnspec.engine.config import Chunk
from trnspec.engine.masks import ConstrainedDraft, masks_of_rows
from trnspec.engine.request import CANNOT_SAMPLE, ERROR, MaskFn, Request, Result, Score

# of a row without a request
_NEUTRAL = Request(())


@dataclass(eq=False)
class Slot:
    """A request's place in the batch.

    `known`: number of tokens to prefill, those sampled before a preemption included; chunks of the first `cached` are
    launched. `token`: the newest token, not cached yet, at `position` (0 during prefill). `blocks`: by position.
    """

    index: int
    number: int
    request: Request
    allowed: MaskFn | None = None
    result: Result = field(default_factory=Result)
    blocks: tuple[int, ...] = ()
    cached: int = 0
    position: int = 0
    token: int = -1
    known: int = 0
    admitted: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.known = len(self.ids)

    @property
    def prefilling(self) -> bool:
        """Whether chunks of its prompt are not launched."""
        return self.cached < self.known

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt and the new tokens."""
        return (*self.request.ids, *self.result.ids)

    def append(self, ids: Iterable[int], scores: Iterable[Score] = ()) -> list[int]:
        """Append new tokens up to the one that ends the request; returns the appended ones."""
        request, result = self.request, self.result
        before = len(result.ids)
        for token in ids:
            if token == NO_ID:
                result.finish_reason, count = ERROR, len(result.ids)
                result.error = f"{CANNOT_SAMPLE} after {count} new tokens; look for an overflow or give other limits"
                break
            result.ids.append(token)
            if token in request.stop_ids:
                result.finish_reason = "eos"
            elif request.cut and (end := request.cut(result.ids)) is not None:
                del result.ids[end:]
                result.finish_reason = "stop"
            elif len(result.ids) == request.max_new_tokens:
                result.finish_reason = "length"
            if result.finish_reason:
                break
        result.scores = [*result.scores, *scores][: len(result.ids)]
        return result.ids[before:]


@dataclass(frozen=True)
class Batch:
    """A chunk of one slot's prompt, or a decode step of k drafts.

    For each slot, `limits` has the most drafts that a step may accept and, with host-side drafting, `drafts` has them.
    `constrained`: the masks of the slots that have masks, by the slot's index.
    """

    slots: tuple[Slot, ...]
    chunk: Chunk | None = None
    k: int = 0
    limits: tuple[int, ...] = ()
    drafts: tuple[list[int], ...] = ()
    constrained: dict[int, ConstrainedDraft] = field(default_factory=dict)

    @property
    def full_sampling(self) -> bool:
        return any(slot.request.full_sampling for slot in self.slots)

    def masks(self, slots: int, words: int) -> np.ndarray | None:
        """(B, N, W) the masks of a step's rows; None if no request needs full sampling."""
        return masks_of_rows(self.constrained, slots, 1 + self.k, words) if self.full_sampling else None

    @property
    def end(self) -> int:
        """The end of the positions that a step may write."""
        return max(slot.position for slot in self.slots) + self.k + 1


class SlotTable:
    """The slots of a batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self._free = list(range(batch))[::-1]
        self._slots: dict[int, Slot] = {}
        self._made: dict[str, tuple[object, dict[str, np.ndarray]]] = {}

    @property
    def full(self) -> bool:
        return not self._free

    @property
    def active(self) -> list[Slot]:
        """The occupied slots in the order of their requests' admission."""
        return list(self._slots.values())

    @property
    def decoding(self) -> list[Slot]:
        """The active slots whose prefill has ended."""
        return [slot for slot in self._slots.values() if slot.position]

    def get(self, number: int) -> Slot | None:
        return self._slots.get(number)

    def is_current(self, slot: Slot) -> bool:
        """Whether a slot's request still has it."""
        return self._slots.get(slot.number) is slot

    def allocate(self, number: int, request: Request, allowed: MaskFn | None = None, **more: Any) -> Slot:
        """Give a request a free slot; `more` are further fields of the slot."""
        self._slots[number] = Slot(self._free.pop(), number, request, allowed, **more)
        return self._slots[number]

    def free(self, number: int) -> None:
        """Free a request's slot, if it has one."""
        if slot := self._slots.pop(number, None):
            self._free.append(slot.index)

    def step_inputs(
        self, limits: tuple[int, ...], bucket: int, allowed: np.ndarray | None = None,
        drafts: Sequence[Sequence[int]] = (), rows: int = 1,
    ) -> StepInputs:  # fmt: skip
        """The inputs of a step of all decoding slots, each with its limit of drafts; the other rows are neutral.

        `allowed`: the masks of a full-sampling graph. `rows` > 1: the newest token and then the `drafts` of each slot.
        """
        # new arrays: a device may still read the old ones
        ids_BT, positions_B = np.zeros((self.batch, rows), np.int32), np.zeros(self.batch, np.int32)
        for slot in self.decoding:
            ids_BT[slot.index, 0], positions_B[slot.index] = slot.token, slot.position
        for slot, ids in zip(self.decoding, drafts, strict=bool(drafts)):
            ids_BT[slot.index, 1 : 1 + len(ids)] = ids
        inputs = self._other_inputs(limits, bucket)
        return StepInputs(input_ids=ids_BT, positions=positions_B, allowed=allowed, **inputs)

    def inputs_after(self, outputs: StepOutputs, limits: tuple[int, ...], bucket: int) -> StepInputs:
        """The inputs of a step after one of the same requests and bucket: its outputs, which the host has not read."""
        inputs = self._other_inputs(limits, bucket)
        return StepInputs(input_ids=outputs.next_ids, positions=outputs.next_positions, **inputs)

    def _other_inputs(self, limits: tuple[int, ...], bucket: int) -> dict[str, np.ndarray]:
        """Limits, sampling parameters and block table, the latter the same arrays as before while nothing changes."""
        limits_B = np.zeros(self.batch, np.int32)
        limits_B[[slot.index for slot in self.decoding]] = limits
        numbers = tuple((slot.index, slot.number) for slot in self.active)
        blocks = tuple((slot.index, slot.blocks) for slot in self.decoding)
        requests = {slot.index: slot.request for slot in self.active}
        inputs = self._fixed("sampling", numbers, lambda: _sampling_inputs(requests, self.batch))
        inputs |= self._fixed(
            f"table {bucket}", blocks, lambda: {"block_table": _block_table(blocks, self.batch, bucket)}
        )
        return inputs | {"k_limits": limits_B}

    def _fixed(self, name: str, state: object, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Read-only inputs, made again when `state` changes; a runner caches them on its devices."""
        if name not in self._made or self._made[name][0] != state:
            self._made[name] = state, make()
            for array in self._made[name][1].values():
                array.flags.writeable = False
        return dict(self._made[name][1])


def prompt_inputs(slot: Slot, chunk: Chunk, vocab_size: int) -> StepInputs:
    ids, request, last = slot.ids, slot.request, chunk.end == slot.known
    ids_1T = np.zeros((1, chunk.rows), np.int32)
    ids_1T[0, : chunk.size] = ids[chunk.first : chunk.end]
    inputs, next_id = _sampling_inputs({0: request}, 1), -1 if last else ids[chunk.end]
    if request.full_sampling:
        words = mask_words(vocab_size)
        # the token after a chunk that is not the last one is dropped
        masked = {0: ConstrainedDraft(slot.allowed, slot.result.ids, 0, words)} if slot.allowed and last else {}
        counts_V = np.bincount(slot.result.ids, minlength=vocab_size).astype(np.int32)
        counts_V[list(request.ids)] += PROMPT_FLAG
        inputs |= {"allowed": masks_of_rows(masked, 1, 1, words), "prompt_token_counts": counts_V[None]}
    else:
        inputs |= _neutral_inputs(vocab_size)
    numbers = {"positions": chunk.first, "num_tokens": chunk.size, "slots": slot.index, "next_prompt_id": next_id}
    inputs |= {name: np.array([number], np.int32) for name, number in numbers.items()}
    return StepInputs(ids_1T, block_table=_block_table([(0, slot.blocks)], 1, chunk.keys), **inputs)


@functools.cache
def _neutral_inputs(vocab_size: int) -> dict[str, np.ndarray]:
    """The inputs of logits processors that change no logit; a runner keeps them on its devices."""
    inputs = {
        "allowed": np.full((1, 1, mask_words(vocab_size)), -1, np.int32),
        "prompt_token_counts": np.zeros((1, vocab_size), np.int32), **_processor_inputs([_NEUTRAL]),
    }  # fmt: skip
    for array in inputs.values():
        array.flags.writeable = False
    return inputs


def _block_table(rows: Iterable[tuple[int, tuple[int, ...]]], batch: int, bucket: int) -> np.ndarray:
    """(B, L) the blocks of rows, as far as the bucket goes; the null block after them, and in the other rows."""
    table_BL = np.zeros((batch, bucket // KEY_TILE), np.int32)
    for row, blocks in rows:
        table_BL[row, : len(blocks)] = blocks[: bucket // KEY_TILE]
    return table_BL


def _sampling_inputs(requests: Mapping[int, Request], batch: int) -> dict[str, np.ndarray]:
    """The sampling parameters of each row's request; a row without one is neutral."""
    rows = [requests.get(row, _NEUTRAL) for row in range(batch)]
    params = [request.params for request in rows]
    inputs = {
        "sampling_params": np.array([(p.top_k, p.top_p, p.sampling_temperature) for p in params], np.float32),
        "min_p": np.array([p.min_p for p in params], np.float32),
        "seeds": np.array([p.seed_words for p in params], np.uint32).view(np.int32),
    }
    return inputs | _processor_inputs(rows) if any(request.full_sampling for request in rows) else inputs


def _processor_inputs(rows: Sequence[Request]) -> dict[str, np.ndarray]:
    """The penalties and biases of rows, and whether log-probabilities are of allowed ids only."""
    penalties, shape = [(*r.params.penalties, r.allowed is not None) for r in rows], (len(rows), MAX_BIASES)
    bias_ids, bias = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    for row, biases in enumerate(r.params.logit_bias for r in rows):
        bias_ids[row, : len(biases)], bias[row, : len(biases)] = list(biases), list(biases.values())
    return {"penalties": np.array(penalties, np.float32), "bias_ids": bias_ids, "bias": bias}
