"""`python -m bench.readme`: the numbers of README.md, written again from bench/results/speedup.json."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from bench.provenance import said
from bench.speedup import ALONE, ASSISTED, ENTROPIES, OURS, table
from model.errors import UserError, run_cli

README = Path(__file__).resolve().parent.parent / "README.md"
RESULT = Path(__file__).resolve().parent / "results/speedup.json"
BEGIN, END = "<!-- written by bench.readme: begin -->", "<!-- written by bench.readme: end -->"
Rows = list[dict[str, Any]]


def gain(rows: Rows, entropy: str, over: str) -> float:
    """The median over prompts of another way's time over that of our speculation; one prompt's ways ran in a row."""
    ms = {(r["prompt"], r["way"]): r["ms_per_token"] for r in rows if r["entropy"] == entropy}
    return statistics.median(ms[prompt, over] / value for (prompt, way), value in ms.items() if way == OURS)


def section(result: dict[str, Any]) -> str:
    """Table and sentence; a gain is given only where all ways gave the same tokens."""
    rows = result["rows"]
    lines = [f"{said(result)}; {result['settings']}.", "", table(rows), ""]
    if all(r["identical"] for r in rows):
        over = {way: [f"{gain(rows, e, way):.1f} ({e})" for e in ENTROPIES] for way in (ALONE, ASSISTED)}
        lines += [
            f"With this pair speculation is {' and '.join(over[ALONE])} times as fast as our target alone, and",
            f"{' and '.join(over[ASSISTED])} times as fast as assisted generation (medians over prompts).",
            "",
        ]
    return "\n".join([BEGIN, "", *lines, END])


def written(readme: str, result: dict[str, Any]) -> str:
    """The README with its section of numbers made again; UserError without the two marks."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise UserError(f"{README} lacks the marks {BEGIN} and {END}; put them where the numbers belong")
    return readme[: readme.index(BEGIN)] + section(result) + readme[readme.index(END) + len(END) :]


def main() -> None:
    """Write the section; prints the README's path."""
    try:
        result = json.loads(RESULT.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{RESULT} cannot be read ({type(error).__name__}); run python -m bench.speedup --out {RESULT}"
        ) from error
    README.write_text(written(README.read_text(encoding="utf-8"), result), encoding="utf-8")
    print(README)


if __name__ == "__main__":
    run_cli(main)
