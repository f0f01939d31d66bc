"""`python -m bench.tune`: choose draft, k, tp, draft tp and batch before anything is compiled.

Expected ms per token = (launch + k draft passes + one target pass over k + 1 rows) / expected tokens of a step. Passes
are simulated from the kernels (nkisim), with a band; a launch is the host's dispatch of a step's graph, published as
0.8 ms (0.5 to 1), and its start on the device; tokens come from acceptance traces, by default from two published
tables for Qwen3-32B with Qwen3-1.7B. Nothing here was measured on Trainium.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.provenance import header
from bench.table import markdown
from bench.tune import acceptance, choose, drafters, published, regimes
from bench.tune.acceptance import Acceptance
from bench.tune.choose import Latency, Setup
from bench.tune.drafters import Known
from model.errors import UserError, run_cli
from model.progress import progress

DRAFTS, DEGREES = ("1.7B", "0.6B"), (4, 8, 16, 32)
Found = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The study: `latencies` has the keys low, nominal and high; `limit_ms` bounds the cheapest choice."""

    setups: list[Setup]
    workloads: list[Acceptance]
    latencies: dict[str, Latency]
    limit_ms: float
    known: Sequence[Known] = drafters.KNOWN

    @property
    def reference(self) -> Setup:
        """The setup of the drafters' table: the article's, as far as it is in the plan."""
        fitting = [s for s in self.setups if any(choose.fits(s, w) for w in self.workloads)]
        return min(fitting, key=lambda s: (-s.tp, -s.draft_tp, abs(s.batch - 4)))


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    parser.add_argument(
        "--traces",
        type=Path,
        action="append",
        help="acceptance traces; may be repeated (default: the published tables of MT-Bench and InstructCoder)",
    )
    parser.add_argument(
        "--trace-draft",
        choices=("", *DRAFTS),
        help="read the traces as made with this draft; empty: with any (default: as the files say)",
    )
    parser.add_argument(
        "--acceptance", type=Path, help="a file of bench.acceptance: which drafter would win with these"
    )
    parser.add_argument("--draft", nargs="+", default=list(DRAFTS), choices=DRAFTS, help="drafts to compare")
    parser.add_argument("--tp", nargs="+", type=int, default=[8, 32], choices=DEGREES, help="ranks of the target")
    parser.add_argument("--draft-tp", nargs="+", type=int, default=[8, 32], choices=DEGREES, help="ranks of the draft")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16], help="sequences decoded together")
    parser.add_argument("--limit-ms", type=float, default=15.0, help="time per token that the cheapest choice may take")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    for batch in options.batch:
        if not 1 <= batch <= 64:
            raise UserError(f"--batch is {batch}; give 1 to 64, so that two rows per sequence fit the kernels' 128")
    return options


def _plan(options: argparse.Namespace) -> Plan:
    workloads = [w for file in options.traces or [] for w in acceptance.read(file)] or published.workloads()
    if options.trace_draft is not None:
        workloads = [dataclasses.replace(w, draft=options.trace_draft) for w in workloads]
    setups = choose.setups(options.draft, options.tp, options.draft_tp, options.batch)
    if not setups:
        raise UserError(
            f"--draft-tp {options.draft_tp} exceeds --tp {options.tp} everywhere; give a smaller --draft-tp"
        )
    if not any(choose.fits(s, w) for s in setups for w in workloads):
        raise UserError(
            f"the traces are of the drafts {sorted({w.draft for w in workloads})}, the study of {options.draft}; "
            "give traces of one of these, or name their draft with --trace-draft"
        )
    known = [*drafters.KNOWN, *(drafters.of_demo(options.acceptance) if options.acceptance else [])]
    return Plan(setups, workloads, choose.band(), options.limit_ms, known)


def candidates(plan: Plan) -> list[Found]:
    """The best k of each setup for each workload of its draft, with its band and the rate below which to stop."""
    stops = {s: {case: choose.break_even(at, s) for case, at in plan.latencies.items()} for s in plan.setups}
    return [
        choose.banded(plan.latencies, setup, workload)
        | {"off_below": stops[setup]["nominal"],
           "off_below_ends": sorted((stops[setup]["low"], stops[setup]["high"]))}
        for workload in plan.workloads for setup in plan.setups if choose.fits(setup, workload)
    ]  # fmt: skip


def choices(rows: list[Found], limit_ms: float) -> list[Found]:
    """For each workload the fastest setup, and the one with most tokens per second and chip within the limit."""
    found = []
    for name in dict.fromkeys(row["workload"] for row in rows):
        mine = [row for row in rows if row["workload"] == name]
        found.append({"goal": "least time per token"} | min(mine, key=lambda r: r["ms"]))
        within = [row for row in mine if row["ms"] <= limit_ms]
        if within:
            goal = f"most tokens per second and chip within {limit_ms:g} ms"
            found.append({"goal": goal} | max(within, key=lambda r: r["tokens_per_second_per_chip"]))
    return found


def run(plan: Plan, drafts: list[str], degrees: list[int], batches: list[int]) -> Found:
    """The study as one JSON object."""
    at = plan.reference
    own = [degree for degree in degrees if degree <= at.tp]
    with progress("simulating the passes"):
        rows = candidates(plan)
        return {
            "setup": dataclasses.asdict(at), "choices": choices(rows, plan.limit_ms), "candidates": rows,
            "regimes": regimes.rows(drafts, own), "answers": drafters.answers(at, own, batches, plan.known),
            "drafters": [drafters.row(known, at) for known in drafters.possible(at)],
        }  # fmt: skip


def _cells(row: Found) -> list[str]:
    return [
        Setup(*(row[f.name] for f in dataclasses.fields(Setup))).name, str(row["k"]) if row["k"] else "off",
        f"{row['ms']:.2f} [{row['ms_low']:.2f}, {row['ms_high']:.2f}]",
        f"{row['gain']:.2f}x [{row['gain_low']:.2f}, {row['gain_high']:.2f}]",
        f"{row['tokens_per_second_per_chip']:.0f}",
    ]  # fmt: skip


def text(found: Found) -> str:
    """The study as markdown tables."""
    heads = ["setup", "k", "ms per token (simulated)", "gain (simulated)", "tokens/s and chip"]
    best = [[r["workload"], r["goal"], *_cells(r)] for r in found["choices"]]
    all_rows = [
        [r["workload"], *_cells(r), f"{r['off_below']:.2f} [{', '.join(f'{v:.2f}' for v in r['off_below_ends'])}]"]
        for r in found["candidates"]
    ]
    sections = {
        "Best choice": markdown(["workload", "goal", *heads], best),
        "Every setup at its best k": markdown(["workload", *heads, "off below this acceptance rate"], all_rows),
        "Three regimes of collectives": regimes.table(found["regimes"]),
        "Drafters": drafters.table(found["drafters"]),
        "The drafter with the largest gain": drafters.answers_table(found["answers"]),
    }
    return "\n\n".join(f"## {title}\n\n{table}" for title, table in sections.items())


def main(arguments: list[str]) -> None:
    """Print the tables, or one JSON object."""
    options = _options(arguments)
    found = header("simulated") | run(_plan(options), options.draft, options.draft_tp, options.batch)
    print(json.dumps(found) if options.json else text(found))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
