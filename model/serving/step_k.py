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
# the share of time that may go to trials of another k, and how many of them may be saved up
_TRIALS, _SAVED, _LEAST_PRICE = 0.01, 2.0, 0.5
# how much of a new measurement goes into the time of a k
_NEW = 0.2


@dataclass
class Paying:
    """Speculates while it pays.

    `seconds` are the times of a step by its k, measured before any request. Only their ratios matter: load slows the
    steps of every k. A ratio is measured again where two steps of different k follow each other.

    While one k runs nothing is learned about the others. So another k is tried now and then, for at most 1 % of the
    time: soonest when a request has just come, since steps of the target alone leave holes in the draft's cache, and
    requests with holes are not counted.
    """

    seconds: Mapping[int, float]
    all: Rate = field(default_factory=lambda: Rate(accepted=4.0, refused=1.0))
    requests: dict[int, Rate] = field(default_factory=dict)
    _cost: dict[int, float] = field(init=False)
    _last: tuple[int, float] | None = None
    _current: int = -1
    _trial: int = -1
    _price: float = 0.0
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
            self._current = best
        self._trial, self._price = self._next_trial(ids)
        new = any(slot.number not in self.requests for slot in slots)
        return self._trial if self._credit >= self._price * (1 if new else _SAVED) else self._current

    def ended(self, k: int, seconds: float | None, requests: Sequence[Ended]) -> None:
        if seconds:
            self._measure(k, seconds)
        self._credit = min(self._credit + _TRIALS, _SAVED * self._price)
        if k == self._trial != self._current:
            self._credit -= self._price
        for request in requests:
            rate = self.requests.setdefault(request.number, Rate())
            rate.holes |= not k
            if not rate.holes:
                rate.count(request, _OF_REQUEST)
                self.all.count(request, _OF_ALL)

    def _next_trial(self, ids: Mapping[int, float]) -> tuple[int, float]:
        """The best other k that drafts, and the time that a step of it would waste, in steps of the current k.

        The target alone is not tried: it leaves holes, and needs no trial to tell what it emits.
        """
        others = [k for k in self.ks if k not in (0, self._current)]
        if not others:
            return self._current, 0.0
        trial = max(others, key=lambda k: ids[k])
        wasted = 1 - ids[trial] / ids[self._current]
        return trial, max(wasted * self._cost[trial] / self._cost[self._current], _LEAST_PRICE)

    def _expected(self, slot: Slot, k: int) -> float:
        """Ids that a step of k drafts is expected to emit for a request: each draft is accepted with the same chance,
        none behind a refused one."""
        rate = self.requests.get(slot.number, Rate())
        of_all = self.all.accepted / (self.all.accepted + self.all.refused)
        p = (rate.accepted + _PRIOR * of_all) / (rate.accepted + rate.refused + _PRIOR)
        most = k if slot.request.k_limit is None else min(k, slot.request.k_limit)
        return sum(p**n for n in range(most + 1))

    def _measure(self, k: int, seconds: float) -> None:
        last, self._last = self._last, (k, seconds)
        if last is None or last[0] == k or not k:
            return
        # the time of k by that of the step before it; the target alone is the unit
        measured = self._cost[last[0]] * seconds / last[1]
        self._cost[k] *= (measured / self._cost[k]) ** _NEW
