"""Step costs become the gains they should, and the load's table shows no time beside other tokens."""

from __future__ import annotations

import json

import pytest

from bench.mixed_load import Row, ratio, table
from bench.step_costs import Cost, tuning
from model.switching import parse_table

COSTS = [Cost(128, 1, 10.0, 20.0, 30.0), Cost(256, 1, 10.0, 25.0, 50.0), Cost(128, 2, 10.0, 40.0, 40.0)]


def test_costs_become_a_table_that_switching_reads() -> None:
    parsed = parse_table(json.dumps(tuning(COSTS, 3)).encode(), "t").on_graph(3)
    assert (parsed.source, parsed.refresh) == ("wall", 4.0)
    # no acceptance: one token for the time of a fused step; all accepted: four; buckets weigh the same
    assert parsed.best(1, 0.0, 3)[1] == pytest.approx((0.5 + 0.4) / 2)
    assert parsed.best(1, 1.0, 3) == (3, pytest.approx(4 * 0.45))
    assert parsed.best(1, 1.0, 2) == (2, pytest.approx(3 * 0.45))
    assert parsed.best(2, 1.0, 3) == (3, pytest.approx(1.0))


def _rows(way: str, times: list[float], identical: bool = True) -> list[Row]:
    return [Row(way, 1, i, "mixed", 10, t, 5, 0, identical) for i, t in enumerate(times)]


def test_a_ratio_has_its_interval() -> None:
    rows = _rows("switching", [1.0, 1.1, 0.9]) + _rows("k 3", [2.0, 2.2, 1.8])
    value, low, high = ratio(rows, "switching", "k 3", "mixed")
    assert value == pytest.approx(2.0)
    assert 1.6 < low < value < high < 2.5
    assert ratio(rows, "switching", "switching", "mixed")[0] == 1


def test_no_time_is_shown_beside_other_tokens() -> None:
    shown = table(_rows("switching", [1.0, 1.0]) + _rows("k 3", [2.0, 2.0]))
    assert "| k 3 | 2.00 | 2.00 | 2.000 [2.000, 2.000] | yes |" in shown
    hidden = table(_rows("switching", [1.0, 1.0]) + _rows("k 3", [2.0, 2.0], identical=False))
    assert "| k 3 | - | - | - | no |" in hidden
