"""The study as one HTML page: the answer first, then plots, then every figure."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from bench.provenance import said
from bench.serving.plots import COLOURS, Axes, Bar, Series, bars, lines
from bench.serving.report import _STYLE
from bench.tune import text

Found = dict[str, Any]
_MOST_K = 10
_SHOWN = 10


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """An HTML table of plain cells."""
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _lines_of(found: Found) -> dict[tuple[str, str, bool], list[dict[str, Any]]]:
    made: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
    for row in found["curves"]:
        if row["k"] <= _MOST_K:
            made.setdefault((row["workload"], row["draft"], row["assumed"]), []).append(row)
    return made


def over_k(found: Found) -> str:
    """Time per token and gain over k; a dashed line assumes the acceptance of another draft."""
    time, up = [], []
    for number, ((workload, draft, assumed), rows) in enumerate(_lines_of(found).items()):
        colour = COLOURS[number % len(COLOURS)]
        name = f"{workload}, {draft}" + (", if accepted as the other draft" if assumed else "")
        points = tuple((r["k"], r["ms"]) for r in rows)
        bands = tuple((r["k"] + 0.08 * (number - 1.5), r["ms_low"], r["ms_high"]) for r in rows)
        time.append(Series(name, colour, points, () if assumed else bands, dashed=assumed, marks=True))
        up.append(Series(name, colour, tuple((r["k"], r["gain"]) for r in rows), dashed=assumed, marks=True))
    axes = Axes("Expected ms per token (simulated), band", "k, draft tokens per step", "ms", 520, 330, whole=True)
    gain = Axes("Expected gain over the target alone", "k, draft tokens per step", "times", 480, 330, whole=True)
    return '<div class="row">' + lines(axes, time) + lines(gain, up) + "</div>"


def h100(found: Found) -> str:
    """Published points beside the fitted curves."""
    rows, made = found["h100"]["rows"], []
    for figure, name in (("speedup", "Speed-up"), ("length", "Tokens a step")):
        series = [
            Series(kind, COLOURS[i], tuple((r["k"], r[f"{figure}_{kind}"]) for r in rows), dashed=bool(i), marks=True)
            for i, kind in enumerate(("published", "fitted"))
        ]
        made.append(lines(Axes(name, "k", "", 400, whole=True), series))
    return '<div class="row">' + "".join(made) + "</div>"


def swings(found: Found) -> str:
    """How far each assumption moves the time per token."""
    rows = [r for r in found["sensitivity"] if r["swing_ms"] > 1e-3][:_SHOWN]
    groups = []
    for row in rows:
        words = f"{row['ms'][0]:.2f} to {row['ms'][1]:.2f} ms"
        bar = Bar(COLOURS[0], row["swing_ms"], row["swing_ms"], row["swing_ms"], words)
        groups.append((text.span(row), [bar]))
    return bars("How far one assumption alone moves the time per token", "ms", groups, [])


def _headline(found: Found) -> str:
    fastest = [r for r in found["choices"] if r["goal"] == "least time per token"]
    tiles = "".join(
        f'<div class="tile"><p class="case">{escape(r["workload"])}</p>'
        f'<p class="big">{escape(r["draft"])}, k = {r["k"]}</p><p>{escape(text.place(r))}<br>'
        f"<b>{r['ms']:.2f} ms per token</b>, band {r['ms_low']:.2f} to {r['ms_high']:.2f}<br>"
        f"{r['gain']:.2f}x the target alone ({r['off_ms']:.2f} ms)</p></div>"
        for r in fastest[:4]
    )
    head = "Expected on Trainium2, simulated from the kernels; nothing here was measured on a chip"
    advice = f"<p>{escape(_advice(found))}</p>"
    return f'<section class="verdict"><p class="headline">{head}</p><div class="tiles">{tiles}</div>{advice}</section>'


def _advice(found: Found) -> str:
    """When to switch off, and what decides most, in two sentences."""
    at = found["setup"]
    off = next(
        r["off_below"] for r in found["stops"] if all(r[n] == at[n] for n in ("draft", "tp", "draft_tp", "batch"))
    )
    advice = f"At {text.place(at)} speculation should be off below an acceptance rate of {off:.2f}."
    if not found["sensitivity"]:
        return advice
    first = found["sensitivity"][0]
    return f"{advice} What matters most: {text.span(first)}, moves the time by {first['swing_ms']:.2f} ms."


def page(found: Found) -> str:
    """The page, without any file beside it."""
    parts = [
        _headline(found),
        f"<h2>How many draft tokens: {escape(text.place(found['setup']))}, {text.chips(found['setup'])}</h2>",
        over_k(found),
    ]
    parts.append('<p class="note">Past the last recorded position acceptance is extrapolated with its mean rate.</p>')
    if found["sensitivity"]:
        parts += ["<h2>Which assumption matters most</h2>", swings(found)]
        parts.append(f'<p class="note">{escape(text.sensitivity_title(found))}</p>')
    parts += [
        "<h2>The published H100 series, reproduced</h2>",
        f"<p>{escape(text.h100_sentence(found))}</p>",
        h100(found),
    ]
    for title, make in text.SECTIONS:
        heads, rows = make(found)
        if rows:
            parts += [f"<h2>{title}</h2>", table(heads, rows)]
    sources = "".join(f"<li>{escape(w['name'])}: {escape(w['source'])}</li>" for w in found["workloads"])
    parts.append(f"<h2>Where acceptance comes from</h2><ul>{sources}</ul>")
    parts.append(f'<p class="note">{escape(said(found))}</p>')
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Tuner</title>'
        f"<style>{_STYLE.read_text(encoding='utf-8')}</style></head><body><h1>What to compile</h1>"
        + "\n".join(parts)
        + "</body></html>\n"
    )
