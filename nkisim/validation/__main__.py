"""`python -m validation [--json] [--only TEXT] [--out FILE]`: every measured row and its simulated time.

`--library CHECKOUT` runs the vendor's kernels instead, unmodified, at the shapes at which the vendor measured them, or
with `--rows validation/unmeasured_rows.json` at the shapes of bench/kernels.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from nkisim import command
from nkisim.command import Parser
from validation.excluded import unrun_section
from validation.library import GIVEN, recordings, rows, timed
from validation.library_page import library_page, unmeasured
from validation.operators import OPERATORS
from validation.outcome import Outcome, Summary, misordered, outcome, summary
from validation.rows import ROWS, Row
from validation.second_batch import LATER
from validation.third_batch import COMPLETING, WITH_GELU

HEAD = """# Accuracy against measured kernels

Written by `python -m validation --out validation/results.md`. Measured times are from the public records
that `rows.py`, `operators.py`, `second_batch.py` and `third_batch.py` name; modelled times are simulated by nkisim's
timeline, launches included. Constants were fitted to the first rows; the others were seen. A pair is two rows of one
group; the measurements decide it if they differ by more than repeats of one kernel do in their record (2 % at least).
"""
OPERATORS_ABOUT = """Rows that were found after the first; as they were first run, before anything was changed for
them, their error was 9.7 %, 58 were inside and 120 of 195 pairs in order. Since then they were looked at: the slow end
of the DMA engines' rate, the 208 KiB of SBUF, two sketches' engines and the copies out of PSUM follow what their
records say, and the laws of scans and of the throttle were checked against them."""
LATER_ABOUT = """Rows that were found after that. As they were first run their error was 11.5 %, 32 were inside and 97
of 103 pairs in order. Since then four transposes share a copy out of PSUM, as above, and they were looked at."""
COMPLETING_ABOUT = """Versions of the first of these records that had been left out, as they were first run: no law,
constant or sketch was changed for them. The adapted product of 1 row tile loads 512 bytes a partition for each product;
the chip took 0.61 us for each load, where static transfers may follow after 0.235 us here. In the gated layer with all
products split, parts of the weights are made anew for each row tile, and the chip waits for them."""
GELU_ABOUT = """All products with GELU of the second record, as they were first run. They are sketched as their source
loads, but their compiler loads less often: at 2048 x 1024 x 4096 in bf16 the source loads 168 MB, which DMA engines do
not move in 288 us."""
# sections after the first: what they say, and their rows
SECTIONS: dict[str, tuple[str, tuple[Row, ...]]] = {
    "Seen rows": (OPERATORS_ABOUT, OPERATORS),
    "Seen later": (LATER_ABOUT, LATER),
    "Completing rows": (COMPLETING_ABOUT, COMPLETING),
    "Products with GELU": (GELU_ABOUT, WITH_GELU),
}
EVERY: tuple[Row, ...] = (*ROWS, *(row for _, rows in SECTIONS.values() for row in rows))


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
    """Print or write the vendor's kernels and their measured times."""
    listed = [row for row in rows(options.rows) if options.only in row.id]
    # the library's kernels print what they allocate
    with redirect_stdout(sys.stderr):
        recorded = list(recordings(options.library, listed))
    if not any(row.us for row in listed):
        print(unmeasured(recorded))
        return 0
    outcomes = [outcome(timed(r)) for r in recorded if r.events is not None]
    refused = [r for r in recorded if r.events is None]
    text = as_json(outcomes) if options.json else library_page(outcomes, refused, recorded)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    print(text)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Print or write every measured kernel and its simulated time (4 minutes)."""
    parser = Parser(prog="python -m validation", description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a row instead of the table")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name or group has this text")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table as Markdown")
    parser.add_argument("--library", type=Path, metavar="CHECKOUT", help="run the kernels of a checkout of nki-library")
    parser.add_argument("--rows", type=Path, default=GIVEN, metavar="FILE", help=f"rows, like {GIVEN.name}")
    options = parser.parse_args(arguments)
    if options.library:
        return _library(options)
    seen = _chosen(ROWS, options.only)
    others = [_chosen(rows, options.only) for _, rows in SECTIONS.values()]
    if not seen and not any(others):
        parser.error(f"no row has {options.only!r} in its name or group; run without --only for the list")
    if options.json:
        print(as_json([*seen, *(o for part in others for o in part)]))
        return 0
    parts = [f"{sentences(seen)}\n\n{table(seen)}\n\n{wrong_pairs(seen)}\n"] if seen else []
    for (title, (about, _)), part in zip(SECTIONS.items(), others, strict=True):
        if part:
            words = sentence(title, summary(part))
            parts.append(f"## {title}\n\n{about}\n\n{words}\n\n{table(part)}\n\n{wrong_pairs(part)}\n")
    if not options.only:
        parts.append(unrun_section(len(EVERY)))
    text = "\n".join(parts)
    if options.out:
        options.out.write_text(f"{HEAD}\n{text}", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    command.run(lambda: main(sys.argv[1:]))
