"""The report: one HTML page without any file beside it, the verdict first, then plots, then every figure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from bench.serving import charts
from bench.serving.text import milliseconds, times

_STYLE = Path(__file__).with_name("report.css")
_MOST_TILES = 4
_FIGURES = (("itl_s", "ITL"), ("ttft_s", "TTFT"), ("e2e_s", "E2E"))
_HOW = (
    ("TTFT", "from the request to the first event with text; a line with a role alone is not text"),
    ("ITL", "(E2E - TTFT) / (tokens - 1), tokens from the server's usage; never a count of stream lines"),
    ("E2E", "from the request to the end of the answer; with a rate, from the time at which it was due"),
    ("gap", "time between two events with text, each of one or more tokens; no figure per token"),
    ("tokens/s", "tokens of complete answers over the time of the load, all requests together"),
    ("[a, b]", "95 % bootstrap interval over requests (2000 resamples)"),
    ("acceptance length", "tokens a step, the target's own included; from the server's counters"),
)


def page(summaries: Sequence[dict[str, Any]]) -> str:
    """The page for one run, or for several that differ in k, draft or anything else."""
    first = summaries[0]
    parts = [_verdict(s, tiles=len(summaries) == 1) for s in summaries]
    parts += ["<h2>Time per token</h2>", charts.per_case(summaries)]
    if sweep := charts.k_sweep(summaries):
        parts += ["<h2>How many draft tokens</h2>", sweep]
    parts += ["<h2>Latency curves</h2>", charts.latency_curves(first)]
    if shares := charts.acceptance_by_position(first):
        parts += ["<h2>Acceptance by position</h2>", shares]
    for summary in summaries:
        parts += [f"<h2>Every figure{_label(summaries, summary)}</h2>", _table(summary)]
    parts += ["<h2>How it was measured</h2>", _definitions(), *map(_settings, summaries)]
    style = _STYLE.read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Serving benchmark</title>'
        f"<style>{style}</style></head><body><h1>Serving benchmark</h1>" + "\n".join(parts) + "</body></html>\n"
    )


def _label(summaries: Sequence[dict[str, Any]], summary: dict[str, Any]) -> str:
    return f", k = {summary['run']['settings']['k']}" if len(summaries) > 1 else ""


def _verdict(summary: dict[str, Any], tiles: bool) -> str:
    gate, run = summary["gate"], summary["run"]
    kind = {True: "good", False: "bad", None: "plain"}[gate["passed"]]
    hosts = "; ".join(f"{v} {e['model']} at {e['host']}" for v, e in run["endpoints"].items())
    k = f", k = {run['settings']['k']}" if run["settings"]["k"] else ""
    parts = [f'<section class="verdict {kind}"><p class="what">{escape(hosts + k)}, {escape(run["date"])}</p>']
    parts.append(f'<p class="headline">{escape(gate["sentence"])}</p>')
    if summary["speedup"] and tiles:
        made = _tiles_by_tier if len(summary["speedup"]) > _MOST_TILES else _tiles
        parts.append(f'<div class="tiles">{made(summary["speedup"])}</div>')
    elif summary["speedup"]:
        parts += [
            f"<p>{escape(s['case'])}: ITL, baseline over speculative {times(s.get('itl_s'))}</p>"
            for s in summary["speedup"]
        ]
    parts += [_divergence(d) for d in gate["divergences"][:1]]
    parts += [f'<p class="note">{escape(note)}</p>' for note in summary["notes"]]
    return "".join(parts) + "</section>"


def _tiles(speedups: Sequence[dict[str, Any]]) -> str:
    return "".join(map(_tile, speedups))


def _tiles_by_tier(speedups: Sequence[dict[str, Any]]) -> str:
    """With many prompts one tile a tier: the middle prompt, and the whole span."""
    made = []
    for tier in dict.fromkeys(s["tier"] for s in speedups):
        found = sorted((s["itl_s"][0], s["case"]) for s in speedups if s["tier"] == tier and "itl_s" in s)
        if not found:
            continue
        (low, worst), (high, best) = found[0], found[-1]
        middle = statistics.median(value for value, _ in found)
        made.append(
            f'<div class="tile"><p class="case">{escape(tier)} entropy, {len(found)} prompts</p>'
            f'<p class="big">{middle:.2f}x</p><p>ITL, baseline over speculative, the middle prompt<br>'
            f"from {low:.2f}x ({escape(worst)})<br>to {high:.2f}x ({escape(best)})</p></div>"
        )
    return "".join(made)


def _tile(speedup: dict[str, Any]) -> str:
    itl = speedup.get("itl_s")
    if itl is None:
        return ""
    others = f"E2E {times(speedup.get('e2e_s'))}<br>TTFT {times(speedup.get('ttft_s'))}"
    pace = "faster per token" if itl[1] > 1 else "slower per token" if itl[2] < 1 else "no clear difference"
    return (
        f'<div class="tile"><p class="case">{escape(speedup["case"])}</p><p class="big">{itl[0]:.2f}x</p>'
        f"<p>{pace}; baseline over speculative:<br>ITL {times(itl)}<br>{others}</p></div>"
    )


def _divergence(found: dict[str, Any]) -> str:
    sides = "".join(
        f"<p><b>{escape(variant)}</b><br><code>{escape(found['before'])}<mark>{escape(text)}</mark></code></p>"
        for variant, text in zip(found["variants"], found["continuations"], strict=True)
    )
    place = f"{found['case']}: first difference at {found['unit']} {found['position']}"
    return f'<div class="divergence"><p>{escape(place)}</p>{sides}</div>'


def _table(summary: dict[str, Any]) -> str:
    head = ["prompt", "variant", "n", "errors"]
    head += [f"{name} p{p}, ms" for _, name in _FIGURES for p in (50, 90, 99)]
    head += ["gap p50 / p99, ms", "tokens/s", "tokens an event", "acceptance length", "rate"]
    rows = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in _cells(row)) + "</tr>" for row in summary["rows"])
    kinds = sorted({kind for row in summary["rows"] for kind in row["error_kinds"]})
    errors = "".join(f'<p class="note">error: {escape(kind)}</p>' for kind in kinds[:10])
    heads = "".join(f"<th>{h}</th>" for h in head)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>{errors}'


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [escape(row["case"]), row["variant"], str(row["requests"]), str(row["errors"])]
    for figure, _ in _FIGURES:
        digits = 2 if figure == "itl_s" else 0
        shown = (milliseconds(row.get(figure, {}).get(f"p{p}"), digits) for p in (50, 90, 99))
        cells += [s.replace(" [", '<br><span class="interval">[').replace("]", "]</span>") for s in shown]
    gap, taken = row.get("gap_s"), row.get("acceptance")
    cells.append(f"{1e3 * gap['p50']:.1f} / {1e3 * gap['p99']:.1f}" if gap else "-")
    cells.append(f"{row['tokens_per_second']:.1f}")
    cells.append(f"{row['output_tokens'] / row['events_with_text']:.2f}" if row["events_with_text"] else "-")
    return [*cells, *([f"{taken['length']:.2f}", f"{taken['rate']:.0%}"] if taken else ["-", "-"])]


def _definitions() -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in _HOW) + "</dl>"


def _settings(summary: dict[str, Any]) -> str:
    run = summary["run"]
    said = {"source": run["source"], "commit": run["commit"], "client": run["machine"], **run["settings"]}
    shown = ", ".join(f"{name} {json.dumps(value)}" for name, value in said.items())
    return f'<p class="settings">{escape(shown)}</p>'
