"""`python -m bench.serving`: measure, or render stored runs; the last line of stdout is the report's path."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.serving.client import Prompt
from bench.serving.cloudwatch import publish
from bench.serving.options import Options, parse
from bench.serving.progress import live
from bench.serving.prompts import prompt_sets, read_prompts
from bench.serving.report import page
from bench.serving.rows import RowLog
from bench.serving.run import Run, measure
from bench.serving.text import table
from model.errors import UserError, run_cli

SUMMARY, ROWS, REPORT = "summary.json", "requests.jsonl", "report.html"


def main(arguments: Sequence[str]) -> None:
    """Exit code 1 when the answers of the two endpoints differ, or when no request was answered."""
    options = parse(arguments)
    out = Path(options.out)
    if options.report:
        summaries = [read_summary(Path(folder)) for folder in options.report.split(",")]
        _make(out)
        (out / REPORT).write_text(page(summaries), encoding="utf-8")
        print(out / REPORT)
        return
    options.check()
    prompts = read_prompts(Path(options.prompts)) if options.prompts else prompt_sets(options.prompt_set, options.seed)
    run = measured(options, prompts, out)
    write(run, out)
    if options.cloudwatch:
        publish(options.cloudwatch, run)
    _print(options, run.summary, out)
    if run.summary["gate"]["passed"] is False or all(s.error for s in run.samples):
        raise SystemExit(1)


def measured(options: Options, prompts: Sequence[Prompt], out: Path) -> Run:
    """Run it with live progress; each row is on disk as soon as its request is finished."""
    _make(out)
    try:
        with (out / ROWS).open("w", encoding="utf-8") as file, live() as shown:
            return asyncio.run(measure(options, prompts, RowLog(file, shown)))
    except KeyboardInterrupt:
        print(f"interrupted: the rows so far are in {out / ROWS}, without a summary; start again", file=sys.stderr)
        raise SystemExit(130) from None


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot be a folder ({error.strerror}); give another --out") from error


def write(run: Run, out: Path) -> None:
    """The summary and the report, beside the rows."""
    (out / SUMMARY).write_text(json.dumps(run.summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (out / REPORT).write_text(page([run.summary]), encoding="utf-8")


def read_summary(folder: Path) -> dict[str, Any]:
    """A stored run's summary; UserError if the folder has none."""
    try:
        summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        if not {"run", "notes", "gate", "rows", "speedup"} <= summary.keys():
            raise ValueError(SUMMARY)
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"{folder} holds no {SUMMARY} of a run ({type(error).__name__}); give the --out folder of one"
        ) from error
    return summary


def _print(options: Options, summary: dict[str, Any], out: Path) -> None:
    if options.json:
        for row in [*summary["rows"], *({"speedup": s} for s in summary["speedup"]), {"gate": summary["gate"]}]:
            print(json.dumps(row, ensure_ascii=False))
        return
    print(table(summary))
    print(out / REPORT)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
