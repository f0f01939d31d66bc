"""`python -m bench.reproduce`: every claim of the article, what the model predicts, what the demo pair measured here.

Writes reproduce_model.json (simulated), reproduce_wall.json (wall) and reproduce.md into the results folder. Modelled
and measured never share a column.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from bench.provenance import header, write_result
from bench.reproduce import model as reproduce_model
from bench.reproduce import report as reproduce_report
from bench.reproduce import wall as reproduce_wall
from bench.reproduce.wall import Sweep
from model.errors import UserError, run_cli
from model.progress import progress

RESULTS = Path(__file__).resolve().parents[1] / "results"
MODEL, WALL, ACCEPTANCE, REPORT = "reproduce_model.json", "reproduce_wall.json", "demo_acceptance.json", "reproduce.md"


def _steps(sweep: Sweep) -> int:
    return len(sweep.bundles) * 2 * sweep.prompts * sweep.rounds


def measure(sweep: Sweep, quick: bool) -> dict[str, Any]:
    """The demo pair's rows, after where they come from."""
    torch.set_num_threads(1)
    made_by = header("wall")
    with progress("demo pair", _steps(sweep), "runs") as task:
        rows = []
        for row in reproduce_wall.measure(sweep, task.at):
            rows.append(row)
            task.advance()
    return made_by | {"quick": quick, "sweep": dataclasses.asdict(sweep), "rows": rows}


def read(folder: Path) -> dict[str, Any]:
    """The results of a folder; UserError when they are not there."""
    try:
        return {
            name: json.loads((folder / file).read_text("utf-8")) for name, file in (("model", MODEL), ("wall", WALL))
        }
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{folder} holds no complete results ({error}); run without --report first") from None


def _made(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The files to write; nothing is written before all is measured, so that the commit is that of the code."""
    if options.report:
        return {}
    made = {MODEL: header("simulated") | reproduce_model.predict()}
    if not options.model:
        wall = made[WALL] = measure(reproduce_wall.QUICK if options.quick else reproduce_wall.FULL, options.quick)
        tables = reproduce_wall.acceptance_tables(wall["rows"])
        made[ACCEPTANCE] = {"source": f"demo pair, wall run of commit {wall['commit']}", "tables": tables}
    return made


def main(arguments: list[str]) -> None:
    """Measure and model, or only write the report again; prints its path."""
    parser = argparse.ArgumentParser(prog="python -m bench.reproduce", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="five bundles, four prompts a class: under three minutes")
    parser.add_argument("--report", action="store_true", help="only write the report again from the results")
    parser.add_argument("--model", action="store_true", help="only the simulated half again, and the report")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results (default: bench/results)")
    options = parser.parse_args(arguments)
    if options.report:
        read(options.results)
    options.results.mkdir(parents=True, exist_ok=True)
    for name, value in _made(options).items():
        write_result(options.results / name, value)
    page, found = options.results / REPORT, read(options.results)
    for name, text in {REPORT: reproduce_report.report(found), **reproduce_report.plots(found)}.items():
        (options.results / name).write_text(text, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
