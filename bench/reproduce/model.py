"""The tuner's predictions for the article's hardware: eight Trainium2 chips, tp 32 of two cores, four sequences."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from bench.tune import drafters, published
from bench.tune.acceptance import Acceptance, at_rate
from bench.tune.choose import Setup, band, banded, best_k, break_even

ARTICLE, DRAFTS = Setup("1.7B", 32, 32, 4), ("1.7B", "0.6B")
# assumed rates of open prose and of near-copying
OPEN, STRUCTURED = "open, assumed rate", "structured, assumed rate"
ASSUMED = {OPEN: 0.6, STRUCTURED: 0.95}
SWEPT, _LOSS = range(16), 0.6


def workloads() -> list[Acceptance]:
    """Published tables for the 1.7B, and two assumed rates for any draft."""
    return [*published.workloads(), *(at_rate(rate, 15, name) for name, rate in ASSUMED.items())]


def predict() -> dict[str, Any]:
    """The sweep of k for both drafts, their best k, the rate below which to stop, and every known drafter."""
    latencies, sweep, best = band(), [], []
    nominal = latencies["nominal"]
    for draft in DRAFTS:
        setup = replace(ARTICLE, draft=draft)
        for workload in (w for w in workloads() if w.draft in ("", draft)):
            sweep += [banded(latencies, setup, workload, k) for k in SWEPT]
            best.append(banded(latencies, setup, workload))
    other, rows = replace(ARTICLE, draft="0.6B"), []
    for workload in published.workloads():
        aim, (low, high) = best_k(nominal, ARTICLE, workload).ms, (0.0, 1.0)
        for _ in range(30):
            middle = (low + high) / 2
            slower = best_k(nominal, other, at_rate(middle, max(SWEPT))).ms > aim
            low, high = (middle, high) if slower else (low, middle)
        less = banded(latencies, other, at_rate(workload.rate * (1 - _LOSS), max(SWEPT)))
        rows.append({"workload": workload.name, "needed_rate": high, "rate_60_percent_lower": less})
    return {
        "setup": asdict(ARTICLE), "sweep": sweep, "best": best, "other_draft": rows,
        "off_below": {d: break_even(nominal, replace(ARTICLE, draft=d)) for d in DRAFTS},
        "drafters": [drafters.row(known, ARTICLE) for known in drafters.KNOWN],
    }  # fmt: skip
