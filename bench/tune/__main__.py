"""`python -m bench.tune`: choose draft, k, tp, draft tp and batch before anything is compiled.

Expected ms per token = (k draft passes + one target pass over k + 1 rows) / expected tokens of a step. Passes are
simulated from the kernels (nkisim), with a band; tokens come from acceptance traces, by default from two published
tables for Qwen3-32B with Qwen3-1.7B. Nothing here was measured on Trainium.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.draft_cost import DRAFTS
from bench.provenance import header, write_result
from bench.tune import acceptance, choose, page, published, study, text
from model.errors import UserError, run_cli
from model.progress import each, progress
from model.serving.switching import FORMAT

DEGREES = (4, 8, 16, 32)


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
    parser.add_argument("--draft", nargs="+", default=list(DRAFTS), choices=DRAFTS, help="drafts to compare")
    parser.add_argument("--tp", nargs="+", type=int, default=[8, 32], choices=DEGREES, help="ranks of the target")
    parser.add_argument("--draft-tp", nargs="+", type=int, default=[8, 32], choices=DEGREES, help="ranks of the draft")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16], help="sequences decoded together")
    parser.add_argument("--lnc", type=int, default=2, choices=(1, 2), help="physical cores per rank (default: 2)")
    parser.add_argument("--host-us", type=float, default=0.0, help="what host and launch add to a step (default: 0)")
    parser.add_argument("--limit-ms", type=float, default=15.0, help="time per token that the cheapest choice may take")
    parser.add_argument("--no-sensitivity", action="store_true", help="leave out the slowest part")
    parser.add_argument("--html", type=Path, help="write the page with the plots here")
    parser.add_argument("--table", type=Path, help="write the gain per batch, rate and k here, as JSON")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    for batch in options.batch:
        if not 1 <= batch <= 64:
            raise UserError(f"--batch is {batch}; give 1 to 64, so that two rows per sequence fit the kernels' 128")
    return options


def _plan(options: argparse.Namespace) -> study.Plan:
    workloads = [w for file in options.traces or [] for w in acceptance.read(file)] or published.workloads()
    if options.trace_draft is not None:
        workloads = [dataclasses.replace(w, draft=options.trace_draft) for w in workloads]
    setups = choose.setups(options.draft, options.tp, options.draft_tp, options.batch, options.lnc)
    if not setups:
        raise UserError(
            f"--draft-tp {options.draft_tp} exceeds --tp {options.tp} everywhere; give a smaller --draft-tp"
        )
    if not any(choose.fits(s, w) for s in setups for w in workloads):
        raise UserError(
            f"the traces are of the drafts {sorted({w.draft for w in workloads})}, the study of {options.draft}; "
            "give traces of one of these, or say with --trace-draft whose they are"
        )
    return study.Plan(setups, workloads, choose.band(options.host_us), options.limit_ms)


def reference_setup(plan: study.Plan) -> choose.Setup:
    """The setup that curves and sensitivity are drawn for: the article's, as far as it is in the plan."""
    fitting = [s for s in plan.setups if any(choose.fits(s, w) for w in plan.workloads)]
    return min(fitting, key=lambda s: (-s.tp, -s.draft_tp, abs(s.batch - 4)))


def run(plan: study.Plan, with_sensitivity: bool = True) -> dict[str, Any]:
    """The study as one JSON object."""
    at = reference_setup(plan)
    workload = next(w for w in plan.workloads if choose.fits(at, w))

    def watch(jobs: Iterable[Any]) -> Iterable[Any]:
        return each(list(jobs), "sensitivity, jobs")

    with progress("simulating the passes"):
        rows = study.candidates(plan)
        found: dict[str, Any] = {
            "setup": vars_of(at), "candidates": rows, "choices": study.choices(plan, rows),
            "curves": study.curves(plan, at), "stops": study.stops(plan), "h100": study.h100(),
            "workloads": [{"name": w.name, "draft": w.draft, "rate": w.rate, "reach": w.reach, "source": w.source,
                           "steps": w.steps} for w in plan.workloads],
        }  # fmt: skip
        others = [d for d in dict.fromkeys(s.draft for s in plan.setups) if d != at.draft]
        found["other_drafts"] = [row for d in others for row in study.other_draft(plan, at, d)]
    found["sensitivity"] = study.moved(at, workload, watch) if with_sensitivity else []
    return found


def vars_of(setup: choose.Setup) -> dict[str, Any]:
    """A setup as JSON."""
    return {"draft": setup.draft, "tp": setup.tp, "draft_tp": setup.draft_tp, "batch": setup.batch, "lnc": setup.lnc}


def main(arguments: list[str]) -> None:
    """Print the tables, or one JSON object; write the page and the switching table where asked."""
    options = _options(arguments)
    plan = _plan(options)
    made_by = header("simulated")
    found = made_by | run(plan, not options.no_sensitivity)
    if options.table:
        at = reference_setup(plan)
        rows = study.switch_rows(plan.latencies["nominal"], at, options.batch)
        write_result(options.table, {"format": FORMAT, **made_by, "setup": vars_of(at), "rows": rows})
    if options.html:
        options.html.write_text(page.page(found), encoding="utf-8")
    print(json.dumps(found) if options.json else text.tables(found))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
