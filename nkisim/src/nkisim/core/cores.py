"""Cores as threads that run one at a time: a core hands over when it waits or ends.

The interleaving is therefore the same in every run. Waiting cores name the key they wait for, so
that a deadlock can say who waits for whom.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nkisim.errors import Deadlock, LawError


@dataclass(eq=False)
class Wait:
    """The event that a core waits for: a key shared with its partners, and the words for it."""

    key: object
    partners: tuple[int, ...]
    text: str
    payload: Any
    # the partners' payloads, once everybody is there
    answer: dict[int, Any] | None = None


@dataclass(eq=False)
class Rendezvous:
    """The cores of one launch: whose turn it is, who waits, who ended."""

    members: int
    condition: threading.Condition = field(default_factory=threading.Condition)
    running: int = 0
    waits: dict[int, Wait] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    failure: BaseException | None = None

    def arrive(self, me: int, wait: Wait, joined: Callable[[dict[int, Any]], None] | None = None) -> dict[int, Any]:
        """Wait until every partner waits for the same key; return all payloads by member.

        `joined` runs once, with all payloads, on the last core to arrive.

        Raises:
            Deadlock: the partners ended or wait for something else.
        """
        with self.condition:
            self.waits[me] = wait
            peers = [self.waits.get(p) for p in wait.partners]
            if all(p is not None and p.key == wait.key and p.answer is None for p in peers):
                answer = {p: self.waits[p].payload for p in wait.partners}
                for p in wait.partners:
                    self.waits[p].answer = answer
                if joined is not None:
                    joined(answer)
            self._pass_on(me)
            while wait.answer is None or self.running != me:
                if self.failure is not None:
                    raise self.failure
                self.condition.wait()
            del self.waits[me]
            return wait.answer

    def begin(self, me: int) -> None:
        """Wait for this core's first turn."""
        with self.condition:
            while self.running != me:
                if self.failure is not None:
                    raise self.failure
                self.condition.wait()

    def end(self, me: int, failure: BaseException | None = None) -> None:
        """Note that a core ended, and let a different one run."""
        with self.condition:
            self.ended.add(me)
            if failure is not None and self.failure is None:
                self.failure = failure
            if self.failure is not None:
                self.condition.notify_all()
                return
            try:
                self._pass_on(me)
            except LawError as error:
                self.failure = error
                self.condition.notify_all()

    def _pass_on(self, me: int) -> None:
        """Give the turn to the next core that can run."""
        order = [(me + i) % self.members for i in range(1, self.members + 1)]
        for member in order:
            wait = self.waits.get(member)
            if member not in self.ended and (wait is None or wait.answer is not None):
                self.running = member
                self.condition.notify_all()
                return
        if len(self.ended) == self.members:
            return
        error = self._deadlock()
        self.failure = error
        self.condition.notify_all()
        raise error

    def _deadlock(self) -> Deadlock:
        parts = []
        for member in range(self.members):
            if member in self.ended:
                parts.append(f"core {member} has ended")
            else:
                wait = self.waits[member]
                others = ", ".join(str(p) for p in wait.partners if p != member)
                parts.append(f"core {member} waits for core {others} in {wait.text}")
        allowed = "every partner must reach the same call with the same identifiers"
        return Deadlock("launch", None, "cannot proceed: " + "; ".join(parts), allowed)


def run_all(meeting: Rendezvous, bodies: list[Callable[[], None]]) -> None:
    """Run one body per core, each on its own thread; raise the first failure."""
    if len(bodies) == 1:
        bodies[0]()
        return

    def start(member: int) -> None:
        try:
            meeting.begin(member)
            bodies[member]()
        except BaseException as error:
            meeting.end(member, error)
        else:
            meeting.end(member)

    threads = [threading.Thread(target=start, args=(i,), daemon=True) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if meeting.failure is not None:
        raise meeting.failure
