"""Expected time per token of every setup and k, and the best of them for a workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from bench.kernels.layer import Shard
from bench.tune import passes
from bench.tune.acceptance import Acceptance, at_rate
from nkisim.timeline.chip import CASES, Chip
from nkisim.timeline.trn2 import TRN2

TARGET = "32B"
# physical cores of a chip; a rank has lnc of them
CORES_PER_CHIP = 8


@dataclass(frozen=True)
class Setup:
    """A choice before compiling, without k: `tp` and `draft_tp` are ranks, `lnc` cores per rank.

    All ranks of the target split the draft's head.
    """

    draft: str
    tp: int
    draft_tp: int
    batch: int
    lnc: int = 2

    @property
    def chips(self) -> float:
        """Trainium2 chips that the target's ranks take."""
        return self.tp * self.lnc / CORES_PER_CHIP

    @property
    def name(self) -> str:
        """As in 1.7B tp 32, target tp 32, batch 4."""
        return f"{self.draft} tp {self.draft_tp}, target tp {self.tp}, batch {self.batch}"


class Latency(Protocol):
    """Microseconds of a step's start and of the two passes of a setup."""

    def launch(self) -> float:
        """Starting the graph of a step, once."""
        ...

    def draft(self, setup: Setup) -> float:
        """One draft step of the batch."""
        ...

    def target(self, setup: Setup, rows: int) -> float:
        """A target pass over a number of rows per sequence."""
        ...

    def longest(self, setup: Setup) -> int:
        """The largest k of the setup."""
        ...


def draft_pass(setup: Setup, chip: Chip = TRN2, rows: int = 1) -> passes.Pass:
    """A pass of the draft over a number of rows per sequence; it draws with the target's noise."""
    shard = Shard(setup.draft, setup.draft_tp, setup.batch, rows)
    return passes.simulated_pass(shard, setup.lnc, chip, setup.tp, noise=False)


@dataclass(frozen=True)
class Simulated:
    """The kernels' simulated times on a chip description."""

    chip: Chip = TRN2

    def launch(self) -> float:
        return passes.launch_us(self.chip)

    def draft(self, setup: Setup) -> float:
        return draft_pass(setup, self.chip).total

    def target(self, setup: Setup, rows: int) -> float:
        return passes.target_us(Shard(TARGET, setup.tp, setup.batch, rows), setup.lnc, self.chip)

    def longest(self, setup: Setup) -> int:
        return passes.longest(setup.batch)


def band() -> dict[str, Latency]:
    """The fast end, the middle and the slow end of all uncertain constants together."""
    return {case: Simulated(passes.CHIPS[case]) for case in CASES}


def ms_per_token(latency: Latency, setup: Setup, acceptance: Acceptance, k: int) -> float:
    """Expected milliseconds per token and sequence, launches included; k = 0 is the target alone."""
    step = latency.launch() + k * latency.draft(setup) + latency.target(setup, k + 1)
    return step / acceptance.tokens(k) / 1e3


@dataclass(frozen=True)
class Choice:
    """One setup and k for a workload."""

    setup: Setup
    k: int
    ms: float
    gain: float

    @property
    def tokens_per_second_per_chip(self) -> float:
        """Throughput of the batch, by chip."""
        return self.setup.batch * 1e3 / self.ms / self.setup.chips


def evaluate(latency: Latency, setup: Setup, acceptance: Acceptance, k: int) -> Choice:
    """The expected figures of one candidate."""
    ms = ms_per_token(latency, setup, acceptance, k)
    return Choice(setup, k, ms, ms_per_token(latency, setup, acceptance, 0) / ms)


def best_k(latency: Latency, setup: Setup, acceptance: Acceptance) -> Choice:
    """The fastest k of a setup; 0 is no speculation, and the smallest of equals is taken."""
    return min((evaluate(latency, setup, acceptance, k) for k in range(latency.longest(setup) + 1)), key=lambda c: c.ms)


def fits(setup: Setup, acceptance: Acceptance) -> bool:
    """Whether a workload's acceptance was made with the setup's draft, or with no named draft."""
    return acceptance.draft in ("", setup.draft)


def break_even(latency: Latency, setup: Setup) -> float:
    """The acceptance rate, the same at every position, below which speculation should be off."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        off = best_k(latency, setup, at_rate(middle, latency.longest(setup))).k == 0
        low, high = (middle, high) if off else (low, middle)
    return high


def setups(
    drafts: Sequence[str], degrees: Sequence[int], draft_degrees: Sequence[int], batches: Sequence[int]
) -> list[Setup]:
    """Every combination; a draft has no more ranks than the target."""
    return [
        Setup(draft, tp, draft_tp, batch)
        for draft in drafts
        for tp in degrees
        for draft_tp in draft_degrees
        if draft_tp <= tp
        for batch in batches
    ]


def banded(latencies: dict[str, Latency], setup: Setup, acceptance: Acceptance, k: int | None = None) -> dict[str, Any]:
    """The nominal figures with their band, as a row; without `k` the best one, which then stays for the band's ends."""
    nominal = latencies["nominal"]
    found = best_k(nominal, setup, acceptance) if k is None else evaluate(nominal, setup, acceptance, k)
    ends = [evaluate(latencies[case], setup, acceptance, found.k) for case in ("low", "high")]
    gains = sorted((found.gain, *(end.gain for end in ends)))
    return asdict(setup) | {
        "workload": acceptance.name, "rate": acceptance.rate, "k": found.k, "ms": found.ms, "ms_low": ends[0].ms,
        "ms_high": ends[1].ms, "gain": found.gain, "gain_low": gains[0], "gain_high": gains[-1],
        "off_ms": ms_per_token(nominal, setup, acceptance, 0),
        "tokens_per_second_per_chip": found.tokens_per_second_per_chip, "source": "simulated",
    }  # fmt: skip
