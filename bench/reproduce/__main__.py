"""`python -m bench.reproduce`: every claim of the article, the tuner's prediction, and the demo pair's figures here.

Writes reproduce_model.json (simulated), reproduce_wall.json (wall), reproduce.md and its picture into the results
folder. Modelled and measured never share a column.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from bench.demo import prompts
from bench.plots import save
from bench.provenance import header, read_result, write_result
from bench.reproduce import model, report
from bench.wall.harness import aggregate, measure
from bench.wall.ways import ALONE, Ways, bundled
from model.errors import UserError, run_cli
from model.progress import progress

RESULTS = Path(__file__).resolve().parents[1] / "results"
MODEL, WALL, REPORT, PICTURE = "reproduce_model.json", "reproduce_wall.json", "reproduce.md", "reproduce.svg"
# k of each draft, every n-th prompt, new tokens, rounds
FULL = ({"draft": range(1, 16), "draft_small": (1, 3, 5, 7, 15)}, 1, 128, 3)
QUICK = ({"draft": (3, 7, 15), "draft_small": (7,)}, 3, 64, 2)


def wall(quick: bool) -> dict[str, Any]:
    """The demo pair's rows with their header."""
    made_by, (ks, every, tokens, rounds) = header("wall"), QUICK if quick else FULL
    torch.set_num_threads(1)
    names = {f"{draft}, k {k}": ("chain", k, draft) for draft, own in ks.items() for k in own}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ways = Ways(bundled(names, folder, stack), "batch 1, fp32, greedy")
        runs = measure(ways, [(prompt, 0.0) for prompt in prompts(every)], tokens, rounds)
    settings = f"{ways.settings}, {tokens} new tokens, rounds: {rounds}{', a quick sweep' if quick else ''}"
    return made_by | {"settings": settings, "rows": aggregate(runs, (ALONE,))}


def main(arguments: list[str]) -> None:
    """Measure and model, or only write the report again; prints its path."""
    parser = argparse.ArgumentParser(prog="python -m bench.reproduce", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="five bundles, every third prompt: some minutes")
    parser.add_argument("--report", action="store_true", help="only write the report again from the results")
    parser.add_argument("--model", action="store_true", help="only the simulated half again, and the report")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results (default: bench/results)")
    options = parser.parse_args(arguments)
    if not options.results.is_dir():
        raise UserError(f"{options.results} is no folder; make it, or name the folder of results")
    # nothing is written before all is measured, so that the header names the commit of the measured code
    made = {}
    if not options.report:
        with progress("simulating the passes"):
            made[MODEL] = header("simulated") | model.predict()
        if not options.model:
            made[WALL] = wall(options.quick)
    for name, value in made.items():
        write_result(options.results / name, value)
    found = {
        "model": read_result(options.results / MODEL, "sweep", "best", "other_draft", "off_below", "drafters"),
        "wall": read_result(options.results / WALL, "settings", "rows"),
    }
    page = options.results / REPORT
    page.write_text(report.report(found, PICTURE), encoding="utf-8")
    save(report.picture(found), options.results / PICTURE)
    print(page)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
