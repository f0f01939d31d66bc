"""An engine that launches ahead: the next batch is on the device before the host has read the current one."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from model.graph_io import StepOutputs
from model.graph_key import Stage
from trnspec.engine.engine import Engine, Event
from trnspec.engine.masks import mask_fn
from trnspec.engine.request import Request, Result
from trnspec.engine.slots import Batch


class AsyncEngine(Engine):
    """An engine whose batches may be launched before `step` reads them: a step and the next one, or prefill chunks.

    Requests queue inside (`add`), or an outer scheduler brings them with KV blocks (`admit`). A request that is
    cancelled meanwhile has no events of the launched batches.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._launched: deque[tuple[Batch, StepOutputs]] = deque()

    @property
    def launched(self) -> Batch | None:
        """The batch that the next `step` reads, if it is launched."""
        return self._launched[0][0] if self._launched else None

    def step(self) -> list[Event]:
        """Read the oldest launched batch that has an active request, or run the next one."""
        while self._launched:
            batch, outputs = self._launched.popleft()
            if any(map(self.slots.is_current, batch.slots)):
                return self._postprocess(batch, outputs)
        return super().step()

    def cancel(self, number: int) -> None:
        super().cancel(number)
        active = [one for one in self._launched if any(map(self.slots.is_current, one[0].slots))]
        self._launched = deque(active)

    def preempt(self, number: int) -> list[int]:
        """Release an active request; returns the tokens that it has sampled, with which it may be admitted again."""
        slot = self.slots.get(number)
        assert slot is not None
        self.cancel(number)
        return list(slot.result.ids)

    def admit(self, request: Request, blocks: Sequence[int] = (), cached: int = 0, ids: Sequence[int] = ()) -> int:
        """Give a request a slot and KV blocks, which hold its first `cached` tokens; returns its number.

        `ids`: the tokens that it had sampled before a preemption.
        """
        number = next(self._numbers)
        allowed = mask_fn(request, self.config.vocab_size)
        before = Result(ids=list(ids))
        self.slots.allocate(number, request, allowed, blocks=tuple(blocks), result=before, cached=cached)
        return number

    def add_blocks(self, number: int, blocks: Sequence[int]) -> None:
        """Give an active request more KV blocks."""
        if slot := self.slots.get(number):
            slot.blocks += tuple(blocks)

    def prefilling(self, number: int) -> bool:
        """Whether chunks of an active request's prompt are not launched."""
        return bool((slot := self.slots.get(number)) and slot.prefilling)

    def prefill(self, number: int, length: int) -> None:
        """Launch the chunks of an active request's first `length` tokens, after the launched batches."""
        slot = self.slots.get(number)
        assert slot is not None
        while slot.cached < min(length, slot.known):
            self._launched.append(self._run(self._next_chunk(slot, min(length, slot.known))))

    def launch(self, masks: bool = False) -> None:
        """Launch the next decode step, if there is none; grammars must have their `masks`."""
        ready = masks or not any(slot.request.allowed for slot in self.slots.decoding)
        if ready and not self._launched and (batch := self._schedule_step()) and self._has_blocks(batch, 1):
            self._launched.append(self._run(batch))

    def launch_next(self) -> None:
        """Launch the same step again after the one that runs, whose unread outputs are its inputs.

        Only where no result can change it: the requests, their limits and the bucket stay the same, none waits, none
        needs masks or host-side drafts, and at least one will not reach its `max_new_tokens`.
        """
        if self._waiting or self.propose or len(self._launched) != 1:
            return
        (batch, outputs), slots = self._launched[0], tuple(self.slots.decoding)
        if batch.chunk or batch.full_sampling or batch.slots != slots or self._limits(slots) != batch.limits:
            return
        ahead, bucket = batch.k + 1, self.config.bucket(batch.end)
        # the limits stay the same: no sequence may come near max_len
        within = batch.end + ahead <= min(bucket, self.config.max_len - 1) and self._has_blocks(batch, 2)
        if within and any(s.request.max_new_tokens - len(s.result.ids) > ahead for s in slots):
            inputs = self.slots.inputs_after(outputs, batch.limits, bucket)
            self._launched.append((batch, self.runner.run(inputs.graph(Stage.STEP, batch.k, bucket), inputs)))

    def _has_blocks(self, batch: Batch, steps: int) -> bool:
        """Whether the requests of a step have KV blocks for all rows of so many steps."""
        rows = steps * (batch.k + 1)
        enough = (len(slot.blocks) >= self.config.blocks(slot.position + rows) for slot in batch.slots)
        return self.owns_blocks or all(enough)
