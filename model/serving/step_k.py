"""The k of a step: one rule, of this file. The choice changes the time of a step, never a token.

A step of k drafts pays while the ids that it is expected to emit, over its time, are more than those of the target
alone. `Paying` knows both: the time of steps by k, and how many drafts each request accepts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from model.serving.slots import Slot


class Ended(NamedTuple):
    """A request's share of a step that has ended: how many drafts it could accept, and how many it did."""

    number: int
    drafted: int
    accepted: int


class StepK(Protocol):
    """Chooses the k of steps.

    `ks` are all that it may choose. `ended` tells it of each step: its wall seconds, unless it ran other graphs than
    those of k, as a step with masks does.
    """

    @property
    def ks(self) -> tuple[int, ...]: ...

    def choose(self, slots: Sequence[Slot]) -> int: ...

    def ended(self, k: int, seconds: float | None, requests: Sequence[Ended]) -> None: ...


@dataclass(frozen=True)
class Always:
    """The same k at every step."""

    k: int

    @property
    def ks(self) -> tuple[int, ...]:
        return (self.k,)

    def choose(self, slots: Sequence[Slot]) -> int:
        return self.k

    def ended(self, k: int, seconds: float | None, requests: Sequence[Ended]) -> None:
        """Nothing to learn."""


@dataclass
class Rate:
    """The share of drafts that are accepted, as a decaying count of accepted and refused ones."""

    accepted: float = 0.0
    refused: float = 0.0
    # whether its draft's cache lacks what steps of the target alone have not written
    holes: bool = False

    def count(self, request: Ended, memory: float) -> None:
        """Add a step; a step refuses one draft at most, those behind it were never judged."""
        self.accepted = self.accepted * memory + request.accepted
        self.refused = self.refused * memory + (request.accepted < request.drafted)


# steps over which a request's rate, and sequence steps over which the rate of all, lose most of their weight
_OF_REQUEST, _OF_ALL = 1 - 1 / 16, 1 - 1 / 64
# drafts that the rate of all weighs in a request's own
_PRIOR = 8.0
# another k has to be better by this much: below it lies the noise of the clock
_BETTER = 1.04
# the share of time that may go to trials of another k, how many of them may be saved up, the steps of one, and the
# least that a step of it is taken to waste
_TRIALS, _SAVED, _STEPS, _LEAST_PRICE = 0.02, 2.0, 24, 0.25
# how much of a new measurement goes into the time of a k, how far it may be from the last one, and steps behind a
# change of k that are measured
_NEW, _FAR, _FRESH = 0.2, 1.25, 4


@dataclass
class _Run:
    """Steps of one k in a row: their number and their seconds, of which the latest weigh most."""

    k: int
    steps: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.steps += 1
        self.seconds += (seconds - self.seconds) * max(1 / self.steps, _NEW)


@dataclass
class Paying:
    """Speculates while it pays.

    `seconds` are the times of a step by its k, measured before any request. Only their ratios matter: load slows the
    steps of every k. A ratio is measured again behind each change of k, but for the first step: it could not begin
    before the last one of the k before it was read.

    While one k runs nothing is learned about the others. So another k is tried now and then, for some steps in a row,
    because the first ids of an answer are often the hardest, and for at most 2 % of the time: soonest when a request
    has just come, since steps of the target alone leave holes in the draft's cache, and requests with holes are not
    counted.
    """

    seconds: Mapping[int, float]
    all: Rate = field(default_factory=lambda: Rate(accepted=4.0, refused=1.0))
    requests: dict[int, Rate] = field(default_factory=dict)
    _cost: dict[int, float] = field(init=False)
    _run: _Run | None = None
    _before: _Run | None = None
    _current: int = -1
    # the k on trial, the steps of it that are left, and the time that one wastes, in steps of the current k
    _trial: int = -1
    _left: int = 0
    _price: float = _LEAST_PRICE
    _credit: float = 0.0

    def __post_init__(self) -> None:
        self._cost = dict(self.seconds)

    @property
    def ks(self) -> tuple[int, ...]:
        return tuple(sorted(self.seconds))

    def choose(self, slots: Sequence[Slot]) -> int:
        """The k that emits most ids a second for these requests; asked again before a step ends, the same one."""
        self.requests = {slot.number: self.requests[slot.number] for slot in slots if slot.number in self.requests}
        ids = {k: sum(self._expected(slot, k) for slot in slots) / self._cost[k] for k in self.ks}
        best = max(self.ks, key=lambda k: ids[k])
        if self._current < 0 or ids[best] > ids[self._current] * _BETTER:
            self._current, self._left = best, 0
        if not self._left:
            self._try(ids, any(slot.number not in self.requests for slot in slots))
        return self._trial if self._left else self._current

    def ended(self, k: int, seconds: float | None, requests: Sequence[Ended]) -> None:
        if seconds:
            self._measure(k, seconds)
        self._credit = min(self._credit + _TRIALS, _SAVED * self._price * _STEPS)
        if self._left and k == self._trial:
            self._left -= 1
        for request in requests:
            rate = self.requests.setdefault(request.number, Rate())
            rate.holes |= not k
            if not rate.holes:
                rate.count(request, _OF_REQUEST)
                self.all.count(request, _OF_ALL)

    def _try(self, ids: Mapping[int, float], new: bool) -> None:
        """Begin a trial of the best other k that drafts, if enough time was saved for it.

        The target alone is not tried: it leaves holes, and needs no trial to tell what it emits.
        """
        others = [k for k in self.ks if k not in (0, self._current)]
        if not others:
            return
        self._trial = max(others, key=lambda k: ids[k])
        wasted = 1 - ids[self._trial] / ids[self._current]
        self._price = max(wasted * self._cost[self._trial] / self._cost[self._current], _LEAST_PRICE)
        price = self._price * _STEPS
        if self._credit >= price * (1 if new else _SAVED):
            self._credit, self._left = self._credit - price, _STEPS

    def _expected(self, slot: Slot, k: int) -> float:
        """Ids that a step of k drafts is expected to emit for a request: each draft is accepted with the same chance,
        none behind a refused one.

        A request is never taken to be worse than all are: that a draft was given up cannot be mended, its holes stay.
        """
        rate = self.requests.get(slot.number, Rate())
        of_all = self.all.accepted / (self.all.accepted + self.all.refused)
        p = max(of_all, (rate.accepted + _PRIOR * of_all) / (rate.accepted + rate.refused + _PRIOR))
        most = k if slot.request.k_limit is None else min(k, slot.request.k_limit)
        return sum(p**n for n in range(most + 1))

    def _measure(self, k: int, seconds: float) -> None:
        if self._run is None or self._run.k != k:
            self._before, self._run = self._run, _Run(k)
            return
        self._run.add(seconds)
        if self._before is None or not self._before.steps or self._run.steps > _FRESH:
            return
        # the target alone is the unit: the time of the other k is measured by it, or that of k by the other's
        ratio = seconds / self._before.seconds
        changed, measured = k, self._cost[self._before.k] * ratio
        if not k:
            changed, measured = self._before.k, self._cost[0] / ratio
        self._cost[changed] *= min(max(measured / self._cost[changed], 1 / _FAR), _FAR) ** _NEW
