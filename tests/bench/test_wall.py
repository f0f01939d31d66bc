"""Ways side by side: blocks in random order, ratios within a block, and no time beside a text that differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import provenance
from bench.demo import ENTROPIES, Prompt
from bench.wall import __main__ as wall
from bench.wall.harness import Rows, aggregate, measure, table
from bench.wall.ways import ALONE, ASSISTED, GREEDY, OURS, Answer, Way, Ways
from model.errors import UserError
from trnspec.engine.request import Request

MS = {ALONE: 8.0, OURS: 2.0, GREEDY: 11.0, ASSISTED: 5.0}
ASKED = [(Prompt(f"{entropy} {n}", entropy, f"text {n}"), t) for entropy in ENTROPIES for n in (1, 2) for t in (0, 0.6)]


def _way(name: str, served: list[str], ids: list[int]) -> Way:
    def way(request: Request) -> Answer:
        served.append(name)
        return Answer(ids, MS[name] * len(ids) / 1e3, 2, 2.0, MS[name] / 1e3)

    return way


def _measured(ids: dict[str, list[int]]) -> tuple[Rows, list[str]]:
    served: list[str] = []
    ways = {name: _way(name, served, ids.get(name, [1, 2, 3])) for name in MS}
    found = measure(Ways(ways, "", (ALONE, ASSISTED), frozenset((GREEDY, ASSISTED))), ASKED, tokens=3, rounds=2)
    return found, served[len(MS) :]


def test_every_way_serves_every_block_and_each_order_is_drawn_anew() -> None:
    runs, served = _measured({})
    blocks = [served[at : at + len(MS)] for at in range(0, len(served), len(MS))]
    assert len(blocks) == 2 * len(ASKED)
    assert all(set(block) == set(MS) for block in blocks)
    assert len({tuple(block) for block in blocks}) > 1
    assert len({run["block"] for run in runs}) == len(blocks)
    assert list(dict.fromkeys(r["way"] for r in aggregate(runs, (ALONE,)))) == list(MS), "rows are in the ways' order"


def test_a_text_that_differs_has_no_time() -> None:
    """An own noise is no difference where it draws, and is one where it is greedy."""
    runs, _ = _measured({OURS: [1, 2, 4], GREEDY: [7]})
    rows = {(r["temperature"], r["way"]): r for r in aggregate(runs, (ALONE,)) if r["entropy"] == "open"}
    assert (rows[0, OURS]["same"], rows[0, OURS]["compared"]) == (0, 4)
    for key in ((0, OURS), (0.6, OURS), (0, GREEDY)):
        assert not {"ms", "times", "itl_ms"} & rows[key].keys()
    assert rows[0.6, GREEDY]["compared"] == 0
    assert rows[0.6, GREEDY]["ms"][1] == pytest.approx(11)
    shown = table(list(rows.values()))
    assert f"| 0 | open | {OURS} | - | 2.00 | - | 0 of 4 |" in shown
    assert f"| 0.6 | open | {GREEDY} | 11.00 | 2.00 | 0.73 | own noise |" in shown


def _runs() -> Rows:
    """The second half of the run is beside other load, which slows every way of a block, and no ratio."""
    return [
        {"block": (f"p{n}", 0.0, 0), "entropy": entropy, "temperature": 0.0, "way": way, "tokens": 5, "steps": 4,
         "tokens_per_step": 4.0, "ms": ms * (1 + n), "first_ms": 3.0, "itl_ms": ms * (1 + n), "same": True}
        for entropy in ENTROPIES for n in range(3) for way, ms in MS.items()
    ]  # fmt: skip


def test_ratios_are_of_runs_side_by_side() -> None:
    rows = {r["way"]: r for r in aggregate(_runs(), (ALONE, ASSISTED)) if r["entropy"] == "open"}
    assert rows[OURS]["times"] == {ALONE: [4.0, 4.0, 4.0], ASSISTED: [2.5, 2.5, 2.5]}
    assert (rows[OURS]["times_itl"][1], rows[OURS]["times_first"][1]) == (4.0, 1.0)
    # a ratio of medians over unequal loads would be another number
    uneven = [r for r in _runs() if r["way"] == ALONE or r["block"][0] != "p0"]
    ours = next(r for r in aggregate(uneven, (ALONE,)) if r["way"] == OURS)
    alone = next(r for r in aggregate(uneven, (ALONE,)) if r["way"] == ALONE)
    assert ours["times"][ALONE][1] == 4.0 != alone["ms"][1] / ours["ms"][1]


def _result(tmp_path: Path) -> Path:
    about = {"source": "wall", "commit": "abc", "machine": "made", "date": "today", "settings": "k 7"}
    provenance.write_result(tmp_path / "r.json", about | {"rows": aggregate(_runs(), (ALONE, ASSISTED))})
    return tmp_path / "r.json"


def test_the_readme_s_table_is_replaced_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"a\n{wall.BEGIN}\nold\n{wall.END}\nb\n")
    monkeypatch.setattr(wall, "README", readme)
    wall.main(["--show", str(_result(tmp_path)), "--readme"])
    text = readme.read_text()
    assert text.startswith("a\n")
    assert text.endswith(f"{wall.END}\nb\n")
    assert "old" not in text
    assert "source wall, commit abc, made, today; k 7." in text
    readme.write_text("no marks")
    with pytest.raises(UserError, match="lacks the marks"):
        wall.main(["--show", str(_result(tmp_path)), "--readme"])


def test_a_difference_of_ours_is_the_exit_status(tmp_path: Path) -> None:
    file = _result(tmp_path)
    for way in (GREEDY, OURS):
        wall.main(["--show", str(file)])
        result = json.loads(file.read_text())
        next(r for r in result["rows"] if r["way"] == way)["same"] = 0
        file.write_text(json.dumps(result))
    with pytest.raises(SystemExit, match="1"):
        wall.main(["--show", str(file)])


def test_results_are_json_by_line_and_strict(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"a": 1}, {"a": 2}]
    provenance.write_result(tmp_path / "x.json", provenance.header("wall") | {"rows": rows})
    assert provenance.read_result(tmp_path / "x.json", "rows")["rows"] == rows
    assert len((tmp_path / "x.json").read_text().splitlines()) > len(rows)
    (tmp_path / "list.json").write_text("[1]")
    for name in ("absent.json", "list.json", "x.json"):
        with pytest.raises(UserError, match="give a file that --out wrote"):
            provenance.read_result(tmp_path / name, "other")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--every", "0"], "argument --every: '0' was given; give a whole number of at least 1"),
        (["--tokens", "x"], "argument --tokens: 'x' was given"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--ks", "-1"], "argument --ks: '-1' was given"),
    ],
)
def test_wrong_options_are_one_sentence(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        wall.main(arguments)
    assert said in capsys.readouterr().err


def test_what_no_build_takes_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wall, "run", None)
    for k, why in ((99, "1 to 31 tokens"), (17, "at most 16")):
        with pytest.raises(UserError, match=why):
            wall.main(["--ways", "drafters", "--ks", str(k), "--drafters", "parallel"])


def test_servers_need_their_command_and_readme_a_pair(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name it with --vllm"):
        wall.main(["--ways", "vllm"])
    with pytest.raises(UserError, match="nothing"):
        wall.main(["--bundle", str(tmp_path / "nothing")])
