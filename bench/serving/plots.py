"""Plots as SVG text: lines over two axes, and groups of bars with intervals."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

# Okabe and Ito's colours, which can be told apart by the colour-blind
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31", "#666666")
BASELINE, SPECULATIVE = COLOURS[:2]
_FONT = 'font-family="Helvetica, Arial, sans-serif"'
_GREY = "#5f6b76"
_SIZE = re.compile(r'^<svg [^>]*width="(\d+)" height="(\d+)"')


@dataclass(frozen=True)
class Series:
    """A line: its points, and the ends of an interval at each x where there is one."""

    name: str
    colour: str
    points: tuple[tuple[float, float], ...]
    bands: tuple[tuple[float, float, float], ...] = ()
    dashed: bool = False
    marks: bool = False


@dataclass(frozen=True)
class Axes:
    """A plot's title, labels and size in pixels; `zero` starts the y axis at 0, `whole` keeps x ticks whole."""

    title: str
    x: str
    y: str
    width: int = 340
    height: int = 250
    zero: bool = True
    whole: bool = False
    top: float | None = None


@dataclass(frozen=True)
class Bar:
    """A bar with its interval and what stands beside it."""

    colour: str
    value: float
    low: float
    high: float
    text: str


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover a range, about `count` of them."""
    span = high - low or abs(high) or 1.0
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def _text(x: float, y: float, text: str, size: int = 11, anchor: str = "start", **more: str) -> str:
    extra = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in ({"fill": "#222"} | more).items())
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" {_FONT} font-size="{size}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1.0) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    view = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    # a ground of its own, for readers with a dark page
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view} role="img">{ground}' + "".join(parts) + "</svg>"


def lines(axes: Axes, series: Sequence[Series]) -> str:
    """A line plot; a name is written once in the legend below, whatever the number of its lines."""
    shown = [s for s in series if s.points]
    if not shown:
        return ""
    xs = [x for s in shown for x, _ in s.points]
    ys = [y for s in shown for _, y in s.points] + [v for s in shown for _, a, b in s.bands for v in (a, b)]
    y_ticks = ticks(0.0 if axes.zero else min(ys), axes.top or max(ys))
    x_ticks = [float(x) for x in sorted({round(x) for x in xs})] if axes.whole else ticks(min(xs), max(xs))
    x_low, x_high = (min(xs) - 0.4, max(xs) + 0.4) if axes.whole else (x_ticks[0], x_ticks[-1])
    names = dict.fromkeys((s.name, s.colour, s.dashed) for s in shown)
    left, right, top, bottom = 52, 12, 30, axes.height - 46

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low)
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return left + across * (axes.width - left - right), bottom - up * (bottom - top)

    parts = [_text(left, 16, axes.title, 13, font_weight="bold")]
    for y in y_ticks:
        at = place(x_low, y)[1]
        parts += [_line(left, at, axes.width - right, at, "#dde3e8"), _text(left - 6, at + 4, f"{y:g}", 10, "end")]
    for x in x_ticks:
        parts.append(_text(place(x, y_ticks[0])[0], bottom + 15, f"{x:g}", 10, "middle"))
    parts.append(_text((left + axes.width - right) / 2, bottom + 32, axes.x, 11, "middle", fill=_GREY))
    middle = (top + bottom) / 2
    parts.append(_text(13, middle, axes.y, 11, "middle", fill=_GREY, transform=f"rotate(-90 13 {middle:.0f})"))
    for s in shown:
        parts += _drawn(s, place)
    rows = [_legend(left, axes.height + 4 + 16 * i, *name) for i, name in enumerate(names)]
    return _svg(axes.width, axes.height + 16 * len(rows) + 2, parts + rows)


def grid(plots: Sequence[str], columns: int) -> str:
    """Plots of this module in rows of so many, each in a cell of the largest one's size."""
    sizes = [tuple(map(int, _SIZE.findall(plot)[0])) for plot in plots]
    width, height = (max(size) for size in zip(*sizes, strict=True))
    parts = [
        plot.replace("<svg ", f'<svg x="{n % columns * width}" y="{n // columns * height}" ', 1)
        for n, plot in enumerate(plots)
    ]
    return _svg(width * columns, height * -(-len(plots) // columns), parts)


def _drawn(series: Series, place: Callable[[float, float], tuple[float, float]]) -> list[str]:
    at = [place(x, y) for x, y in series.points]
    dash = ' stroke-dasharray="5 4"' if series.dashed else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    stroke = f'fill="none" stroke="{series.colour}" stroke-width="1.8"{dash}'
    parts = [f'<polyline points="{path}" {stroke}><title>{escape(series.name)}</title></polyline>']
    for x, low, high in series.bands:
        (across, bottom), (_, top) = place(x, low), place(x, high)
        parts.append(_line(across, bottom, across, top, series.colour, 1.2))
    if series.marks or len(at) == 1:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{series.colour}"/>' for x, y in at]
    return parts


def _legend(x: float, y: float, name: str, colour: str, dashed: bool) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    ends = f'x1="{x:.1f}" y1="{y - 4:.1f}" x2="{x + 20:.1f}" y2="{y - 4:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="2.5"{dash}/>' + _text(x + 26, y, name)


def bars(title: str, unit: str, groups: Sequence[tuple[str, Sequence[Bar]]], legend: Sequence[tuple[str, str]]) -> str:
    """Horizontal bars in named groups, their intervals as whiskers, their values in words at the end."""
    width, left, right, thick = 860, 310, 130, 15
    highest = max((b.high for _, group in groups for b in group), default=0.0)
    if not highest:
        return ""
    scale_ticks = ticks(0.0, highest)
    heights = [len(group) * (thick + 3) + 12 for _, group in groups]
    top, bottom = 52, 52 + sum(heights)

    def across(value: float) -> float:
        return left + value / scale_ticks[-1] * (width - left - right)

    parts = [_text(8, 18, title, 13, font_weight="bold")]
    for number, (name, colour) in enumerate(legend):
        box = f'<rect x="{left + 130 * number}" y="28" width="11" height="11" fill="{colour}"/>'
        parts += [box, _text(left + 130 * number + 16, 38, name)]
    for value in scale_ticks:
        parts.append(_line(across(value), top - 4, across(value), bottom, "#dde3e8"))
        parts.append(_text(across(value), bottom + 15, f"{value:g}", 10, "middle"))
    parts.append(_text(across(scale_ticks[-1]) + 20, bottom + 15, unit, 10, fill=_GREY))
    y = float(top)
    for (name, group), height in zip(groups, heights, strict=True):
        parts.append(_text(left - 10, y + (height - 12) / 2 + 4, name, 11, "end"))
        for number, bar in enumerate(group):
            at = y + number * (thick + 3)
            size = f'width="{max(1.0, across(bar.value) - left):.1f}" height="{thick}"'
            parts.append(f'<rect x="{left}" y="{at:.1f}" {size} fill="{bar.colour}"/>')
            parts.append(_line(across(bar.low), at + thick / 2, across(bar.high), at + thick / 2, "#222", 1.4))
            parts.append(_text(max(across(bar.high), across(bar.value)) + 6, at + 12, bar.text, 11))
        y += height
    return _svg(width, bottom + 26, parts)
