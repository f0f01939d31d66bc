"""The k of a decode step, chosen by measurement. It changes the time of a step, never a token."""

import itertools
import operator
from collections import deque
from collections.abc import Sequence


class AdaptiveK:
    """The k with the most expected tokens per second, from the time of steps and the acceptance at each draft position.

    Now and then a few steps probe another k: their time is compared with that of the steps just before, at the same
    load. The acceptance of a position counts the drafts whose predecessor was accepted. A single k is never changed.
    """

    # steps of a probe; the first ones of each k are not measured, since a step may have been launched before them
    PROBE_STEPS, SETTLING_STEPS = 8, 2
    # the largest share of all steps that are probes
    PROBE_SHARE = 1 / 32
    # a k replaces the current one if it promises this many times its tokens per second
    GAIN = 1.05
    # weights of a new step, draft and probe in the means
    STEP_WEIGHT, DRAFT_WEIGHT, PROBE_WEIGHT = 0.2, 0.03, 0.5

    def __init__(self, ks: Sequence[int]) -> None:
        self.ks = tuple(sorted(ks))
        self.current = self.ks[-1]
        # the seconds of a step in those of the first current k; a k is not chosen before its first probe
        self._cost = {self.current: 1.0}
        self._acceptance = [0.8] * self.current
        self._probes = deque(self.ks[:-1])
        self._probing, self._budget = False, float(self.PROBE_STEPS)
        # of the current k and of the probe: steps in a row, and their mean seconds
        self._steps, self._seconds, self._before = 0, 0.0, 0.0

    def choose(self) -> int:
        return self._probes[0] if self._probing else self.current

    def tokens(self, k: int) -> float:
        """The expected tokens of a step for a request."""
        return 1 + sum(itertools.accumulate(self._acceptance[:k], operator.mul))

    def ended(self, k: int, seconds: float | None, requests: Sequence[tuple[int, int]]) -> None:
        """Learn from a step of k: its seconds, unless it ran other graphs too, and drafted and accepted of requests."""
        for drafted, accepted in requests:
            for place in range(min(drafted, accepted + 1)):
                self._acceptance[place] += ((place < accepted) - self._acceptance[place]) * self.DRAFT_WEIGHT
        self._budget = min(self._budget + self.PROBE_SHARE, self.PROBE_STEPS)
        self._budget -= self._probing
        if k == self.choose():
            self._steps += 1
            if seconds and self._steps > self.SETTLING_STEPS:
                self._seconds += (seconds - self._seconds) * (self.STEP_WEIGHT if self._seconds else 1)
        if self._probing and self._budget <= 0:
            self._end_probe()
        elif not self._probing:
            self._choose_again()

    def _end_probe(self) -> None:
        k = self._probes[0]
        if self._seconds and self._before:
            cost = self._cost[self.current] * self._seconds / self._before
            self._cost[k] = cost + (self._cost.get(k, cost) - cost) * (1 - self.PROBE_WEIGHT)
        self._probes.rotate(-1)
        self._probing, self._steps, self._seconds = False, 0, 0.0

    def _choose_again(self) -> None:
        rate = {k: self.tokens(k) / cost for k, cost in self._cost.items()}
        best = max(rate, key=rate.__getitem__)
        if rate[best] > self.GAIN * rate[self.current]:
            self._probes[self._probes.index(best)] = self.current
            self.current, self._steps, self._seconds = best, 0, 0.0
        elif self._probes and self._budget >= self.PROBE_STEPS and self._steps >= self.PROBE_STEPS:
            self._probing, self._steps, self._before, self._seconds = True, 0, self._seconds, 0.0
