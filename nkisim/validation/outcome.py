"""The timeline's result for each measured row, and its distance: ratio, band, order of pairs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nkisim.timeline.chip import Chip
from nkisim.timeline.schedule import schedule
from nkisim.timeline.trn2 import TRN2
from validation.rows import Row


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row and its simulated times in microseconds, launches included."""

    row: Row
    us: float
    low: float
    high: float
    # by nominal constants: as the kernel is written, and as a pipelining compiler might order it
    program: float
    pipelined: float
    # where eight of ten measured kernels are, by the residuals of the vendor's
    likely_low: float
    likely_high: float

    @property
    def ratio(self) -> float:
        """Modelled over measured."""
        return self.us / self.row.us

    @property
    def inside(self) -> bool:
        """Whether the possible band holds the measurement."""
        return self.low <= self.row.us <= self.high

    @property
    def likely(self) -> bool:
        """Whether the likely band does."""
        return self.likely_low <= self.row.us <= self.likely_high


@dataclass(frozen=True, slots=True)
class Summary:
    """How good the timeline is over some rows."""

    rows: int
    # exp of the mean of |log ratio|, less one
    error: float
    inside: int
    likely: int
    # pairs of one group that the measurements distinguish, and those of them in the right order
    pairs: int
    ordered: int


def outcome(row: Row, chip: Chip = TRN2) -> Outcome:
    """Sketch and schedule a row's kernels."""
    totals = [0.0] * 7
    cases = ("nominal", "low", "high", "nominal", "nominal", "low", "high")
    for kernel in row.launches:
        s = schedule(kernel(), chip)
        orders = s.program_order_ns, s.pipelined_ns
        times = s.latency_ns, s.low_ns, s.high_ns, *orders, s.likely_low_ns, s.likely_high_ns
        ends = zip(times, cases, strict=True)
        launches = ((ns, chip.at(case)) for ns, case in ends)
        once = [ns + (n.profiled_launch_ns if row.profiled else n.launch_ns) for ns, n in launches]
        totals = [total + ns / 1e3 for total, ns in zip(totals, once, strict=True)]
    return Outcome(row, *totals)


def summary(outcomes: Sequence[Outcome]) -> Summary:
    """Error, band and order over some rows."""
    error = math.expm1(sum(abs(math.log(o.ratio)) for o in outcomes) / len(outcomes))
    pairs = len(list(decided(outcomes)))
    inside = sum(o.inside for o in outcomes)
    likely = sum(o.likely for o in outcomes)
    return Summary(len(outcomes), error, inside, likely, pairs, pairs - len(misordered(outcomes)))


def half_width(bands: Iterable[tuple[float, float]]) -> float:
    """The median of the bands' half widths: how far an end is from the middle, as a ratio less one."""
    widths = sorted(math.sqrt(high / low) - 1 for low, high in bands)
    return widths[len(widths) // 2]


def misordered(outcomes: Iterable[Outcome]) -> list[tuple[Outcome, Outcome]]:
    """Decided pairs in the wrong order, the slower one on the chip first."""
    wrong = [(a, b) for a, b in decided(outcomes) if (a.us < b.us) != (a.row.us < b.row.us)]
    return [(a, b) if a.row.us > b.row.us else (b, a) for a, b in wrong]


def decided(outcomes: Iterable[Outcome]) -> Iterable[tuple[Outcome, Outcome]]:
    """Pairs of one group whose measurements differ by more than repeats of one kernel do in their records."""
    for a, b in itertools.combinations(outcomes, 2):
        spread = max(a.row.spread, b.row.spread)
        if a.row.group == b.row.group and abs(math.log(a.row.us / b.row.us)) > math.log(spread):
            yield a, b
