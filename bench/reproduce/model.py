"""What the model predicts for the article's hardware: eight Trainium2 chips, tp 32 of two cores, four sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.tune import drafters, published, study
from bench.tune.acceptance import Acceptance, at_rate
from bench.tune.choose import Latency, Setup, band, best_k, break_even, evaluate

ARTICLE = Setup("1.7B", 32, 32, 4, 2)
DRAFTS = ("1.7B", "0.6B")
# rates that stand for open prose, MT-Bench (published) and near-copying: the first and the last are assumptions
ASSUMED = {"open, assumed rate": 0.6, "structured, assumed rate": 0.95}
SWEPT = range(16)


def workloads() -> list[Acceptance]:
    """Published tables for the 1.7B, and two assumed rates for any draft."""
    return [*published.workloads(), *(at_rate(rate, 15, name) for name, rate in ASSUMED.items())]


def _point(latencies: dict[str, Latency], setup: Setup, workload: Acceptance, k: int) -> dict[str, Any]:
    low, nominal, high = (evaluate(latencies[case], setup, workload, k) for case in ("low", "nominal", "high"))
    gains = sorted(c.gain for c in (low, nominal, high))
    return {"draft": setup.draft, "workload": workload.name, "rate": workload.rate, "k": k, "ms": nominal.ms,
            "ms_low": low.ms, "ms_high": high.ms, "gain": nominal.gain, "gain_low": gains[0], "gain_high": gains[-1],
            "source": "simulated"}  # fmt: skip


def predict() -> dict[str, Any]:
    """The k sweep of both drafts, their best k, when to stop, every known drafter, and a prefill's extra pass."""
    latencies = band()
    nominal, sweep, best = latencies["nominal"], [], []
    for draft in DRAFTS:
        setup = replace(ARTICLE, draft=draft)
        for workload in workloads():
            if workload.draft in ("", draft):
                sweep += [_point(latencies, setup, workload, k) for k in SWEPT]
                best.append(_point(latencies, setup, workload, best_k(nominal, setup, workload).k))
    plan = study.Plan([ARTICLE], published.workloads(), latencies, 15.0)
    return {
        "setup": {"draft": ARTICLE.draft, "tp": ARTICLE.tp, "draft_tp": ARTICLE.draft_tp, "batch": ARTICLE.batch,
                  "lnc": ARTICLE.lnc},
        "source": "simulated", "sweep": sweep, "best": best, "h100": study.h100(),
        "other_draft": study.other_draft(plan, ARTICLE, "0.6B"),
        "off_below": {d: break_even(nominal, replace(ARTICLE, draft=d)) for d in DRAFTS},
        "drafters": [{"source": "simulated"} | drafters.row(known, ARTICLE) for known in drafters.KNOWN],
        "passes_us": {"target": {case: lat.target(ARTICLE, 1) for case, lat in latencies.items()},
                      "drafts": {d: {case: lat.draft(replace(ARTICLE, draft=d)) for case, lat in latencies.items()}
                                 for d in DRAFTS}},
    }  # fmt: skip
