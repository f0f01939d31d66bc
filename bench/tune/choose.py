"""Expected time per token of every setup and k, and the best of them for a workload."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bench.kernels.layer import Shard
from bench.tune import passes
from bench.tune.acceptance import Acceptance, at_rate
from compile.spec import BuildSpec
from nkisim.timeline.chip import CASES, Chip
from nkisim.timeline.trn2 import TRN2

TARGET = "32B"
# physical cores of a chip; a rank has lnc of them
CORES_PER_CHIP = 8


@dataclass(frozen=True)
class Setup:
    """What is fixed before compiling, k apart: `tp` and `draft_tp` are ranks, `lnc` cores per rank.

    The draft's head is split among `all` ranks or those of its `group`, as by a build's `--draft-head`.
    """

    draft: str
    tp: int
    draft_tp: int
    batch: int
    lnc: int = 2
    draft_head: str = BuildSpec.draft_head

    @property
    def head_tp(self) -> int:
        """Ranks that split the draft's head."""
        return self.tp if self.draft_head == "all" else self.draft_tp

    @property
    def chips(self) -> float:
        """Trainium2 chips that the target's ranks take."""
        return self.tp * self.lnc / CORES_PER_CHIP

    @property
    def name(self) -> str:
        """As in 1.7B tp 32, target tp 32, B4."""
        return f"{self.draft} tp {self.draft_tp}, target tp {self.tp}, B{self.batch}"


class Latency(Protocol):
    """Microseconds of the two passes of a setup."""

    def draft(self, setup: Setup) -> float:
        """One draft step of the batch."""
        ...

    def target(self, setup: Setup, rows: int) -> float:
        """A target pass over so many rows per sequence."""
        ...

    def longest(self, setup: Setup) -> int:
        """The largest k of the setup."""
        ...


def draft_pass(setup: Setup, chip: Chip = TRN2, rows: int = 1) -> passes.Pass:
    """A pass of the draft over so many rows per sequence; with as many ids as the target on a rank, it draws with the
    target's noise."""
    shard = Shard(setup.draft, setup.draft_tp, setup.batch, rows)
    return passes.simulated_pass(shard, setup.lnc, chip, setup.head_tp, noise=setup.head_tp != setup.tp)


@dataclass(frozen=True)
class Simulated:
    """The kernels' simulated times on a chip description; `host_us` is added to each step, with drafts or without."""

    chip: Chip = TRN2
    host_us: float = 0.0

    def draft(self, setup: Setup) -> float:
        return draft_pass(setup, self.chip).total

    def target(self, setup: Setup, rows: int) -> float:
        return passes.target_us(Shard(TARGET, setup.tp, setup.batch, rows), setup.lnc, self.chip) + self.host_us

    def longest(self, setup: Setup) -> int:
        return passes.longest(setup.batch)


def band(host_us: float = 0.0) -> dict[str, Latency]:
    """The fast end, the middle and the slow end of all uncertain constants together."""
    return {case: Simulated(passes.CHIPS[case], host_us) for case in CASES}


def ms_per_token(latency: Latency, setup: Setup, acceptance: Acceptance, k: int) -> float:
    """Expected milliseconds per token and sequence; k = 0 is the target alone."""
    step = k * latency.draft(setup) + latency.target(setup, k + 1)
    return step / acceptance.tokens(k) / 1e3


def gain(latency: Latency, setup: Setup, acceptance: Acceptance, k: int) -> float:
    """Time per token of the target alone over that with k drafts."""
    return ms_per_token(latency, setup, acceptance, 0) / ms_per_token(latency, setup, acceptance, k)


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
    """The fastest k of a setup from 0, no speculation; of equals the smallest."""
    return min((evaluate(latency, setup, acceptance, k) for k in range(latency.longest(setup) + 1)), key=lambda c: c.ms)


def fits(setup: Setup, acceptance: Acceptance) -> bool:
    """Whether a workload's acceptance was made with the setup's draft, or with none in particular."""
    return acceptance.draft in ("", setup.draft)


def fastest(latency: Latency, setups: Iterable[Setup], acceptance: Acceptance) -> Choice:
    """The setup and k with the least time per token."""
    return min((best_k(latency, s, acceptance) for s in setups if fits(s, acceptance)), key=lambda c: c.ms)


def cheapest(latency: Latency, setups: Iterable[Setup], acceptance: Acceptance, limit_ms: float) -> Choice | None:
    """The setup and k with the most tokens per second and chip among those within a time per token."""
    found = [best_k(latency, s, acceptance) for s in setups if fits(s, acceptance)]
    within = [c for c in found if c.ms <= limit_ms]
    return max(within, key=lambda c: c.tokens_per_second_per_chip, default=None)


def break_even(latency: Latency, setup: Setup) -> float:
    """The acceptance rate, the same at every position, below which speculation should be off."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        off = best_k(latency, setup, at_rate(middle, latency.longest(setup))).k == 0
        low, high = (middle, high) if off else (low, middle)
    return high


def setups(
    drafts: Sequence[str], degrees: Sequence[int], draft_degrees: Sequence[int], batches: Sequence[int], lnc: int
) -> list[Setup]:
    """Every combination; a draft has no more ranks than the target."""
    return [
        Setup(draft, tp, draft_tp, batch, lnc)
        for draft in drafts
        for tp in degrees
        for draft_tp in draft_degrees
        if draft_tp <= tp
        for batch in batches
    ]


def gains(grid: Iterable[tuple[int, float]], latency: Latency, setup: Setup) -> list[dict[str, float]]:
    """For each batch and acceptance rate the gain of every k from 1: what a server needs to lower k or to stop."""
    rows = []
    for batch, rate in grid:
        at = replace(setup, batch=batch)
        workload = at_rate(rate, latency.longest(at))
        rows += [
            {"batch": batch, "alpha": rate, "k": k, "gain": round(gain(latency, at, workload, k), 4)}
            for k in range(1, latency.longest(at) + 1)
        ]
    return rows
