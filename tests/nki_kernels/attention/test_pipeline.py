"""The table of stages: the chart in docs/verify_attention.md follows from it, and no stage runs before its input."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from nki_kernels.attention.rows import Tiling

from nki_kernels.attention.pipeline import stages

DOCS = Path(__file__).resolve().parents[3] / "docs" / "verify_attention.md"
# what a stage reads is written by the stage before it
CHAIN = ("load_keys", "scores", "exponentials", "turn", "weigh_first_half", "add_sums", "add_values")
BEFORE = (
    *itertools.pairwise(CHAIN),
    ("load_values", "weigh_first_half"),
    ("weigh_first_half", "weigh_second_half"),
    ("weigh_second_half", "add_values"),
)


def tiling(ahead: int, turn: int, weigh: int, halves: bool = False) -> Tiling:
    """Four groups in a pack over 8192 slots; only the lags matter here."""
    return Tiling(4, 1, 16, 8, 8192, 128, 4, ahead, turn, weigh, halves)


def table(t: Any) -> list[tuple[int, int, str]]:
    """(lag, place in the turn, name) of each stage in the order in which a chunk passes them."""
    return sorted((lag, place + 1, stage.__name__) for place, (lag, stage) in enumerate(stages(t)))


def chart(t: Any) -> str:
    """A chunk's way through the turns: its stages down, the turns across, the place within the turn as the mark."""
    lags = range(-t.ahead, t.weigh + 2)
    lines = [f"{'turn':<18}" + "".join(f"{lag:>+4}" if lag else "   0" for lag in lags)]
    lines += [f"{name:<18}" + " " * 4 * (lag + t.ahead) + f"{place:>4}" for lag, place, name in table(t)]
    return "\n".join(lines)


def test_the_chart_of_the_docs() -> None:
    assert chart(tiling(3, 3, 4)) in DOCS.read_text()


# the four sets of lags that `rows.tiling` chooses from
@pytest.mark.parametrize("lags", [(1, 2, 3), (2, 2, 3), (3, 3, 4), (1, 2, 2, True)])
def test_no_stage_before_its_input(lags: tuple[Any, ...]) -> None:
    at = {name: (lag, place) for lag, place, name in table(tiling(*lags))}
    assert len(at) == len(stages(tiling(*lags)))
    for first, second in BEFORE:
        assert at[first] < at[second], f"{second} before {first}"
