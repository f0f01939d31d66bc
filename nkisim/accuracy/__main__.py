"""`python -m nkisim.accuracy [--json] [--only TEXT] [--out FILE]`: every measured row beside its simulated time.

`--library CHECKOUT` runs the vendor's own kernels instead, unmodified, at the shapes at which the vendor measured them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nkisim import command
from nkisim.accuracy.later import LATER
from nkisim.accuracy.library import GIVEN, recordings, rows, timed
from nkisim.accuracy.library_page import library_page
from nkisim.accuracy.operators import OPERATORS
from nkisim.accuracy.outcome import Outcome, Summary, misordered, outcome, summary
from nkisim.accuracy.rows import ROWS, Row
from nkisim.command import Parser

HEAD = """# Accuracy against measured kernels

Written by `python -m nkisim.accuracy --out nkisim/accuracy/results.md`. Measured times are from the public records that
`rows.py`, `operators.py` and `later.py` beside this file name; modelled times are simulated by nkisim's timeline,
launches included. Constants were fitted to the first rows; the others were seen. A pair is two rows of one group; the
measurements decide it if they differ by more than repeats of one kernel do in their record (2 % at least).
"""
OPERATORS_ABOUT = """Rows that were found after the first; as they were first run, before anything was changed for
them, their error was 9.7 %, 58 were inside and 120 of 195 pairs in order. Since then they were looked at: the slow end
of the DMA engines' rate, the 208 KiB of SBUF, two sketches' engines and the copies out of PSUM follow what their
records say, and the laws of scans and of the throttle were checked against them."""
LATER_ABOUT = """Rows that were found after that. As they were first run their error was 11.5 %, 32 were inside and 97
of 103 pairs in order. Since then four transposes share a copy out of PSUM, as above, and they were looked at."""


def table(outcomes: Sequence[Outcome]) -> str:
    """A line for each row."""
    lines = [
        "| kernel | measured us | modelled us (simulated) | band | ratio | inside | source |",
        "|---|" + "---|" * 6,
    ]
    for o in outcomes:
        inside = "yes" if o.inside else "**no**"
        band = f"{o.low:.1f} to {o.high:.1f}"
        cells = (o.row.name, f"{o.row.us:.1f}", f"{o.us:.1f}", band, f"{o.ratio:.2f}", inside, o.row.source)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def wrong_pairs(outcomes: Sequence[Outcome]) -> str:
    """A line for each decided pair in the wrong order, as slower over faster: measured and by the orders."""
    lines = ["| slower on the chip | faster | measured | nominal | program order | pipelined |", "|---|" + "---|" * 5]
    for a, b in misordered(outcomes):
        ratios = (a.row.us / b.row.us, a.us / b.us, a.program / b.program, a.pipelined / b.pipelined)
        lines.append(f"| {a.row.name} | {b.row.name} | {' | '.join(f'{ratio:.3f}' for ratio in ratios)} |")
    return "Decided pairs in the wrong order, slower over faster:\n\n" + "\n".join(lines) if len(lines) > 2 else ""


def sentence(name: str, s: Summary) -> str:
    """A summary in words."""
    pairs = f", {s.ordered} of {s.pairs} pairs that the measurements decide in order" if s.pairs else ""
    return f"{name}: geometric mean error {s.error:.1%}, {s.inside} of {s.rows} rows inside the band{pairs}."


def sentences(outcomes: Sequence[Outcome]) -> str:
    """All rows, the sweep, the others, and the misses."""
    sweep = [o for o in outcomes if o.row.group == "sweep of blocks"]
    others = [o for o in outcomes if o.row.group != "sweep of blocks"]
    lines = [
        sentence(name, summary(part))
        for name, part in (("All rows", outcomes), ("The sweep of blocks", sweep), ("The other rows", others))
        if part
    ]
    outside = [f"{o.row.name} ({o.ratio:.2f})" for o in outcomes if not o.inside]
    return "\n\n".join([*lines, f"Outside of the band: {', '.join(outside) or 'none'}."])


def as_json(outcomes: Sequence[Outcome]) -> str:
    """One object a line."""
    return "\n".join(
        json.dumps({"kernel": o.row.name, "group": o.row.group, "source": o.row.source, "measured_us": o.row.us,
                    "simulated_us": o.us, "low_us": o.low, "high_us": o.high, "ratio": o.ratio, "inside": o.inside})
        for o in outcomes
    )  # fmt: skip


def _chosen(rows: Sequence[Row], text: str) -> list[Outcome]:
    return [outcome(row) for row in rows if text in f"{row.name} {row.group}"]


def _library(options: Any) -> int:
    """Print or write the vendor's kernels beside their measured times."""
    listed = [row for row in rows(options.rows) if options.only in row.id]
    recorded = list(recordings(options.library, listed))
    outcomes = [outcome(timed(r)) for r in recorded if r.events is not None]
    refused = [r for r in recorded if r.events is None]
    text = as_json(outcomes) if options.json else library_page(outcomes, refused, recorded)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    print(text)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Print or write every measured kernel beside its simulated time (4 minutes)."""
    parser = Parser(prog="python -m nkisim.accuracy", description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a row instead of the table")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name or group has this text")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table as Markdown")
    parser.add_argument("--library", type=Path, metavar="CHECKOUT", help="run the kernels of a checkout of nki-library")
    parser.add_argument("--rows", type=Path, default=GIVEN, metavar="FILE", help=f"measured rows, like {GIVEN.name}")
    options = parser.parse_args(arguments)
    if options.library:
        return _library(options)
    seen, first, later = (_chosen(rows, options.only) for rows in (ROWS, OPERATORS, LATER))
    if not seen and not first and not later:
        parser.error(f"no row has {options.only!r} in its name or group; run without --only for the list")
    if options.json:
        print(as_json([*seen, *first, *later]))
        return 0
    parts = [f"{sentences(seen)}\n\n{table(seen)}\n\n{wrong_pairs(seen)}\n"] if seen else []
    for title, about, part in (("Seen rows", OPERATORS_ABOUT, first), ("Seen later", LATER_ABOUT, later)):
        if part:
            words = sentence(title, summary(part))
            parts.append(f"## {title}\n\n{about}\n\n{words}\n\n{table(part)}\n\n{wrong_pairs(part)}\n")
    text = "\n".join(parts)
    if options.out:
        options.out.write_text(f"{HEAD}\n{text}", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    command.run(lambda: main(sys.argv[1:]))
