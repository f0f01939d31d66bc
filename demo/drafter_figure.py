"""The drafters' curves as an SVG: training loss, and the drafts accepted on held-out rows."""

from collections.abc import Mapping, Sequence

from demo.figure import Panel, figure

COLORS = {"chain": "#5b5b5b", "parallel": "#1f5fa8", "eagle3": "#c75a00", "medusa": "#5b7f3a"}
NOTE = "stand-in models; KL in nats, accepted drafts of 16"


def loss_figure(curves: Mapping[str, Sequence[Mapping[str, float | int]]]) -> str:
    """Two panels side by side, a line for each drafter."""
    panels = []
    for n, (key, title) in enumerate((("loss", "training loss"), ("accepted", "accepted, held-out rows"))):
        lines = {name: [(float(p["step"]), float(p[key])) for p in curve] for name, curve in curves.items()}
        panels.append(Panel(n, title, lines, count=2))
    return figure(panels, {name: COLORS[name] for name in curves}, NOTE)
