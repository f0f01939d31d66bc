"""`python -m nkisim.accuracy [--json] [--only TEXT] [--out FILE]`: every measured row beside its simulated time."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from nkisim import command
from nkisim.accuracy.outcome import Outcome, Summary, outcome, summary
from nkisim.accuracy.rows import ROWS, Row
from nkisim.accuracy.unseen import UNSEEN
from nkisim.command import Parser

HEAD = """# Accuracy against measured kernels

Written by `python -m nkisim.accuracy --out nkisim/accuracy/results.md`. Measured times are from the public records that
`nkisim/accuracy/rows.py` and `nkisim/accuracy/unseen.py` name; modelled times are simulated by nkisim's timeline,
launches included.
"""
NOT_SEEN = """Rows that were found after every nominal constant had its value; none was changed for them.
Their bands are not as unseen: the slow end of the DMA engines' rate then moved from 24.1 to 22 B/ns, which a profile
beside the rows above shows. Before that, 52 of these rows were inside."""


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


def main(arguments: Sequence[str]) -> int:
    """Print or write every measured kernel beside its simulated time (3 minutes)."""
    parser = Parser(prog="nkisim accuracy", description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a row instead of the table")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name or group has this text")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table as Markdown")
    options = parser.parse_args(arguments)
    seen, unseen = _chosen(ROWS, options.only), _chosen(UNSEEN, options.only)
    if not seen and not unseen:
        parser.error(f"no row has {options.only!r} in its name or group; run without --only for the list")
    if options.json:
        print(as_json([*seen, *unseen]))
        return 0
    parts = [f"{sentences(seen)}\n\n{table(seen)}\n"] if seen else []
    if unseen:
        words = sentence("Unseen rows", summary(unseen))
        parts.append(f"## Unseen rows\n\n{NOT_SEEN}\n\n{words}\n\n{table(unseen)}\n")
    text = "\n".join(parts)
    if options.out:
        options.out.write_text(f"{HEAD}\n{text}", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    command.run(lambda: main(sys.argv[1:]))
