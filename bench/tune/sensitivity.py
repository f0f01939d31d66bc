"""Which assumption matters most: each uncertain one moved alone to both ends of its band."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.tune.acceptance import Acceptance, at_rate
from bench.tune.choose import Choice, Latency, Setup, Simulated, best_k
from bench.tune.passes import chip_with
from nkisim.timeline.trn2 import TRN2

# how far the acceptance rate of other prompts may lie from the recorded one: our assumption
RATE_SPREAD = 0.05
# what the host may add to a step; no published figure
HOST_US_HIGH = 1000.0


@dataclass(frozen=True)
class Moved:
    """The best k of one setup with one assumption at its low and at its high end."""

    assumption: str
    unit: str
    ends: tuple[float, float]
    low: Choice
    high: Choice

    @property
    def swing_ms(self) -> float:
        """How far the expected time per token moves."""
        return abs(self.high.ms - self.low.ms)

    @property
    def swing_gain(self) -> float:
        """How far the gain over the target alone moves."""
        return abs(self.high.gain - self.low.gain)


def inferred() -> list[str]:
    """The constants of the chip description that are our own estimates, or public measurements that spread."""
    return [name for name, c in TRN2.constants().items() if c.kind in ("inferred", "measured") and c.low != c.high]


def _constant(name: str, setup: Setup, acceptance: Acceptance) -> Moved:
    constant = TRN2.constants()[name]
    low, high = (best_k(Simulated(chip_with(case, name)), setup, acceptance) for case in ("low", "high"))
    return Moved(name, constant.unit, (constant.at("low"), constant.at("high")), low, high)


def _rate(setup: Setup, acceptance: Acceptance, latency: Latency) -> Moved:
    # the slow end first, as everywhere: low means little time
    ends = min(acceptance.rate + RATE_SPREAD, 0.999), max(acceptance.rate - RATE_SPREAD, 0.0)
    low, high = (best_k(latency, setup, at_rate(rate, latency.longest(setup))) for rate in ends)
    return Moved("acceptance rate, other prompts", "", ends, low, high)


def _host(setup: Setup, acceptance: Acceptance) -> Moved:
    low, high = (best_k(Simulated(host_us=us), setup, acceptance) for us in (0.0, HOST_US_HIGH))
    return Moved("host and launch per step", "us", (0.0, HOST_US_HIGH), low, high)


def one_at_a_time(setup: Setup, acceptance: Acceptance) -> Iterator[Callable[[], Moved]]:
    """One job for each assumption, so that the caller can show how far it is."""
    yield lambda: _rate(setup, acceptance, Simulated())
    yield lambda: _host(setup, acceptance)
    for name in inferred():
        yield lambda name=name: _constant(name, setup, acceptance)  # type: ignore[misc]
