"""The whole study as one JSON object: candidates, choices, when to stop, sensitivity, the published series."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.tune import published, sensitivity
from bench.tune.acceptance import Acceptance, at_rate
from bench.tune.choose import (
    Choice,
    Latency,
    Setup,
    best_k,
    break_even,
    evaluate,
    fits,
    gains,
)
from bench.tune.fit import fit

RATES = tuple(round(0.05 * i, 2) for i in range(20))
_LOSS = 0.6
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """What to look at; `latencies` has the keys low, nominal and high, `limit_ms` bounds the cheapest choice."""

    setups: Sequence[Setup]
    workloads: Sequence[Acceptance]
    latencies: dict[str, Latency]
    limit_ms: float


def _choice(found: Choice) -> dict[str, Any]:
    at = found.setup
    return {
        "draft": at.draft, "tp": at.tp, "draft_tp": at.draft_tp, "batch": at.batch, "lnc": at.lnc, "k": found.k,
        "ms": found.ms, "gain": found.gain, "tokens_per_second_per_chip": found.tokens_per_second_per_chip,
    }  # fmt: skip


def _banded(plan: Plan, setup: Setup, acceptance: Acceptance, k: int | None = None) -> dict[str, Any]:
    """The nominal choice with its band; without `k` the best one, whose k then stays for the band's ends."""
    nominal = plan.latencies["nominal"]
    found = best_k(nominal, setup, acceptance) if k is None else evaluate(nominal, setup, acceptance, k)
    ends = [evaluate(plan.latencies[case], setup, acceptance, found.k) for case in ("low", "high")]
    spread = sorted((found.gain, *(end.gain for end in ends)))
    return _choice(found) | {
        "ms_low": ends[0].ms, "ms_high": ends[1].ms, "gain_low": spread[0], "gain_high": spread[-1],
        "off_ms": best_ms_alone(nominal, setup), "workload": acceptance.name, "source": "simulated",
    }  # fmt: skip


def best_ms_alone(latency: Latency, setup: Setup) -> float:
    """Milliseconds per token of the target alone."""
    return latency.target(setup, 1) / 1e3


def candidates(plan: Plan) -> Rows:
    """The best k of each setup for each workload whose draft it has."""
    return [
        _banded(plan, setup, workload)
        for workload in plan.workloads for setup in plan.setups if fits(setup, workload)
    ]  # fmt: skip


def choices(plan: Plan, rows: Rows) -> Rows:
    """Per workload the fastest setup and the one with most tokens per chip within the limit."""
    found = []
    for name in dict.fromkeys(w.name for w in plan.workloads):
        mine = [row for row in rows if row["workload"] == name]
        if not mine:
            continue
        found.append({"goal": "least time per token"} | min(mine, key=lambda r: r["ms"]))
        within = [row for row in mine if row["ms"] <= plan.limit_ms]
        if within:
            goal = f"most tokens per second and chip within {plan.limit_ms:g} ms"
            found.append({"goal": goal} | max(within, key=lambda r: r["tokens_per_second_per_chip"]))
    return found


def curves(plan: Plan, at: Setup) -> Rows:
    """Time per token over k with its band: each workload, and the other draft at the same acceptance."""
    rows = []
    for setup in dict.fromkeys(replace(s, tp=at.tp, draft_tp=at.draft_tp, batch=at.batch) for s in plan.setups):
        for workload in plan.workloads:
            assumed = not fits(setup, workload)
            for k in range(plan.latencies["nominal"].longest(setup) + 1):
                row = _banded(plan, setup, workload, k)
                rows.append(row | {"assumed": assumed, "beyond_record": k > workload.reach})
    return rows


def stops(plan: Plan) -> Rows:
    """For each setup the acceptance rate below which speculation should be off, with its band."""
    rows = []
    for setup in plan.setups:
        rates = {case: break_even(latency, setup) for case, latency in plan.latencies.items()}
        rows.append(
            {"draft": setup.draft, "tp": setup.tp, "draft_tp": setup.draft_tp, "batch": setup.batch,
             "off_below": rates["nominal"], "off_below_ends": sorted((rates["low"], rates["high"])),
             "source": "simulated"}
        )  # fmt: skip
    return rows


def other_draft(plan: Plan, at: Setup, draft: str) -> Rows:
    """Another draft at the same acceptance rate and at one 60 % lower, and the rate that makes it equal."""
    nominal, other, rows = plan.latencies["nominal"], replace(at, draft=draft), []
    for workload in (w for w in plan.workloads if fits(at, w)):
        mine = best_k(nominal, at, workload)
        most = nominal.longest(other)
        low, high = 0.0, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            slower = best_k(nominal, other, at_rate(middle, most)).ms > mine.ms
            low, high = (middle, high) if slower else (low, middle)
        same, lower = (_banded(plan, other, at_rate(workload.rate * f, most)) for f in (1.0, 1 - _LOSS))
        rows.append({"workload": workload.name, "rate": workload.rate, "draft": draft, "needed_rate": high,
                     "same_rate": same, "rate_60_percent_lower": lower})  # fmt: skip
    return rows


def moved(at: Setup, workload: Acceptance, watch: Callable[[Iterable[Any]], Iterable[Any]]) -> Rows:
    """Sensitivity, the largest swing of the time first."""
    jobs = list(sensitivity.one_at_a_time(at, workload))
    found = sorted((job() for job in watch(jobs)), key=lambda m: -m.swing_ms)
    return [
        {"assumption": m.assumption, "unit": m.unit, "ends": m.ends, "ms": [m.low.ms, m.high.ms],
         "gain": [m.low.gain, m.high.gain], "k": [m.low.k, m.high.k], "swing_ms": m.swing_ms,
         "swing_gain": m.swing_gain, "workload": workload.name, "source": "simulated"}
        for m in found
    ]  # fmt: skip


def h100() -> dict[str, Any]:
    """The published series beside the model with one fitted rate and one fitted ratio."""
    found = fit(published.MT_BENCH_LENGTHS, published.MT_BENCH_SPEEDUPS)
    rows = [
        {"k": k + 1, "length_published": published.MT_BENCH_LENGTHS[k], "length_fitted": found.lengths[k],
         "length_error": found.length_errors[k], "speedup_published": published.MT_BENCH_SPEEDUPS[k],
         "speedup_fitted": found.speedups[k], "speedup_error": found.speedup_errors[k]}
        for k in range(len(found.lengths))
    ]  # fmt: skip
    separate = published.H100_DRAFT_MS / published.H100_TARGET_MS
    return {"rate": found.rate, "cost_ratio": found.cost_ratio, "worst": found.worst, "rows": rows,
            "cost_ratio_published": separate, "source": published.SOURCE}  # fmt: skip


def switch_rows(latency: Latency, setup: Setup, batches: Iterable[int]) -> Rows:
    """For batch-aware switching: the gain of every k per batch and acceptance rate; the largest row is the best k."""
    return gains([(batch, rate) for batch in batches for rate in RATES], latency, setup)
