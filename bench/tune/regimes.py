"""The choice under three laws of collectives, the least certain part of a pass.

* documented: 5 us, the middle of the manual's 1 to 10 us for a collective, for every number of ranks;
* measured best: nkisim's law, the default: a start of 13 us and the hops between the ranks' chips, without waiting;
* measured median: the same and the waiting for the slowest rank, 26.7 us at the median of 630 small all-reduces of 64
  ranks on trn2, wherever ranks are on different chips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.table import markdown
from bench.tune import passes, published
from bench.tune.acceptance import at_rate
from bench.tune.choose import Setup, Simulated, best_k
from nkisim.timeline.chip import Chip
from nkisim.timeline.trn2 import TRN2

TP, BATCH = 32, 4
DOCUMENTED_NS, WAITING_NS = 5000.0, 26700.0


def flat(ns: float) -> Chip:
    """Trainium2 with collectives of one cost for every number of ranks, plus their bytes."""
    start, hop = TRN2.collective_start_ns, TRN2.collective_hop_ns
    return replace(TRN2, collective_start_ns=replace(start, value=ns), collective_hop_ns=replace(hop, value=0.0))


def waiting(ns: float) -> Chip:
    """Trainium2 where ranks of different chips wait that long for the slowest one."""
    return replace(TRN2, collective_wait_ns=replace(TRN2.collective_wait_ns, value=ns))


REGIMES = {"documented": flat(DOCUMENTED_NS), "measured best": TRN2, "measured median": waiting(WAITING_NS)}


def rows(drafts: Sequence[str], degrees: Sequence[int]) -> list[dict[str, Any]]:
    """By regime, draft and its ranks: c (a draft pass in target passes), best k on MT-Bench, ms a token and gain.

    The target has 32 ranks and 4 sequences. A draft without a published table is given the 1.7B's rate: an assumption.
    """
    record, found = published.workloads()[0], []
    for regime, chip in REGIMES.items():
        latency = Simulated(chip)
        for setup in (Setup(draft, TP, degree, BATCH) for draft in drafts for degree in degrees):
            assumed = setup.draft != record.draft
            best = best_k(latency, setup, at_rate(record.rate, latency.longest(setup)) if assumed else record)
            found.append(
                {"regime": regime, "draft": setup.draft, "draft_tp": setup.draft_tp, "assumed": assumed,
                 "c": latency.draft(setup) / latency.target(setup, 1), "k": best.k, "ms": best.ms, "gain": best.gain,
                 "collective_us": passes.collective_us(chip, setup.draft_tp, setup.lnc, 0), "source": "simulated"}
            )  # fmt: skip
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """A row for each draft and its ranks, a column for each regime; the fastest ranks of a draft are bold."""
    lines = []
    for draft, degree in dict.fromkeys((r["draft"], r["draft_tp"]) for r in found):
        cells = []
        for regime in REGIMES:
            own = [r for r in found if (r["regime"], r["draft"]) == (regime, draft)]
            r = next(r for r in own if r["draft_tp"] == degree)
            text = f"c {r['c']:.3f}, k {r['k']}, {r['ms']:.2f} ms, {r['gain']:.2f}x"
            cells.append(f"**{text}**" if r["ms"] == min(r["ms"] for r in own) else text)
        lines.append([f"{draft} on {degree} ranks", *cells])
    heads = [f"{name} (simulated)" for name in REGIMES]
    return markdown(["draft of the 32B at tp 32, batch 4", *heads], lines)
