"""The table of stages: the chart in docs/kernels.md follows from it, and no stage runs before its input."""

from __future__ import annotations

import itertools
from pathlib import Path

from nki_kernels.attention.pipeline import DRAIN, PREFETCH_DISTANCE, STAGES

DOCS = Path(__file__).resolve().parents[3] / "docs" / "kernels.md"
# what a stage reads is written by the stage before it
CHAIN = ("load_keys", "scores", "exponentials", "transpose", "multiply", "add_sums", "add_values")
# (lag, place in the iteration, name) of each stage in the order in which a chunk passes them
TABLE = sorted((lag, place + 1, stage.__name__) for place, (lag, stage) in enumerate(STAGES))


def chart() -> str:
    """A chunk's way: its stages down, the iterations across, the place within an iteration as the mark."""
    lags = range(-PREFETCH_DISTANCE, DRAIN + 1)
    lines = [f"{'iteration':<14}" + "".join(f"{lag:>+4}" if lag else "   0" for lag in lags)]
    lines += [f"{name:<14}" + " " * 4 * (lag + PREFETCH_DISTANCE) + f"{place:>4}" for lag, place, name in TABLE]
    return "\n".join(lines)


def test_the_chart_of_the_docs() -> None:
    assert chart() in DOCS.read_text(encoding="utf-8")


def test_no_stage_before_its_input() -> None:
    at = {name: (lag, place) for lag, place, name in TABLE}
    assert len(at) == len(STAGES)
    for first, second in (*itertools.pairwise(CHAIN), ("load_values", "multiply")):
        assert at[first] < at[second], f"{second} before {first}"
