"""Pictures by matplotlib: text stays text, and the same data give the same file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

mpl.rcParams.update(
    {"svg.hashsalt": "trnspec", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "font.size": 9,
     "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
)  # fmt: skip


def panels(rows: int, columns: int, width: float = 4.5, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """A figure with a grid of axes, row by row; sizes of one in inches."""
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def line(axes: Axes, name: str, points: dict[int, Sequence[float]]) -> None:
    """A line over x through the middle of [low, middle, high], with its band."""
    xs, (low, middle, high) = list(points), zip(*points.values(), strict=True)
    (drawn,) = axes.plot(xs, middle, marker=".", label=name)
    axes.fill_between(xs, low, high, color=drawn.get_color(), alpha=0.12, linewidth=0)


def bars(axes: Axes, values: dict[str, Sequence[float]]) -> None:
    """Horizontal bars by name, each [low, middle, high], the first one on top."""
    for name, (low, middle, high) in reversed(values.items()):
        axes.barh(name, middle, xerr=[[middle - low], [high - middle]], color="#7aa6c2", error_kw={"linewidth": 1})
        axes.annotate(f" {middle:.2f}", (high, name), va="center", fontsize=8)
    axes.margins(x=0.15)


def save(figure: Figure, file: Path) -> None:
    """Write the figure as SVG without a date."""
    figure.savefig(file, format="svg", metadata={"Date": None})
