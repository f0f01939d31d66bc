"""An engine that goes ahead of the device: it hands over the next work before the host has read the current one."""

from __future__ import annotations

import functools
from collections import deque

from model.graph_io import StepOutputs
from model.graph_key import Stage
from model.serving.engine import Engine, Event
from model.serving.work import Work

# steps behind the end of a request in which its client's next one is likely to arrive
_EXPECTED = 2


class OverlappedEngine(Engine):
    """An engine whose work may begin before `step` reads it: a step and the one after it, or prompts.

    A request that is cancelled meanwhile has no events of the running work. Behind a `cancel`, by which a server ends
    requests too, no step is begun early for a while: a new request's prompt would wait for it.
    """

    _expecting = 0

    @functools.cached_property
    def _begun(self) -> deque[tuple[Work, StepOutputs]]:
        return deque()

    @property
    def begun(self) -> bool:
        """Whether the work that the next `step` reads runs already."""
        return bool(self._begun)

    def step(self) -> list[Event]:
        """Read the work that was begun first and that a request still waits for, or run the next."""
        while self._begun:
            work, outputs = self._begun.popleft()
            if any(map(self.slots.holds, work.slots)):
                return self._postprocess(work, outputs)
        return super().step()

    def cancel(self, number: int) -> None:
        super().cancel(number)
        self._expecting = _EXPECTED

    def _postprocess(self, work: Work, outputs: StepOutputs) -> list[Event]:
        self._expecting = max(0, self._expecting - 1)
        return super()._postprocess(work, outputs)

    @property
    def _patient(self) -> bool:
        """Whether a free slot's next request is expected."""
        return self._expecting > 0 and not self.slots.full

    def begin(self, masks: bool = False) -> None:
        """Begin the next step of the seated requests; `masks` says that the masks of their next ids are there."""
        ready = masks or not (self._patient or any(slot.request.allowed for slot in self.slots.seated))
        if ready and not self._begun and (work := self._schedule_step()):
            self._begun.append(self._run(work))

    def admit(self) -> None:
        """Begin the prompts of all that have a free slot, behind the running work; `step` reads each in turn."""
        while work := self._schedule_prompt():
            self._begun.append(self._run(work))

    def follow(self) -> None:
        """Hand over the same step once more behind the one that runs: its inputs are on the devices.

        Only where no result that the host would read can change the step: its requests and its bucket stay the same, at
        least one request needs it unless that request ends, no request waits or is expected, no request is asking, the
        host does not draft, and the k is still the one to choose.
        """
        if self._waiting or self._patient or self.propose or len(self._begun) != 1:
            return
        (work, outputs), seated = self._begun[0], tuple(self.slots.seated)
        if work.k is None or work.asking or work.slots != seated or self._limits(seated) != work.limits:
            return
        ahead, bucket = work.k + 1, self._bucket(work)
        within = max(slot.position for slot in seated) + 2 * ahead <= bucket
        if within and any(s.request.max_new_tokens - len(s.result.ids) > ahead for s in seated):
            inputs = self.slots.inputs_after(outputs, work.limits)
            self._begun.append((work, self.runner.run(inputs.graph(Stage.STEP, work.k, bucket), inputs)))
