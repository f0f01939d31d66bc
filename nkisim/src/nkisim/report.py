"""A timeline as a page that a person can read; `nkisim report` writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from nkisim.event import Event
from nkisim.timeline.access_drawing import CELLS, draw_accesses
from nkisim.timeline.chip import Chip
from nkisim.timeline.compiler_model import ORDER
from nkisim.timeline.drawing import COLOURS, clock, draw
from nkisim.timeline.schedule import Schedule
from nkisim.timeline.trn2 import TRN2

STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #20262c; margin: 24px auto;
  max-width: 1320px; padding: 0 16px }
h1 { font-size: 20px; margin: 0 0 4px } h2 { font-size: 15px; margin: 24px 0 6px }
p { margin: 4px 0; max-width: 90ch } .note { color: #5c6670 }
table { border-collapse: collapse; margin: 4px 24px 4px 0 }
th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid #e3e6ea }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.figures { display: flex; flex-wrap: wrap; gap: 8px 32px; margin: 12px 0 }
.figures div { min-width: 120px } .figures b { display: block; font-size: 19px; font-weight: 600 }
.side { display: flex; flex-wrap: wrap; align-items: flex-start }
svg { width: 100%; height: auto; border: 1px solid #e3e6ea }
p.legend { max-width: none; color: #5c6670; margin-left: -14px }
.key { display: inline-block; width: 12px; height: 12px; margin: 0 4px 0 14px;
  vertical-align: -1px }
"""


def figures(result: Schedule) -> list[tuple[str, str]]:
    """The headline numbers."""
    return [
        ("simulated latency, without a launch", clock(result.latency_ns)),
        (f"likely ({ORDER[result.order]})", f"{clock(result.likely_low_ns)} to {clock(result.likely_high_ns)}"),
        ("possible, from uncertain constants", f"{clock(result.low_ns)} to {clock(result.high_ns)}"),
        ("HBM traffic", f"{result.hbm_bytes / 2**20:,.2f} MiB"),
        ("HBM rate", f"{result.hbm_bytes_per_ns:,.0f} GB/s"),
        ("share of the roofline", f"{result.roofline_share:.0%}"),
        (f"roofline ({result.bound}) allows", clock(result.roofline_ns)),
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table; all columns but the first are numbers."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}{' class=n' if i else ''}>{escape(text)}</{tag}>" for i, text in enumerate(row))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', head)}</tr>{body}</table>"


def waits_table(result: Schedule) -> str:
    """The parts of the critical path."""
    rows = [
        (cause, clock(time), f"{time / result.latency_ns:.0%}")
        for cause, time in result.waits_ns.items()
        if time >= 0.001 * result.latency_ns
    ]
    return table(("the critical path spends", "time", "share"), rows)


def busy_table(result: Schedule) -> str:
    """Busy share per engine and queue."""
    rows = [(name, f"{share:.0%}") for name, share in result.busy_share.items()]
    return table(("engine or queue", "busy"), rows)


def operations_table(events: Sequence[Event], result: Schedule) -> str:
    """Instructions by operation, and how much of the critical path they hold."""
    count: dict[tuple[str, str], int] = {}
    on_path: dict[tuple[str, str], float] = {}
    for event in events:
        key = event.op, event.engine
        count[key] = count.get(key, 0) + 1
    for step in result.critical:
        key = events[step.event].op, events[step.event].engine
        on_path[key] = on_path.get(key, 0.0) + sum(time for _, time in step.parts)
    ordered = sorted(count, key=lambda key: -on_path.get(key, 0.0))
    rows = [(f"{k[0]} ({k[1]})", f"{count[k]:,}", clock(on_path.get(k, 0.0))) for k in ordered]
    return table(("operation", "count", "on the critical path"), rows)


def lines_table(events: Sequence[Event], result: Schedule, limit: int = 10) -> str:
    """The kernel lines that hold most of the critical path."""
    totals: dict[str, float] = {}
    for step in result.critical:
        file, line = events[step.event].line
        where = f"{Path(file).name}:{line} {events[step.event].op}"
        totals[where] = totals.get(where, 0.0) + sum(time for _, time in step.parts)
    ordered = sorted(totals.items(), key=lambda item: -item[1])[:limit]
    rows = [(where, clock(time), f"{time / result.latency_ns:.0%}") for where, time in ordered]
    return table(("kernel line", "on the critical path", "share"), rows)


def legend() -> str:
    """Colours of the bars."""
    names = {
        "tensor": "Tensor",
        "vector": "Vector",
        "scalar": "Scalar",
        "gpsimd": "GpSimd",
        "load": "DMA into the chip",
        "store": "DMA to HBM",
        "wait": "waiting for descriptors, DMA engines or HBM",
        "semaphore": "semaphore; red line: critical path",
    }
    keys = [f'<span class=key style="background:{COLOURS[k]}"></span>{v}' for k, v in names.items()]
    return f"<p class=legend>{''.join(keys)}</p>"


def page(events: Sequence[Event], result: Schedule, about: Mapping[str, Any], chip: Chip = TRN2) -> str:
    """The HTML page; it needs no other file."""
    kernel = str(about.get("kernel", "kernel"))
    facts = ", ".join(f"{key}: {value}" for key, value in about.items() if key != "kernel")
    kinds = [constant.kind for constant in chip.constants().values()]
    numbers = "".join(f"<div>{name}<b>{value}</b></div>" for name, value in figures(result))
    inferred = kinds.count("inferred")
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{escape(kernel)}: simulated timeline</title>
<style>{STYLE}</style>
<h1>{escape(kernel)}: simulated timeline ({escape(result.chip)})</h1>
<p class=note>Simulated by nkisim, not measured. {escape(facts)} {len(events):,} instructions.</p>
<div class=figures>{numbers}</div>
{draw(events, result)}
{legend()}
<p class=note>Hover over a bar for the instruction, its kernel line and its times. Bars of one row
that overlap are pipelined instructions or transfers in flight together. A transfer is shown
while its data moves; its trigger and its waiting are in the row of the critical path.</p>
<h2>Tensors on chip</h2>
<p class=note>A row per tensor: grey from its first access to its last, above writes, below reads, in cells of
{clock(result.latency_ns / CELLS)}. Hover for addresses and counts.</p>
{draw_accesses(events, result, "sbuf")}
{draw_accesses(events, result, "psum")}
<div class=side>{waits_table(result)}{busy_table(result)}</div>
<h2>Where the critical path is</h2>
<div class=side>{operations_table(events, result)}{lines_table(events, result)}</div>
<h2>How sure these numbers are</h2>
<p>The model has {len(kinds)} constants: {kinds.count("documented")} documented,
{kinds.count("profile")} read from published profiles, {inferred} inferred. The band is the
latency with all uncertain constants at their fast ends and at their slow ends together.</p>
</html>
"""
