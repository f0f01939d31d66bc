"""A picture of `bench.tune`: milliseconds per token over the cost of a million tokens, a curve for each drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from bench.tune.choose import Row, frontier

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 900, 560, 64, 56, 24, 52
_COLORS = ("#6b7280", "#c2410c", "#b45309", "#1d4ed8", "#15803d", "#7c3aed", "#0e7490", "#be123c")
_TICKS = tuple(mantissa * 10.0**power for power in range(-4, 7) for mantissa in (1, 2, 5))


class _Axis:
    """Positions of a logarithmic axis, with the ticks inside of its values."""

    def __init__(self, values: Sequence[float], first: float, last: float):
        self._low, self._high = math.log(min(values) / 1.15), math.log(max(values) * 1.15)
        self._first, self._last = first, last
        self.ticks = [tick for tick in _TICKS if self._low < math.log(tick) < self._high]

    def at(self, value: float) -> float:
        share = (math.log(value) - self._low) / (self._high - self._low)
        return self._first + share * (self._last - self._first)


def _text(x: float, y: float, text: str, *style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {" ".join(style)}>{escape(text)}</text>'


def draw(rows: Sequence[Row], article: Row, caption: str) -> str:
    """SVG of the rows of one workload: the setups that are best at their cost, by drafter, and the article's one."""
    x = _Axis([r["cost"] for r in (*rows, article)], _LEFT, _WIDTH - _RIGHT)
    y = _Axis([r["ms"] for r in (*rows, article)], _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#111827">', f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 20, "Qwen3-32B: time per token over cost (simulated)", 'font-size="15"'),
        _text(_LEFT, 38, caption, 'fill="#4b5563"'),
        _text(_WIDTH / 2, _HEIGHT - 12, "cost of a million tokens (chip-hours times the price)", 'text-anchor="middle"'),
        _text(16, _HEIGHT / 2, "ms per token", f'transform="rotate(-90 16 {_HEIGHT / 2})"', 'text-anchor="middle"'),
    ]  # fmt: skip
    grid = '<path d="M{:.1f} {:.1f}L{:.1f} {:.1f}" stroke="#e5e7eb"/>'
    for tick in x.ticks:
        parts.append(grid.format(x.at(tick), _TOP, x.at(tick), _HEIGHT - _BOTTOM))
        parts.append(_text(x.at(tick), _HEIGHT - _BOTTOM + 16, f"{tick:g}", 'text-anchor="middle"'))
    for tick in y.ticks:
        parts.append(grid.format(_LEFT, y.at(tick), _WIDTH - _RIGHT, y.at(tick)))
        parts.append(_text(_LEFT - 6, y.at(tick) + 4, f"{tick:g}", 'text-anchor="end"'))
    for n, drafter in enumerate(dict.fromkeys(r["drafter"] for r in rows)):
        color, best = _COLORS[n % len(_COLORS)], frontier(r for r in rows if r["drafter"] == drafter)
        points = [(x.at(r["cost"]), y.at(r["ms"])) for r in best]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        for (a, b), r in zip(points, best, strict=True):
            where = f"tp {r['tp']}, LNC {r['lnc']}, batch {r['batch']}, k {r['k']}"
            title = f"<title>{escape(drafter)}: {where}, {r['ms']:.1f} ms, {r['cost']:.2f}</title>"
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{color}">{title}</circle>')
        # both ends name their setup
        for (a, b), r, anchor in ((points[0], best[0], "start"), (points[-1], best[-1], "middle")):
            parts.append(_text(a + 5, b - 7, f"tp {r['tp']}, {r['batch']}", f'text-anchor="{anchor}"', 'font-size="10"'))
        known = " (assumed acceptance)" if best[0]["assumed"] else ""
        parts.append(_text(_WIDTH - 260, _TOP + 18 + 18 * n, f"{drafter}{known}", f'fill="{color}"'))
    a, b = x.at(article["cost"]), y.at(article["ms"])
    label = f"the article: chain 1.7B, tp {article['tp']}, batch {article['batch']}, k {article['k']}"
    parts.append(f'<path d="M{a - 6:.1f} {b:.1f}l6 -6l6 6l-6 6z" fill="none" stroke="black" stroke-width="2"/>')
    return "\n".join([*parts, _text(a + 10, b + 4, label), "</svg>"]) + "\n"
