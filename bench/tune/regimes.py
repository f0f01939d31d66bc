"""`python -m bench.tune.regimes`: which conclusions turn with the law of collectives, in three stated regimes.

Collectives are the least certain part of a pass, so every conclusion that rests on them is drawn three times:

* documented: 5 us, the middle of the manual's 1 to 10 us for a collective, whatever the number of ranks;
* by hops: nkisim's law, a start and the hops between the ranks' chips;
* measured: 44.2 us, the median of 630 small all-reduces of 64 ranks on trn2, as if fewer ranks took as long.

Every time is simulated; the target is the 32B at tp 32.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

import nkisim
from bench.filter_cost import guessed_us
from bench.kernels.cases import attention_arguments, merge_arguments
from bench.tune import passes, published
from bench.tune.acceptance import at_rate
from bench.tune.choose import Choice, Setup, Simulated, best_k, draft_pass
from bench.tune.text import markdown
from model.errors import run_cli
from model.progress import each
from nki_kernels.attention.merge import merge_attention_kernel
from nki_kernels.attention.verify import verify_attention_kernel
from nki_kernels.roofline import AttentionDims
from nkisim.timeline.chip import Chip
from nkisim.timeline.schedule import schedule
from nkisim.timeline.trn2 import TRN2

TP, LNC = 32, 2
DRAFTS = ("1.7B", "0.6B")
# ranks of a draft, and which ranks split its head
SPLITS = tuple(
    (draft, degree, head)
    for draft in DRAFTS
    for degree, head in ((4, "all"), (4, "group"), (8, "all"), (8, "group"), (TP, "all"))
)
DOCUMENTED_NS, MEASURED_NS = 5000.0, 44200.0
# slices of a cache by --kv-shard sequence, and the lengths that docs/sharding.md compares
SLICES = 4
LENGTHS = (1024, 4096, 8192, 16384)
# rows of a step: batch 4, k 7; heads of a rank whole and of a rank that has a slice
BATCH, ROWS, HEADS, DIM, BF16 = 4, 8, 2, 128, 2


def flat(ns: float) -> Chip:
    """Trainium2 with collectives that cost the same for every number of ranks, beside their bytes."""
    start, hop = TRN2.collective_start_ns, TRN2.collective_hop_ns
    return replace(TRN2, collective_start_ns=replace(start, value=ns), collective_hop_ns=replace(hop, value=0.0))


REGIMES = {"documented": flat(DOCUMENTED_NS), "by hops": TRN2, "measured": flat(MEASURED_NS)}


def drafts(chip: Chip, batch: int) -> list[dict[str, Any]]:
    """Per draft, degree and place of its head: c, the best k on MT-Bench, ms a token, the gain, and what drawing a
    draft takes, of rows that filter too; the 0.6B at the 1.7B's acceptance."""
    latency, record = Simulated(chip), published.workloads()[0]
    rows = []
    for draft, degree, head in SPLITS:
        setup = Setup(draft, TP, degree, batch, LNC, head)
        c = latency.draft(setup) / latency.target(setup, 1)
        assumed = at_rate(record.rate, latency.longest(setup)) if draft != record.draft else record
        found: Choice = best_k(latency, setup, assumed)
        one = draft_pass(setup, chip)
        drawn = one.head + one.sampling
        filtered = drawn + guessed_us(batch, LNC, setup.head_tp, chip)
        rows.append(
            {"draft": draft, "draft_tp": degree, "draft_head": head, "c": c, "k": found.k, "ms": found.ms,
             "gain": found.gain, "drawn_us": drawn, "filtered_us": filtered}
        )  # fmt: skip
    return rows


def _ranks(row: dict[str, Any]) -> str:
    """As in 8, or 8 with its head."""
    return f"{row['draft_tp']}{'' if row['draft_head'] == 'all' else ' with its head'}"


