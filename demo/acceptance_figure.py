"""What is measured of a drafter, and its picture: tokens a step against k, greedy and drawn, by prompt class."""

from collections.abc import Sequence
from dataclasses import dataclass

from demo.drafter_figure import COLORS
from demo.figure import Panel, figure

INDEPENDENT = "parallel, own noise"
PANELS = (
    ("structured", "greedy", "structured, T = 0"),
    ("open", "greedy", "open, T = 0"),
    ("structured", "coupled", "structured, T = 0.6"),
    ("open", "coupled", "open, T = 0.6"),
)


@dataclass(frozen=True)
class Acceptance:
    """A drafter on the prompts of one class, its drafts chosen in one way.

    `by_position[i]`: share of anchors with room at which the first i + 1 drafts are accepted.
    `tokens_per_step[i]`: tokens a target pass of a run with k = i + 1, all prompts together.
    """

    drafter: str
    entropy: str
    way: str
    tokens: int
    by_position: list[float]
    tokens_per_step: list[float]


def acceptance_figure(results: Sequence[Acceptance]) -> str:
    """The panels side by side; in those of drawn text also the parallel draft with noise of its own."""
    panels = []
    for n, (entropy, way, title) in enumerate(PANELS):
        own = [r for r in results if r.entropy == entropy]
        lines = {r.drafter: points(r) for r in own if r.way == way}
        if way == "coupled":
            other = [points(r) for r in own if (r.drafter, r.way) == ("parallel", "independent")]
            lines |= dict(zip([INDEPENDENT], other, strict=False))
        panels.append(Panel(n, title, lines, count=len(PANELS), x_title="k"))
    drawn = {name for panel in panels for name in panel.lines}
    colors = {name: color for name, color in (COLORS | {INDEPENDENT: "#8fb4dc"}).items() if name in drawn}
    return figure(panels, colors, "stand-in models, tokens a step")


def points(result: Acceptance) -> list[tuple[float, float]]:
    """k and tokens a step."""
    return [(float(k), value) for k, value in enumerate(result.tokens_per_step, 1)]
