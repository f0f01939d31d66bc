"""The report's plots: what of a run's rows becomes which line or bar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.serving.plots import BASELINE, COLOURS, SPECULATIVE, Axes, Bar, Series, bars, lines

_COLOUR = {"baseline": BASELINE, "speculative": SPECULATIVE}
# a share of fewer steps is not drawn
_LEAST_STEPS = 30
Summary = dict[str, Any]


def _cases(summaries: Sequence[Summary]) -> list[str]:
    return list(dict.fromkeys(row["case"] for s in summaries for row in s["rows"]))


def _ms(row: dict[str, Any], figure: str, percentile: str = "p50") -> list[float] | None:
    found = row.get(figure, {}).get(percentile)
    return None if found is None else [1e3 * v for v in found]


def per_case(summaries: Sequence[Summary]) -> str:
    """Median ITL, Variant x TestCase; with several runs the first baseline and every k."""
    seen: dict[str, list[Bar]] = {case: [] for case in _cases(summaries)}
    for number, summary in enumerate(summaries):
        for row in sorted(summary["rows"], key=lambda r: r["variant"]):
            itl = _ms(row, "itl_s")
            if itl is None or (number and row["variant"] == "baseline"):
                continue
            known = row["variant"] == "speculative" and summary["run"]["settings"]["k"]
            k = f", k {known}" if known else ""
            seen[row["case"]].append(Bar(_COLOUR[row["variant"]], itl[0], itl[1], itl[2], f"{itl[0]:.2f} ms{k}"))
    present = {row["variant"] for s in summaries for row in s["rows"]}
    legend = [(name, colour) for name, colour in _COLOUR.items() if name in present]
    tiers = {row["case"]: row["tier"] for s in summaries for row in s["rows"]}
    groups = [(f"{case} ({tiers[case]})", group) for case, group in seen.items() if group]
    return bars("Median ITL by prompt, with its 95 % interval (lower is better)", "ms", groups, legend)


def latency_curves(summary: Summary) -> str:
    """The share of requests at or below a latency, one line per prompt and variant."""
    made = []
    for figure, name in (("itl_s", "ITL"), ("ttft_s", "TTFT"), ("e2e_s", "E2E")):
        series = []
        for row in summary["rows"]:
            found = row.get(f"{figure}_curve", [])
            points = tuple((100 * i / (len(found) - 1), 1e3 * v) for i, v in enumerate(found))
            series.append(Series(row["variant"], _COLOUR[row["variant"]], points))
        made.append(lines(Axes(f"{name} of requests, a line a prompt", "percentile of requests", "ms"), series))
    return '<div class="row">' + "".join(made) + "</div>"


def acceptance_by_position(summary: Summary) -> str:
    """How often each draft position is accepted: of all steps, and of those that got so far."""
    rows = [r for r in summary["rows"] if r.get("acceptance", {}).get("unconditional")]
    if not rows:
        return ""
    made = []
    for share, title in (
        ("unconditional", "Of all steps"),
        ("conditional", "Of the steps that accepted all before"),
    ):
        series = [
            Series(
                name,
                colour,
                tuple((i + 1, 100 * v) for i, v in enumerate(_reached(row["acceptance"], share))),
                marks=True,
            )
            for row, (name, colour) in zip(rows, _told_apart(rows), strict=True)
        ]
        made.append(lines(Axes(title, "draft position", "accepted, %", 400, whole=True, top=100), series))
    return '<div class="row">' + "".join(made) + "</div>"


def _told_apart(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """A name and a colour for each row: its prompt, or its tier when there are more prompts than colours."""
    by = "case" if len({row["case"] for row in rows}) <= len(COLOURS) else "tier"
    names = list(dict.fromkeys(row[by] for row in rows))
    return [(row[by], COLOURS[names.index(row[by]) % len(COLOURS)]) for row in rows]


def _reached(taken: dict[str, Any], share: str) -> list[float]:
    """The shares of the positions that enough steps got to; a conditional share of a few steps is noise."""
    before = [1.0, *taken["unconditional"]]
    chances = [taken["steps"] * (b if share == "conditional" else 1.0) for b in before]
    return [v for v, n in zip(taken[share], chances, strict=False) if n >= _LEAST_STEPS]


def k_sweep(summaries: Sequence[Summary]) -> str:
    """Median ITL and acceptance length over k; empty for a single k."""
    runs = sorted((s for s in summaries if s["run"]["settings"]["k"]), key=lambda s: s["run"]["settings"]["k"])
    if len({s["run"]["settings"]["k"] for s in runs}) < 2:
        return ""
    itl, length = [], []
    for number, case in enumerate(_cases(runs)):
        colour = COLOURS[number % len(COLOURS)]
        points, bands, lengths = [], [], []
        for summary in runs:
            k = summary["run"]["settings"]["k"]
            for row in summary["rows"]:
                found = _ms(row, "itl_s")
                if row["case"] == case and row["variant"] == "speculative" and found:
                    points.append((k, found[0]))
                    bands.append((k, found[1], found[2]))
                    if "acceptance" in row:
                        lengths.append((k, row["acceptance"]["length"]))
        itl.append(Series(case, colour, tuple(points), tuple(bands), marks=True))
        itl += _baseline(runs[0], case, colour, [k for k, _ in points])
        length.append(Series(case, colour, tuple(lengths), marks=True))
    axes = Axes("Median ITL over k (dashed: baseline)", "k, draft tokens per step", "ms", 400, whole=True)
    below = Axes("Acceptance length over k", "k, draft tokens per step", "tokens a step", 400, whole=True)
    return '<div class="row">' + lines(axes, itl) + lines(below, length) + "</div>"


def _baseline(summary: Summary, case: str, colour: str, ks: Sequence[float]) -> list[Series]:
    rows = [r for r in summary["rows"] if r["case"] == case and r["variant"] == "baseline"]
    found = _ms(rows[0], "itl_s") if rows else None
    if found is None or not ks:
        return []
    return [Series(f"{case}, baseline", colour, ((min(ks), found[0]), (max(ks), found[0])), dashed=True)]
