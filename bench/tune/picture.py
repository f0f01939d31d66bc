"""A picture of `bench.tune`: milliseconds per token over the cost of a million tokens, a curve for each drafter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from bench.tune.choose import Row, frontier

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 900, 560, 64, 92, 876, 508
_COLORS = ("#6b7280", "#c2410c", "#b45309", "#1d4ed8", "#15803d", "#7c3aed", "#0e7490", "#be123c")
_TICKS = tuple(mantissa * 10.0**power for power in range(-4, 7) for mantissa in (1, 2, 5))


def _axis(values: Sequence[float], first: float, last: float) -> tuple[Callable[[float], float], list[float]]:
    """Positions of a logarithmic axis, and its ticks."""
    low, high = math.log(min(values) / 1.15), math.log(max(values) * 1.15)
    ticks = [tick for tick in _TICKS if low < math.log(tick) < high]
    return lambda value: first + (math.log(value) - low) / (high - low) * (last - first), ticks


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _curve(points: Sequence[tuple[float, float]], best: Sequence[Row], color: str) -> list[str]:
    """The setups of one drafter; both ends have a label, every point a tooltip."""
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>']
    for (x, y), r in zip(points, best, strict=True):
        name = f"{r['drafter']}: tp {r['tp']}, LNC {r['lnc']}, batch {r['batch']}, k {r['k']}"
        title = escape(f"{name}, {r['ms']:.1f} ms, {r['cost']:.2f}")
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"><title>{title}</title></circle>')
    for n, anchor in ((0, "start"), (-1, "end")):
        label, style = f"tp {best[n]['tp']}, batch {best[n]['batch']}", f'font-size="10" text-anchor="{anchor}"'
        parts.append(_text(points[n][0], points[n][1] + (16 if n else -7), label, style))
    return parts


def draw(rows: Sequence[Row], article: Row) -> str:
    """SVG of the first workload: each drafter's best setups by cost, from its first record, and the article's setup."""
    caption, records = rows[0]["workload"], dict[str, str]()
    rows = [r for r in rows if r["workload"] == caption and records.setdefault(r["drafter"], r["from"]) == r["from"]]
    x, x_ticks = _axis([r["cost"] for r in (*rows, article)], _LEFT, _RIGHT)
    y, y_ticks = _axis([r["ms"] for r in (*rows, article)], _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#111827">', f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 20, "Qwen3-32B: time per token over cost (simulated)", 'font-size="15"'),
        _text(_LEFT, 38, caption), _text(_LEFT, _HEIGHT - 12, "cost of a million tokens (chip-hours times the price)"),
        _text(16, 320, "ms per token", 'transform="rotate(-90 16 320)"'),
    ]  # fmt: skip
    grid = '<path d="M{:.1f} {:.1f}L{:.1f} {:.1f}" stroke="#e5e7eb"/>'
    for tick in x_ticks:
        label = _text(x(tick), _BOTTOM + 16, f"{tick:g}", 'text-anchor="middle"')
        parts += [grid.format(x(tick), _TOP, x(tick), _BOTTOM), label]
    for tick in y_ticks:
        label = _text(_LEFT - 6, y(tick) + 4, f"{tick:g}", 'text-anchor="end"')
        parts += [grid.format(_LEFT, y(tick), _RIGHT, y(tick)), label]
    for n, drafter in enumerate(dict.fromkeys(r["drafter"] for r in rows)):
        color, best = _COLORS[n % len(_COLORS)], frontier(r for r in rows if r["drafter"] == drafter)
        parts += _curve([(x(r["cost"]), y(r["ms"])) for r in best], best, color)
        name = drafter + " (assumed acceptance)" * best[0]["assumed"]
        parts.append(_text(_LEFT + 205 * (n % 4), 58 + 18 * (n // 4), name, f'fill="{color}"'))
    left, top = x(article["cost"]), y(article["ms"])
    label = f"the article: chain 1.7B, tp {article['tp']}, batch {article['batch']}, k {article['k']}"
    parts.append(f'<path d="M{left - 6:.1f} {top:.1f}l6 -6l6 6l-6 6z" fill="none" stroke="black" stroke-width="2"/>')
    return "\n".join([*parts, _text(left, top - 10, label, 'text-anchor="middle"'), "</svg>"]) + "\n"
