"""Step costs become the gains they should, and the load's table shows no time beside other tokens."""

from __future__ import annotations

import json

import pytest

from bench.mixed_load import __main__ as mixed_load
from bench.mixed_load.__main__ import SWITCHING, Row, ratio, show, table
from bench.mixed_load.requests import ordered
from bench.reproduce.__main__ import RESULTS
from bench.step_costs import Cost, tuning
from model.errors import UserError
from model.serving.request import Request
from model.serving.switching import parse_table

COSTS = [
    Cost(128, 1, 10.0, {3: 20.0}, 30.0),
    Cost(256, 1, 10.0, {3: 25.0}, 50.0),
    Cost(128, 2, 10.0, {3: 40.0}, 40.0),
]


def test_costs_become_a_table_that_switching_reads() -> None:
    parsed = parse_table(json.dumps(tuning(COSTS)).encode(), "t").on_graph(3)
    assert (parsed.source, parsed.refresh) == ("wall", 4.0)
    # no acceptance: one token for the time of a fused step; all accepted: four; buckets weigh the same
    assert parsed.best(1, 0.0, 3)[1] == pytest.approx((0.5 + 0.4) / 2)
    assert parsed.best(1, 1.0, 3) == (3, pytest.approx(4 * 0.45))
    assert parsed.best(1, 1.0, 2) == (2, pytest.approx(3 * 0.45))
    assert parsed.best(2, 1.0, 3) == (3, pytest.approx(1.0))


def test_few_drafts_cost_what_the_smallest_graph_that_holds_them_costs() -> None:
    parsed = parse_table(json.dumps(tuning([Cost(128, 1, 10.0, {1: 12.5, 3: 20.0}, 30.0)])).encode(), "t")
    tables = parsed.on_graphs((1, 3))
    assert tables[1].best(1, 0.5, 3) == (1, pytest.approx(1.5 * 0.8))
    assert tables[3].best(1, 0.0, 3)[1] == pytest.approx(0.5)


def _rows(way: str, times: list[float], identical: bool = True) -> list[Row]:
    return [Row(way, 1, i, "mixed", 10, t, t / 2, 5, 0, identical) for i, t in enumerate(times)]


def test_a_ratio_is_of_passes_side_by_side_and_has_its_interval() -> None:
    """The second pass ran beside another load, which slowed both ways."""
    rows = _rows(SWITCHING, [1.0, 10.0, 1.0]) + _rows("k 3", [1.9, 20.0, 2.1])
    value, low, high = ratio(rows, SWITCHING, "k 3", "mixed")
    assert value == pytest.approx(2.0)
    assert 1.9 <= low < value < high <= 2.1
    assert ratio(rows, SWITCHING, SWITCHING, "mixed")[0] == 1


def test_no_time_is_shown_beside_other_tokens() -> None:
    shown = table(_rows(SWITCHING, [1.0, 1.0]) + _rows("k 3", [2.0, 2.0]))
    assert "| k 3 | 2.00 | 2.00 [2.00, 2.00] | 2.00 [2.00, 2.00] | yes |" in shown
    hidden = table(_rows(SWITCHING, [1.0, 1.0]) + _rows("k 3", [2.0, 2.0], identical=False))
    assert "| k 3 | - | - | - | no |" in hidden


def test_a_mixed_order_spreads_both_kinds() -> None:
    kinds = [Request((1,), max_new_tokens=n) for n in range(1, 5)], [Request((2,), max_new_tokens=n) for n in (1, 2)]
    assert [r.ids[0] for r in ordered(kinds, "grouped")] == [1, 1, 1, 1, 2, 2]
    assert [r.ids[0] for r in ordered(kinds, "mixed")] == [1, 2, 1, 1, 2, 1]
    assert sorted(map(str, ordered(kinds, "mixed"))) == sorted(map(str, ordered(kinds, "grouped")))


def test_the_committed_tables_are_those_of_the_committed_rows() -> None:
    """And no row of a committed result has other tokens than the target's."""
    page = (RESULTS.parents[1] / "docs/switching.md").read_text(encoding="utf-8")
    files = sorted(RESULTS.glob("mixed_load_*.json"))
    assert files
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        assert all(row["identical"] and row["source"] == "wall" for row in found["rows"])
        assert show(found) in page, f"python -m bench.mixed_load --show {file}"


def test_nothing_to_do_is_said() -> None:
    with pytest.raises(UserError, match="give --bundle, or --show"):
        mixed_load.main([])
