"""The loss curves of a run as an SVG: held-out loss of each class, and the distillation loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Point = Mapping[str, float | int | str]
Lines = dict[str, list[tuple[float, float]]]
COLORS = {"target": "#1f5fa8", "draft": "#c75a00", "draft_small": "#5b7f3a"}
WIDTH, HEIGHT, TOP, BOTTOM, LEFT, RIGHT, PANEL_GAP = 960, 330, 62, 48, 44, 16, 52
TOPS = (0.1, 0.2, 0.4, 0.8, 1.2, 1.6, 2, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Panel:
    """One plot: which of `count` side by side, its title, a line (steps, losses) for each model, and its x axis."""

    index: int
    title: str
    lines: Lines
    count: int = 3
    x_title: str = "step"

    @property
    def width(self) -> float:
        """Pixels from the first x to the last."""
        return (WIDTH - LEFT - RIGHT - (self.count - 1) * PANEL_GAP) / self.count

    def x(self, step: float) -> float:
        """Pixel of a step; the axis starts at 0."""
        return LEFT + self.index * (self.width + PANEL_GAP) + self.width * step / self.last

    def y(self, loss: float) -> float:
        """Pixel of a loss in nats; the axis starts at 0."""
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * loss / self.highest

    @property
    def last(self) -> float:
        """The end of the x axis."""
        return max((s for line in self.lines.values() for s, _ in line), default=1)

    @property
    def highest(self) -> float:
        """The top of the loss axis, a number whose quarters are short."""
        most = max((v for line in self.lines.values() for _, v in line), default=1.0)
        return next((top for top in TOPS if top >= most), most)


def _lines(curves: Sequence[Point], key: str, stage: str | None) -> Lines:
    return {
        name: [(float(p["step"]), float(p[key])) for p in curves if p["model"] == name and stage in (None, p["stage"])]
        for name in COLORS
    }


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{words}</text>'


def _axes(panel: Panel) -> list[str]:
    left, right, bottom = panel.x(0), panel.x(0) + panel.width, HEIGHT - BOTTOM
    parts = [_text(left, TOP - 12, panel.title, 'font-weight="600"')]
    for n in range(5):
        loss = panel.highest * n / 4
        y = panel.y(loss)
        parts.append(f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="#ddd"/>')
        parts.append(_text(left - 6, y + 4, f"{loss:.3g}", 'text-anchor="end" fill="#555"'))
    last = panel.last
    step = max(1, round(last / 4 / 100)) * 100 if last >= 100 else max(1, round(last / 3))
    for n in range(0, int(last) + 1, int(step)):
        parts.append(_text(panel.x(n), bottom + 17, str(n), 'text-anchor="middle" fill="#555"'))
    parts.append(_text(left + panel.width / 2, bottom + 36, panel.x_title, 'text-anchor="middle"'))
    return parts


def _curve(panel: Panel, name: str, color: str) -> str:
    places = " ".join(f"{panel.x(s):.1f},{panel.y(v):.1f}" for s, v in panel.lines[name])
    return f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="2"/>'


def _legend(colors: Mapping[str, str], note: str) -> list[str]:
    parts = []
    for n, (name, color) in enumerate(colors.items()):
        x = LEFT + 130 * n
        parts.append(f'<path d="M{x} 20h22" stroke="{color}" stroke-width="3"/>')
        parts.append(_text(x + 28, 24, name))
    return [*parts, _text(WIDTH - RIGHT, 24, note, 'text-anchor="end" fill="#555"')]


def loss_figure(curves: Sequence[Point]) -> str:
    """The three panels side by side."""
    panels = (
        Panel(0, "held-out structured text", _lines(curves, "held_out_structured", None)),
        Panel(1, "held-out open text", _lines(curves, "held_out_open", None)),
        Panel(2, "KL(target || draft), trained rows", _lines(curves, "loss", "distil")),
    )
    return figure(panels, COLORS, "stand-in models, loss in nats per token")


def figure(panels: Sequence[Panel], colors: Mapping[str, str], note: str) -> str:
    """Panels side by side under one legend."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_legend(colors, note),
    ]
    for panel in panels:
        parts += _axes(panel)
        parts += [_curve(panel, name, colors[name]) for name, line in panel.lines.items() if line]
    return "\n".join([*parts, "</svg>"]) + "\n"