def _us(kernel: Any, arguments: tuple[Any, ...]) -> float:
    policy = nkisim.Policy(recording=True, numerics=False)
    events = nkisim.run(kernel[LNC], arguments, policy=policy).recording.events
    return schedule(events, band=False).latency_ns / 1e3


def attention_us(length: int) -> tuple[float, float, float]:
    """Attention of a layer over a whole cache, over a slice by the heads of all its ranks, and the merge."""
    whole = AttentionDims(BATCH, HEADS, 1, ROWS, length, DIM, BF16)
    part = replace(whole, heads=HEADS * SLICES, slots=length // SLICES)
    merged = _us(merge_attention_kernel, merge_arguments(SLICES, BATCH * ROWS * HEADS, DIM))
    times = (_us(verify_attention_kernel, attention_arguments(dims)) for dims in (whole, part))
    return (*times, merged)  # type: ignore[return-value]


def sequence_us(chip: Chip, times: tuple[float, float, float]) -> float:
    """What slices of the sequence save a layer: attention, less the merge and two all-gathers of the slices' ranks."""
    whole, part, merged = times
    # a rank receives the queries of the others, and of each its part and log-sum-exp of all heads, in fp32
    others, rows = SLICES - 1, BATCH * ROWS * HEADS
    received = others * rows * DIM * BF16, others * SLICES * rows * (DIM + 1) * 4
    return whole - part - merged - sum(passes.collective_us(chip, SLICES, LNC, size) for size in received)


def study(batch: int) -> dict[str, Any]:
    """Everything the table shows, by regime."""
    attention = {length: attention_us(length) for length in LENGTHS}
    return {
        name: {
            "collective_us": {ranks: passes.collective_us(chip, ranks, LNC, 0) for ranks in (4, 8, 32, 64)},
            "drafts": drafts(chip, batch),
            "sequence_us": {length: sequence_us(chip, times) for length, times in attention.items()},
        }
        for name, chip in each(list(REGIMES.items()), "regimes")
    }


def table(found: dict[str, Any]) -> str:
    """A row a conclusion, a column a regime."""
    columns = list(found.values())
    rows = [
        [f"a small collective of {ranks} ranks, us", *(f"{c['collective_us'][ranks]:.1f}" for c in columns)]
        for ranks in columns[0]["collective_us"]
    ]
    for at, row in enumerate(columns[0]["drafts"]):
        name = f"{row['draft']} on {_ranks(row)}"
        mine = [c["drafts"][at] for c in columns]
        rows.append([f"c of the {name}", *(f"{r['c']:.3f}" for r in mine)])
        rows.append(
            [f"best k, ms a token, gain: {name}", *(f"{r['k']}, {r['ms']:.2f}, {r['gain']:.2f}x" for r in mine)]
        )
        drawn = (f"{r['drawn_us']:.0f}, {r['filtered_us']:.0f}" for r in mine)
        rows.append([f"a draft's head and draw, with filters, us: {name}", *drawn])
    for draft in DRAFTS:
        best = [min((r for r in c["drafts"] if r["draft"] == draft), key=lambda r: r["ms"]) for c in columns]
        rows.append([f"**ranks of the {draft} that are fastest**", *map(_ranks, best)])
    for length in columns[0]["sequence_us"]:
        saved = [c["sequence_us"][length] for c in columns]
        rows.append([f"slices of the sequence save at {length}, us a layer", *(f"{us:+.1f}" for us in saved)])
    pays = [[length for length, us in c["sequence_us"].items() if us > 0] for c in columns]
    rows.append(["**slices pay from a length of**", *(str(min(lengths)) if lengths else "none" for lengths in pays)])
    return markdown(["32B at tp 32, all times simulated", *found], rows)


def main(arguments: list[str]) -> None:
    """Print the table, or one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune.regimes", description=__doc__)
    parser.add_argument("--batch", type=int, default=4, choices=(1, 4, 16), help="sequences of a pass (default: 4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    found = study(options.batch)
    print(json.dumps(found) if options.json else table(found))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
