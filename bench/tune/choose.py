"""Expected milliseconds per token of a setup and k on a workload, and the best k."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from bench.table import markdown
from bench.tune.acceptance import Acceptance
from bench.tune.drafters import Setup, read_share, step_us
from nkisim.timeline.chip import CASES

Row = dict[str, Any]


def ms_per_token(setup: Setup, acceptance: Acceptance, k: int, end: str = "nominal") -> float:
    """Expected milliseconds per token of one sequence of the batch."""
    return step_us(setup, k, end) / acceptance.tokens(k) / 1e3


def is_known(setup: Setup, acceptance: Acceptance, k: int) -> bool:
    """Whether a step with k drafts fits the kernels, and its tokens per step are known."""
    return k <= setup.max_k and acceptance.only_k in (0, k)


def best_k(setup: Setup, acceptance: Acceptance) -> int:
    """The fastest known k, the smallest of equals; 0 is no speculation."""
    max_k = min(setup.max_k, len(acceptance.shares))
    known = (k for k in range(1, max_k + 1) if is_known(setup, acceptance, k))
    return min((0, *known), key=lambda k: ms_per_token(setup, acceptance, k))


def row(
    setup: Setup, acceptance: Acceptance, k: int | None = None, ends: Sequence[str] = CASES, price: float = 1.0
) -> Row:
    """The figures at k (default: the best), at these ends of the band of all uncertain constants.

    `step` is the step's time over that of a step without speculation: with fewer tokens per step speculation loses.
    `cost` is the cost of a million tokens, `price` that of a chip for an hour.
    """
    k = best_k(setup, acceptance) if k is None else k
    ms = {end: ms_per_token(setup, acceptance, k, end) for end in ends}
    gains = {end: ms_per_token(setup, acceptance, 0, end) / ms[end] for end in ends}
    per_chip = setup.batch * 1e3 / ms["nominal"] / setup.chips
    return asdict(setup) | {
        "workload": acceptance.workload, "k": k, "tokens": acceptance.tokens(k), "assumed": acceptance.assumed,
        "from": acceptance.source, "source": "simulated", "step": acceptance.tokens(k) / gains["nominal"],
        "step_ms": step_us(setup, k) / 1e3, "ms": ms["nominal"], "ms_low": min(ms.values()),
        "gain": gains["nominal"], "gain_low": min(gains.values()), "gain_high": max(gains.values()),
        "read_share": read_share(setup, k), "chips": setup.chips, "tokens_per_second_per_chip": per_chip,
        "cost": price * 1e6 / 3600 / per_chip, "ms_high": max(ms.values()),
    }  # fmt: skip


def choices(rows: Sequence[Row], limit_ms: float) -> list[Row]:
    """For each workload the fastest row, and the row with the highest throughput per chip within the limit."""
    best = []
    for workload in dict.fromkeys(r["workload"] for r in rows):
        of_workload = [r for r in rows if r["workload"] == workload]
        best.append({"goal": "lowest time per token"} | min(of_workload, key=lambda r: r["ms"]))
        if within := [r for r in of_workload if r["ms"] <= limit_ms]:
            goal = f"highest tokens/s per chip within {limit_ms:g} ms"
            best.append({"goal": goal} | max(within, key=lambda r: r["tokens_per_second_per_chip"]))
    return best


def frontier(rows: Iterable[Row]) -> list[Row]:
    """The rows for which no other row has lower cost and lower time per token, by rising cost."""
    by_cost = sorted(rows, key=lambda r: (r["cost"], r["ms"]))
    return [r for n, r in enumerate(by_cost) if all(r["ms"] < cheaper["ms"] for cheaper in by_cost[:n])]


def ms(row: Row, name: str = "ms", unit: str = "") -> str:
    """Milliseconds, or a different field, with its band if the row has one."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return f"{row[name]:.2f}{unit}" + (f" [{low:.2f}, {high:.2f}]" if low < high else "")


# speedup over no speculation, with its band if the row has one
gain = partial(ms, name="gain", unit="x")


def table(rows: Iterable[Row], *first: str) -> str:
    """The rows as markdown; `first` are the fields of the first columns."""
    heads = ["drafter", "tp", "LNC", "batch", "k", "tokens per step", "step, ms (simulated), times k 0",
             "ms per token (simulated)", "gain (simulated)", "tokens/s per chip (simulated)", "cost of 1M tokens",
             "target's bytes at HBM's rate / its pass"]  # fmt: skip
    return markdown([*first, *heads], [
        [*(str(r[name]) for name in first), r["drafter"], str(r["tp"]), str(r["lnc"]), str(r["batch"]), str(r["k"]),
         f"{r['tokens']:.2f}{' (assumed)' if r['assumed'] else ''}", f"{r['step_ms']:.1f}, {r['step']:.2f}", ms(r),
         gain(r), f"{r['tokens_per_second_per_chip']:.0f}", f"{r['cost']:.2f}", f"{r['read_share']:.0%}"]
        for r in rows
    ])  # fmt: skip
