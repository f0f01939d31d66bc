"""Boxes and arrows as SVG text: the few shapes that the diagrams of README and docs are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

FONT = 'font-family="Helvetica, Arial, sans-serif"'
INK, GREY, LINE = "#20262c", "#5f6b76", "#8a949e"
# fills: draft, target, host, data, neutral
DRAFT, TARGET, HOST, DATA, PLAIN = "#fde3d3", "#d7e8f5", "#fff3c9", "#e2f2e6", "#f3f5f7"
_LEADING = 16


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels with lines of text; the first line is bold."""

    x: float
    y: float
    width: float
    height: float
    lines: tuple[str, ...]
    fill: str = PLAIN

    def at(self, across: float, down: float) -> tuple[float, float]:
        """A point of the box, (0, 0) its upper left corner, (1, 1) its lower right one."""
        return self.x + across * self.width, self.y + down * self.height


@dataclass(frozen=True)
class Arrow:
    """A straight arrow from one point to the next, and what is written beside its middle."""

    start: tuple[float, float]
    end: tuple[float, float]
    label: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Note:
    """A line of text at a point, grey unless it is a heading."""

    x: float
    y: float
    text: str
    heading: bool = False


Part = Box | Arrow | Note


def svg(width: int, height: int, parts: Sequence[Part]) -> str:
    """The picture on a white ground, so that it can be read on a dark page too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" {FONT} font-size="13">'
    )
    marker = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker></defs>'
    )
    drawn = [_box(p) if isinstance(p, Box) else _arrow(p) if isinstance(p, Arrow) else _note(p) for p in parts]
    return "\n".join([head, marker, '<rect width="100%" height="100%" fill="#fff"/>', *drawn, "</svg>"]) + "\n"


def _box(box: Box) -> str:
    x, y = box.at(0.5, 0.5)
    first = y - (len(box.lines) - 1) * _LEADING / 2 + 4.5
    frame = (
        f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" rx="5" fill="{box.fill}" '
        f'stroke="{LINE}"/>'
    )
    texts = [_text(x, first + i * _LEADING, line, bold=i == 0, middle=True) for i, line in enumerate(box.lines)]
    return frame + "".join(texts)


def _arrow(arrow: Arrow) -> str:
    (x1, y1), (x2, y2) = arrow.start, arrow.end
    dashes = ' stroke-dasharray="5 4"' if arrow.dashed else ""
    line = f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{LINE}" stroke-width="1.4"'
    label = _text((x1 + x2) / 2 + 6, (y1 + y2) / 2 - 5, arrow.label, colour=GREY) if arrow.label else ""
    return f'{line} marker-end="url(#tip)"{dashes}/>{label}'


def _note(note: Note) -> str:
    return _text(note.x, note.y, note.text, bold=note.heading, colour=INK if note.heading else GREY)


def _text(x: float, y: float, text: str, bold: bool = False, middle: bool = False, colour: str = INK) -> str:
    weight, anchor = ' font-weight="600"' if bold else "", ' text-anchor="middle"' if middle else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}"{weight}{anchor}>{escape(text)}</text>'
