"""The k of a step: one rule, of this file. The choice changes the time of a step, never a token.

A step of k drafts pays while the ids that it is expected to emit, over its time, are more than those of the target
alone. `Paying` knows both: the time of steps by k, bucket and running requests, and how many drafts these accept.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from trnspec.engine.slots import Slot


class Ended(NamedTuple):
    """A request's share of a step that has ended: how many drafts it could accept, and how many it did."""

    drafted: int
    accepted: int


class StepK(Protocol):
    """Chooses the k of steps.

    `ks` are all that it may choose. `ended` tells it of each step: its reach, which is the end of the positions
    that it may write, and its wall seconds unless it ran other graphs than those of k, as a step with masks does.
    """

    @property
    def ks(self) -> tuple[int, ...]: ...

    def choose(self, slots: Sequence[Slot]) -> int: ...

    def ended(self, k: int, reach: int, seconds: float | None, requests: Sequence[Ended]) -> None: ...


@dataclass(frozen=True)
class Always:
    """The same k at every step."""

    k: int

    @property
    def ks(self) -> tuple[int, ...]:
        return (self.k,)

    def choose(self, slots: Sequence[Slot]) -> int:
        return self.k

    def ended(self, k: int, reach: int, seconds: float | None, requests: Sequence[Ended]) -> None:
        """Nothing to learn."""


# steps of requests over which what was accepted loses most of its weight
_MEMORY = 1 - 1 / 128
# the acceptance of a draft before any was judged, and the drafts that this weighs
_FIRST, _WEIGHT = 0.8, 5.0
# another k has to be better by this much, the noise of the clock, and by so many steps in all before it is taken: the
# first ones behind a change are slower, and a request's last ids want few drafts for a moment
_BETTER, _CHANGE = 1.04, 1.5
# the share of time that trials of another k may lose, what each loses beside its steps, by two changes of k, and what
# the first one waits for, both in steps
_TRIALS, _OF_CHANGES, _SOON = 0.01, 6.5, 0.3
# steps of a trial: of drafts, until the draft's cache has keys of the latest ids again; of these the first are left out
# of the measurement, by whether there are drafts: the target's have not its own pace yet
_OF_TRIAL, _UNSETTLED, _MEASURED = 26, {False: 16, True: 4}, 10
# the steps that a trial may lose before it ends; the ids that a request has at most while it begins, and the share of
# the time, in steps, for which a trial waits for one
_GIVE_UP, _FEW, _PATIENCE = 10.0, 4, 5.0
# the latest steps that give the pace of their run; how much of a new measurement goes into the time of a k, and how far
# it may be from the last one
_LATEST, _NEW, _FAR = 40, 0.3, 1.5
# the share of a step's running requests in their mean, whose octave is the load
_OF_LOAD = 1 / 16


class Acceptance:
    """How often the n-th draft of a step was judged, and accepted, as decaying counts by n."""

    def __init__(self, most: int) -> None:
        self._judged, self._accepted = [_WEIGHT] * most, [_FIRST * _WEIGHT] * most

    def count(self, request: Ended) -> None:
        """Add a request's share of a step; behind a refused draft none was judged."""
        for n in range(min(request.accepted + 1, request.drafted)):
            self._judged[n] = self._judged[n] * _MEMORY + 1
            self._accepted[n] = self._accepted[n] * _MEMORY + (n < request.accepted)

    def emitted(self) -> list[float]:
        """Ids that a step is expected to emit, by its number of drafts from 0 on."""
        chances = map(operator.truediv, self._accepted, self._judged)
        return list(itertools.accumulate(itertools.accumulate(chances, operator.mul), initial=1.0))


