"""The quality report: the verdict in one sentence, a table by temperature, and each divergence, on one page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

_MOST_SHOWN = 10
_CLAIM = (
    "Each prompt was answered twice by the same artifact: by the target alone, and with speculation. The answers were "
    "compared token for token. Random draws are functions of seed and position, so sampled answers must be equal too."
)
_HEADS = ("temperature", "prompts", "answers", "tokens compared", "token-identical", "tokens per target step")
_FOUND_HEADS = ("prompt", "temperature", "seed", "new token", "target alone", "speculative", "logit gap", "score gap")
_STYLE = (
    "body{font:15px/1.5 Helvetica,Arial,sans-serif;color:#222;max-width:860px;margin:32px auto;padding:0 20px}"
    "h1{font-size:22px}h2{font-size:17px;margin-top:28px}.verdict{font-size:19px;font-weight:bold;padding:14px 18px;"
    "border-left:6px solid #009e73;background:#eef8f4}.bad{border-color:#c1272d;background:#fdf0ef}"
    "table{border-collapse:collapse;font-size:14px}th,td{text-align:right;padding:4px 12px;border-bottom:1px solid "
    "#dde3e8}th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}"
    "dl{display:grid;grid-template-columns:150px auto;gap:2px 10px;font-size:14px}dt{font-weight:bold}dd{margin:0}"
)
Rows = Sequence[dict[str, Any]]


def verdict(rows: Rows) -> str:
    """One sentence: how many answers are token-identical."""
    same, tokens = sum(r["at"] is None for r in rows), sum(r["tokens"] for r in rows)
    if same == len(rows):
        return f"All {len(rows)} answers ({tokens} tokens) are token-identical with and without speculation."
    return f"{len(rows) - same} of {len(rows)} answers differ with speculation; the first differences are listed below."


def by_temperature(rows: Rows) -> list[tuple[str, ...]]:
    """A line for each temperature and kind of prompt, in the order of `_HEADS`."""
    lines: list[tuple[str, ...]] = []
    for temperature, kind in sorted({(r["temperature"], r["kind"]) for r in rows}):
        own = [r for r in rows if (r["temperature"], r["kind"]) == (temperature, kind)]
        same = sum(r["at"] is None for r in own)
        name = "0 (greedy)" if temperature == 0 else f"{temperature:g} (seeded)"
        per_step = statistics.mean(r["tokens_per_step"] for r in own)
        tokens = sum(r["tokens"] for r in own)
        lines.append((name, kind, str(len(own)), str(tokens), f"{same} of {len(own)}", f"{per_step:.2f}"))
    return lines


def divergences(rows: Rows) -> list[tuple[str, ...]]:
    """The first differences, at most ten, in the order of `_FOUND_HEADS`."""
    found = [r for r in rows if r["at"] is not None]
    return [
        (r["prompt"], f"{r['temperature']:g}", str(r["seed"]), str(r["at"]), _ids(r["alone"]), _ids(r["speculative"]),
         *_gap(r["gap"]))
        for r in found[:_MOST_SHOWN]
    ]  # fmt: skip


def _ids(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids[:4])) or "(ended)"


def _gap(gap: dict[str, Any] | None) -> tuple[str, str]:
    if gap is None:
        return "not available", "not available"
    return f"{gap['logits']:.4g}", f"{gap['scores']:.4g}" + ("" if gap["own_is_best"] else " (eager draw differs)")


_GAP_NOTE = (
    "The logit gap is the target's logit of its own token less that of the other token, computed eagerly from the "
    "bundle's weights; the score gap is the same for what the draw compares, noise included. A gap near zero is a tie "
    "that rounding decided; a large one is a fault."
)


def markdown(rows: Rows, facts: dict[str, str]) -> str:
    """The report as Markdown."""
    parts = [
        "# Does speculation change the output?",
        f"**{verdict(rows)}**",
        _CLAIM,
        _table(_HEADS, by_temperature(rows)),
    ]
    if found := divergences(rows):
        parts += ["## First differences", _table(_FOUND_HEADS, found), _GAP_NOTE]
    parts += ["## What was compared", "\n".join(f"- {name}: {fact}" for name, fact in facts.items())]
    return "\n\n".join(parts) + "\n"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *lines])


def page(rows: Rows, facts: dict[str, str]) -> str:
    """The report as one HTML page with nothing beside it."""
    found = divergences(rows)
    parts = [
        "<h1>Does speculation change the output?</h1>",
        f'<p class="verdict{" bad" if found else ""}">{escape(verdict(rows))}</p><p>{_CLAIM}</p>',
        _html_table(_HEADS, by_temperature(rows)),
    ]
    if found:
        parts += ["<h2>First differences</h2>", _html_table(_FOUND_HEADS, found), f"<p>{_GAP_NOTE}</p>"]
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts.items())
    parts += ["<h2>What was compared</h2>", f"<dl>{listed}</dl>"]
    head = f'<meta charset="utf-8"><title>Quality report</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _html_table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    return f"<table>{line(heads, 'th')}{''.join(line(x, 'td') for x in lines)}</table>"
