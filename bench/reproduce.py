"""`python -m bench.reproduce`: every claim of the article, what the model predicts, what the demo pair measured here.

Writes reproduce_model.json (simulated), reproduce_wall.json (wall) and reproduce.md into the results folder. Modelled
and measured never share a column.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from bench import reproduce_model, reproduce_report, reproduce_wall
from bench.reproduce_wall import Sweep
from model.errors import UserError, run_cli

RESULTS = Path(__file__).resolve().parent / "results"
MODEL, WALL, ACCEPTANCE, REPORT = "reproduce_model.json", "reproduce_wall.json", "demo_acceptance.json", "reproduce.md"


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        return None


def header(source: str) -> dict[str, Any]:
    """Where a result comes from."""
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return {"source": source, "commit": _commit(), "machine": machine, "date": date}


def _steps(sweep: Sweep) -> int:
    return len(sweep.bundles) * sweep.prompts * 2 * 2 * sweep.rounds


def measure(sweep: Sweep, quick: bool) -> dict[str, Any]:
    """The demo pair's rows and the acceptance in them."""
    torch.set_num_threads(1)
    console = Console(stderr=True)
    made = reproduce_wall.measure(sweep)
    rows = list(track(made, "demo pair", total=_steps(sweep), transient=True, console=console))
    return header("wall") | {"quick": quick, "sweep": dataclasses.asdict(sweep), "rows": rows}


def _write(file: Path, value: dict[str, Any]) -> None:
    # a line for each row keeps a changed result readable as a difference
    parts = []
    for name, part in value.items():
        rows = isinstance(part, list) and part and isinstance(part[0], dict)
        shown = "[\n" + ",\n".join(json.dumps(r) for r in part) + "\n]" if rows else json.dumps(part)
        parts.append(f"{json.dumps(name)}: {shown}")
    file.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
    """The results of a folder; UserError when they are not there."""
    try:
        return {
            name: json.loads((folder / file).read_text("utf-8")) for name, file in (("model", MODEL), ("wall", WALL))
        }
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{folder} holds no complete results ({error}); run without --report first") from None


def main(arguments: list[str]) -> None:
    """Measure and model, or only write the report again; prints its path."""
    parser = argparse.ArgumentParser(prog="python -m bench.reproduce", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four bundles, four prompts a class: under three minutes")
    parser.add_argument("--report", action="store_true", help="only write the report again from the results")
    parser.add_argument("--model", action="store_true", help="only the simulated half again, and the report")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results (default: bench/results)")
    options = parser.parse_args(arguments)
    options.results.mkdir(parents=True, exist_ok=True)
    if not options.report:
        _write(options.results / MODEL, header("simulated") | reproduce_model.predict())
    if not options.report and not options.model:
        found = measure(reproduce_wall.QUICK if options.quick else reproduce_wall.FULL, options.quick)
        _write(options.results / WALL, found)
        tables = {"source": f"demo pair, wall run of commit {found['commit']}"}
        _write(options.results / ACCEPTANCE, tables | {"tables": reproduce_wall.acceptance_tables(found["rows"])})
    page = options.results / REPORT
    page.write_text(reproduce_report.report(read(options.results)), encoding="utf-8")
    print(page)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
