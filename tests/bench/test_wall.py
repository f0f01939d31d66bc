"""Ways side by side: blocks in random order, ratios within a block, and no time where a text differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import provenance, wall
from bench.demo import ENTROPIES, Prompt
from bench.wall import ALONE, ASSISTED, GREEDY, OURS, Answer, Rows, Way, aggregate, measure, table
from model.errors import UserError

MS = {ALONE: 8.0, OURS: 2.0, GREEDY: 11.0, ASSISTED: 5.0}
ASKED = [(Prompt(f"{entropy} {n}", entropy, ""), [n]) for entropy in ENTROPIES for n in (1, 2, 3)]


def _measured(others: dict[str, list[int]]) -> tuple[Rows, list[str]]:
    """The runs where these ways answer otherwise, and the order of calls; the machine is slower for larger ids."""
    served: list[str] = []

    def way(name: str) -> Way:
        def answer(ids: list[int], tokens: int) -> Answer:
            served.append(name)
            new = others.get(name, [1, 2, 3])
            return Answer(new, MS[name] * ids[0] * len(new) / 1e3, 2)

        return answer

    runs = measure({name: way(name) for name in MS}, ASKED, tokens=3, rounds=2)
    return runs, served[len(MS) :]


def test_every_way_serves_every_block_and_each_order_is_drawn_anew() -> None:
    runs, served = _measured({})
    blocks = [served[at : at + len(MS)] for at in range(0, len(served), len(MS))]
    assert len(blocks) == 2 * len(ASKED)
    assert all(set(block) == set(MS) for block in blocks)
    assert len({tuple(block) for block in blocks}) > 1
    assert [r["way"] for r in aggregate(runs)] == [*MS, *MS], "rows are in the ways' order"


def test_ratios_are_of_runs_side_by_side() -> None:
    runs, _ = _measured({})
    rows = {r["way"]: r for r in aggregate(runs) if r["entropy"] == "open"}
    assert rows[OURS]["times"] == {ALONE: 4.0, ASSISTED: 2.5}
    # a ratio of medians over unequal loads would be another number
    uneven = [r for r in runs if r["way"] != OURS or r["block"][0] != "open 1"]
    alone, ours = (next(r for r in aggregate(uneven)[4:] if r["way"] == way) for way in (ALONE, OURS))
    assert ours["times"][ALONE] == 4.0 != alone["ms"] / ours["ms"]


def test_a_text_that_differs_has_no_time() -> None:
    runs, _ = _measured({OURS: [1, 2, 4]})
    rows = {r["way"]: r for r in aggregate(runs)}
    assert (rows[OURS]["same"], rows[OURS]["compared"]) == (0, 6)
    assert not {"ms", "times"} & rows[OURS].keys()
    assert f"| open | {OURS} | - | 1.00 | - | - | 0 of 6 |" in table(list(rows.values()))


def _result(folder: Path, others: dict[str, list[int]]) -> str:
    about = {"source": "wall", "commit": "abc", "machine": "made", "date": "today", "settings": "k 7"}
    provenance.write_result(folder / "r.json", about | {"rows": aggregate(_measured(others)[0])})
    return str(folder / "r.json")


def test_the_readme_s_table_is_replaced_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"a\n{wall.BEGIN}\nold\n{wall.END}\nb\n")
    monkeypatch.setattr(wall, "README", readme)
    wall.main(["--show", _result(tmp_path, {}), "--readme"])
    text = readme.read_text()
    assert text.startswith("a\n")
    assert text.endswith(f"{wall.END}\nb\n")
    assert "old" not in text
    assert "source wall, commit abc, made, today; k 7." in text
    readme.write_text("no marks")
    with pytest.raises(UserError, match="lacks the marks"):
        wall.main(["--show", _result(tmp_path, {}), "--readme"])


def test_our_different_ids_are_an_error_and_another_rounding_s_are_not(tmp_path: Path) -> None:
    wall.main(["--show", _result(tmp_path, {GREEDY: [7]})])
    with pytest.raises(SystemExit, match="1"):
        wall.main(["--show", _result(tmp_path, {OURS: [7]})])


def test_results_are_json_by_line_and_strict(tmp_path: Path) -> None:
    rows = [{"a": 1}, {"a": 2}]
    provenance.write_result(tmp_path / "x.json", provenance.header("wall") | {"rows": rows})
    assert provenance.read_result(tmp_path / "x.json", "rows")["rows"] == rows
    assert len((tmp_path / "x.json").read_text().splitlines()) > len(rows)
    (tmp_path / "list.json").write_text(json.dumps([1]))
    for name in ("absent.json", "list.json", "x.json"):
        with pytest.raises(UserError, match="give a file that --out wrote"):
            provenance.read_result(tmp_path / name, "other")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--every", "0"], "argument --every: '0' was given; give a number from 1"),
        (["--tokens", "x"], "argument --tokens: 'x' was given"),
        (["--show", "/dev/null"], "is not a regular file"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_wrong_options_are_refused_at_the_start(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        wall.main(arguments)
    assert said in capsys.readouterr().err


def test_no_bundle_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing"):
        wall.main(["--bundle", str(tmp_path / "nothing")])
