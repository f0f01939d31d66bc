"""An engine that goes ahead of the device: it hands over the next work before the host has read the current one."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Sequence

from model.attention import KEY_TILE
from model.graph_io import StepOutputs
from model.graph_key import Stage
from trnspec.engine.engine import Engine, Event
from trnspec.engine.masks import limited
from trnspec.engine.request import Request
from trnspec.engine.step_k import Ended
from trnspec.engine.work import Work

# steps behind the end of a request in which its client's next one is likely to arrive
_EXPECTED = 2
# how much more a step may take, after each one of its kind, than the shortest one
_LONGER = 1.02


class OverlappedEngine(Engine):
    """An engine whose work may begin before `step` reads it: a step and the one after it, or prompts.

    Its requests queue inside (`add`), or come with slots and blocks that an outer scheduler has given them (`place`).

    A request that is cancelled meanwhile has no events of the running work. Behind a `cancel`, by which a server ends
    requests too, no step is begun early for a while: a new request's prompt would wait for it.
    """

    _expecting = 0

    @functools.cached_property
    def _shortest(self) -> dict[tuple[int | None, int], float]:
        """The seconds of the shortest recent step by its k and the octave of the tiles of keys that it reaches."""
        return {}

    @functools.cached_property
    def _begun(self) -> deque[tuple[Work, StepOutputs]]:
        return deque()

    @property
    def begun(self) -> bool:
        """Whether the work that the next `step` reads runs already."""
        return bool(self._begun)

    @property
    def begun_chunk(self) -> bool:
        """Whether the work that the next `step` reads is a chunk of a prompt."""
        return self.begun and self._begun[0][0].chunk is not None

    @property
    def begun_k(self) -> int | None:
        """The k of the step that the next `step` reads, if it runs already."""
        return self._begun[0][0].k if self.begun else None

    @property
    def left_s(self) -> float:
        """Seconds until the work that `step` reads next is likely to end: 0 if it has, or if nothing foretells it."""
        if not self._begun or self._begun[0][1].ready or not self._since:
            return 0.0
        work = self._begun[0][0]
        shortest = self._shortest.get((work.k, _octave(self._reach(work))), 0.0)
        return max(0.0, self._since + shortest - time.perf_counter())

    def step(self) -> list[Event]:
        """Read the work that was begun first and that a request still waits for, or run the next."""
        while self._begun:
            work, outputs = self._begun.popleft()
            if any(map(self.slots.holds, work.slots)):
                return self._postprocess(work, outputs)
        return super().step()

    def cancel(self, number: int) -> None:
        self._drop(number)
        self._expecting = _EXPECTED

    def preempt(self, number: int) -> list[int]:
        """Take a seated request's place: the ids that it has drawn, with which it may be placed again."""
        drawn = list(self.slots.find(number).result.ids)
        self._drop(number)
        return drawn

    def _drop(self, number: int) -> None:
        """Forget a request, and the begun work that none waits for any more."""
        super().cancel(number)
        begun = [one for one in self._begun if any(map(self.slots.holds, one[0].slots))]
        self._begun.clear()
        self._begun.extend(begun)

    def _postprocess(self, work: Work, outputs: StepOutputs) -> list[Event]:
        self._expecting = max(0, self._expecting - 1)
        return super()._postprocess(work, outputs)

    def _ended(self, k: int, reach: int, seconds: float | None, requests: list[Ended]) -> None:
        super()._ended(k, reach, seconds, requests)
        if seconds:
            kind = k, _octave(reach)
            self._shortest[kind] = min(seconds, _LONGER * self._shortest.get(kind, seconds))

    @property
    def _patient(self) -> bool:
        """Whether a free slot's next request is expected."""
        return self._expecting > 0 and not self.slots.full

    def begin(self, masks: bool = False) -> None:
        """Begin the next step of the seated requests; `masks` says that the masks of their next ids are there."""
        ready = masks or not (self._patient or any(slot.request.allowed for slot in self.slots.ready))
        if ready and not self._begun and (work := self._schedule_step()) and self._covered(work, 1):
            self._begun.append(self._run(work))

    def _covered(self, work: Work, steps: int) -> bool:
        """Whether the requests of a step have blocks for all rows of so many steps."""
        ahead = steps * ((work.k or 0) + 1)
        held = (len(slot.blocks) >= self.shape.blocks(slot.position + ahead) for slot in work.slots)
        return self.blocks is not None or all(held)

    def place(self, request: Request, blocks: Sequence[int] = (), cached: int = 0, ids: Sequence[int] = ()) -> int:
        """Seat a request in blocks whose owner is outside: its number.

        Its first `cached` ids are in the blocks; it has drawn `ids` before it lost its place.
        """
        number = next(self._numbers)
        slot = self.slots.seat(number, request, limited(request, self.shape.vocabulary), blocks, ids)
        slot.cached = cached
        return number

    def grow(self, number: int, blocks: Sequence[int]) -> None:
        """Give a seated request further blocks."""
        if blocks and self.slots.has(number):
            self.slots.find(number).blocks += blocks
            self.slots.changed()

    def fill(self, number: int, length: int) -> None:
        """Begin the chunks of a seated request's first `length` ids, behind the running work."""
        slot = self.slots.find(number)
        length = min(length, slot.known)
        while slot.cached < length:
            self._begun.append(self._run(self._chunk(slot, length)))

    def filling(self, number: int) -> bool:
        """Whether a seated request has ids whose chunks have not begun."""
        return self.slots.has(number) and self.slots.find(number).filling

    def follow(self) -> None:
        """Hand over the same step once more behind the one that runs: its inputs are on the devices.

        Only where no result that the host would read can change the step: its requests and its bucket stay the same, at
        least one request needs it unless that request ends, no request waits or is expected, no request is asking, the
        host does not draft, and the k is still the one to choose.
        """
        if self._waiting or self._patient or self._due(None) or self.propose or len(self._begun) != 1:
            return
        (work, outputs), seated = self._begun[0], tuple(self.slots.ready)
        if work.k is None or work.asking or work.slots != seated or self._limits(seated) != work.limits:
            return
        ahead, bucket = work.k + 1, self._bucket(work)
        # the second step's limits are the first one's: no sequence may come near max_len
        within = max(slot.position for slot in seated) + 2 * ahead <= min(bucket, self.shape.max_len - 1)
        within = within and self._covered(work, 2)
        if within and any(s.request.max_new_tokens - len(s.result.ids) > ahead for s in seated):
            inputs = self.slots.inputs_after(outputs, work.limits, bucket)
            outputs = self.runner.run(inputs.graph(Stage.STEP, work.k, bucket), inputs)
            self._begun.append((self._timed(work), outputs))


def _octave(reach: int) -> int:
    """Of the tiles of keys before a position."""
    return (reach // KEY_TILE).bit_length()