@dataclass
class _Run:
    """Steps of one k in a row: those that measured, and how much slower the latest of them were than the first one of
    their graphs."""

    k: int
    steps: int = field(init=False)
    _latest: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.steps, self._latest = -_UNSETTLED[self.k > 0], deque(maxlen=_LATEST)

    def add(self, slower: float) -> None:
        self.steps += 1
        if self.steps > 0:
            self._latest.append(slower)

    @property
    def slower(self) -> float:
        """The lower quartile: what else runs on a machine lengthens some steps by much."""
        return sorted(self._latest)[len(self._latest) // 4]


@dataclass
class _Load:
    """What was learned while about so many requests run: the time of each k's steps beside the first one, and what
    trials have lost beyond their share of the time, in steps."""

    slower: dict[int, float]
    debt: float = _SOON


@dataclass
class Paying:
    """Speculates while it pays.

    `seconds` are the times of a step by its k, bucket and number of running requests, measured before any request for
    one of these and for the most; the bucket is that of what a step reaches, whatever its graph reads. Only their
    ratios matter: load slows the steps of every k. How much slower those of a k have become beside another's is
    measured again behind each change of k, by its settled steps, and apart for each load: one, about two, about four
    running requests.

    While one k runs nothing is learned about the others. So another k is tried now and then, for some steps in a row or
    until they have lost too much, once time has paid for what the last trial lost, which may be 1 % of it; the first
    time soon. Steps of the target alone leave holes in the draft's cache; only recent ones matter. So behind them
    drafts are tried where a request begins, which has none.

    One estimate serves all requests: a step has one k, and an estimate of each request was never better (LOG.md).

    The choice is on the way of every step, and the host's time is a step's where the device is quick. So what it
    reckons is kept until anything changes that it depends on.
    """

    seconds: Mapping[tuple[int, int, int], float]
    ks: tuple[int, ...] = field(init=False)
    _acceptance: Acceptance = field(init=False)
    _emitted: list[float] = field(init=False)
    _buckets: tuple[int, ...] = field(init=False)
    _counts: tuple[int, ...] = field(init=False)
    # the load of now, each that was met by the octave of the mean number of running requests, and that mean
    _load: _Load = field(init=False)
    _loads: dict[int, _Load] = field(default_factory=dict)
    _running: float = 1.0
    _run: _Run | None = None
    _before: _Run | None = None
    _current: int = -1
    # what the current k has lost against each since that is better, in steps
    _lost: dict[int, float] = field(init=False)
    # the k on trial, and the steps of it that are left
    _trial: int = -1
    _left: int = 0
    # the answer until a step has ended
    _chosen: int | None = None
    # the positions from which on a step of some k reaches the next bucket
    _turns: list[int] = field(init=False)
    # the ids a second of each k, and the logarithm of each other one's over the current one's, for so many drafts of
    # each request and turns passed; None where what was learned has changed
    _ids: dict[int, float] = field(default_factory=dict)
    _gains: dict[int, float] | None = None
    _of: tuple[list[int], int] = field(default_factory=lambda: ([], 0))
    # of `_without_load`
    _unloaded: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ks, self._buckets, self._counts = (tuple(sorted(set(part))) for part in zip(*self.seconds, strict=True))
        self._load = self._loads[0] = _Load(dict.fromkeys(self.ks, 1.0))
        self._lost = dict.fromkeys(self.ks, 0.0)
        self._acceptance = Acceptance(max(self.ks))
        self._emitted = self._acceptance.emitted()
        self._turns = sorted(bucket - k for bucket in self._buckets[:-1] for k in self.ks)

    def choose(self, slots: Sequence[Slot]) -> int:
        """The k that emits most ids a second for these requests; asked again before a step ends, the same one."""
        if self._chosen is None:
            self._chosen = self._choose(slots)
        return self._chosen

    def _choose(self, slots: Sequence[Slot]) -> int:
        drafts = [_drafts(slot, self.ks[-1]) for slot in slots]
        of = drafts, bisect.bisect(self._turns, max([slot.position for slot in slots]))
        if self._gains is None or of != self._of:
            self._of, self._gains = of, self._reckoned(slots, drafts)
        for k, gain in self._gains.items():
            if gain > 0 or self._lost[k]:
                self._lost[k] = max(0.0, self._lost[k] + gain)
        if self._gains and self._lost[worst := max(self._gains, key=self._lost.__getitem__)] > _CHANGE:
            self._current, self._left, self._lost, self._gains = worst, 0, dict.fromkeys(self.ks, 0.0), None
        if not self._left and self._load.debt <= 0:
            self._try(slots, max(drafts))
        return self._trial if self._left else self._current

    def _reckoned(self, slots: Sequence[Slot], drafts: Sequence[int]) -> dict[int, float]:
        """What a step of each other k gains over one of the current, beyond the noise."""
        ids = {k: sum(self._emitted[min(k, n)] for n in drafts) / self._cost(slots, k) for k in self.ks}
        if self._current < 0:
            self._current = max(ids, key=ids.__getitem__)
        self._ids = ids
        return {k: math.log(ids[k] / ids[self._current] / _BETTER) for k in self.ks if k != self._current}

    def _try(self, slots: Sequence[Slot], most: int) -> None:
        """Begin a trial of another k that these requests can run, if they fit one."""
        largest = next(k for k in self.ks if k >= most)
        others = [k for k in self.ks if k != self._current and k <= largest]
        waited = self._load.debt <= -_PATIENCE
        if others and (self._current > 0 or waited or any(len(slot.result.ids) <= _FEW for slot in slots)):
            self._trial, self._left = max(others, key=self._ids.__getitem__), _OF_TRIAL
            self._load.debt = _OF_CHANGES

    def ended(self, k: int, reach: int, seconds: float | None, requests: Sequence[Ended]) -> None:
        self._chosen, bucket = None, self._bucket(reach)
        self._meet(len(requests))
        if seconds:
            self._measure(k, seconds / self._without_load(k, bucket, len(requests)))
        self._load.debt = max(-_PATIENCE, self._load.debt - _TRIALS)
        if self._left and k == self._trial and requests:
            self._load.debt += self._lost_by(k, bucket, requests)
            self._left = self._left - 1 if self._load.debt < _OF_CHANGES + _GIVE_UP else 0
        if k and any(request.drafted for request in requests):
            for request in requests:
                self._acceptance.count(request)
            self._emitted, self._gains = self._acceptance.emitted(), None

    def _lost_by(self, k: int, bucket: int, requests: Sequence[Ended]) -> float:
        """What a step of a trial has lost: its time less that in which the current k emits as many ids, in steps."""
        running, current = len(requests), self._current
        emitted = running + sum(request.accepted for request in requests)
        longer = self._time(k, bucket, running) / self._time(current, bucket, running)
        return longer - emitted / (running * self._emitted[current])

    def _cost(self, slots: Sequence[Slot], k: int) -> float:
        """The seconds of a step of k beside those of the others, in the bucket that its rows need."""
        return self._time(k, self._bucket(max(slot.position for slot in slots) + k + 1), len(slots))

    def _bucket(self, reach: int) -> int:
        return next((b for b in self._buckets if b >= reach), self._buckets[-1])

    def _time(self, k: int, bucket: int, running: int) -> float:
        """The seconds of a step, as slow beside those of the other k as the load of now has made it."""
        return self._load.slower[k] * self._without_load(k, bucket, running)

    def _without_load(self, k: int, bucket: int, running: int) -> float:
        """The seconds of a step as measured before any request: each running one adds the same."""
        if (k, bucket, running) not in self._unloaded:
            least, most = self._counts[0], self._counts[-1]
            share = (running - least) / (most - least) if most > least else 0.0
            of_least, of_most = self.seconds[k, bucket, least], self.seconds[k, bucket, most]
            self._unloaded[k, bucket, running] = of_least + share * (of_most - of_least)
        return self._unloaded[k, bucket, running]

    def _meet(self, running: int) -> None:
        """Take up what was learned at the load of now; at a new one, what holds at the one before."""
        self._running += (max(running, 1) - self._running) * _OF_LOAD
        octave = round(math.log2(self._running))
        if octave not in self._loads:
            self._loads[octave] = _Load(dict(self._load.slower))
        if self._loads[octave] is not self._load:
            self._load = self._loads[octave]
            self._run = self._before = self._gains = None

    def _measure(self, k: int, slower: float) -> None:
        if self._run is None or self._run.k != k:
            self._before, self._run = self._run, _Run(k)
        self._run.add(slower)
        if self._before is None or self._before.steps < _MEASURED or self._run.steps != _MEASURED:
            return
        # the target alone is the unit: the time of the other k is measured by it, or that of k by the other's
        times, ratio = self._load.slower, self._run.slower / self._before.slower
        changed, measured = k, times[self._before.k] * ratio
        if not k:
            changed, measured = self._before.k, times[0] / ratio
        times[changed] *= min(max(measured / times[changed], 1 / _FAR), _FAR) ** _NEW
        self._gains = None


def _drafts(slot: Slot, most: int) -> int:
    """The most drafts whose ids a request keeps, of so many."""
    request = slot.request
    left = min(most, max(0, request.max_new_tokens - len(slot.result.ids) - 1))
    return left if request.k_limit is None else min(left, request.k_limit)
