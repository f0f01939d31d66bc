"""The wall table of drafters: medians, the best k, the answer about the parallel one, nothing beside other texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import drafters_wall as wall
from model.errors import UserError

MS = {
    "target alone": (8.0, 1.0), "chain, k 3": (4.0, 3.0), "chain, k 7": (6.0, 4.0), "parallel, k 7": (2.0, 3.5),
    "transformers alone": (11.0, 1.0), "transformers assisted": (5.0, 3.0), "transformers look-up": (9.0, 1.2),
}  # fmt: skip


def _rows(different: str = "", **ms: float) -> list[dict[str, Any]]:
    return [
        {"name": f"{entropy} {number}", "entropy": entropy, "temperature": t, "way": way, "source": "wall",
         # a machine that slows down over the run slows every way of a prompt
         "ms_per_token": ms.get(way.split(",")[0], one) * (1 + number), "tokens_per_step": steps,
         "identical": None if t and way.startswith("transformers") else way != different}
        for t in (0.0, 0.6) for entropy in wall.ENTROPIES for number in range(3) for way, (one, steps) in MS.items()
    ]  # fmt: skip


def test_each_drafter_is_taken_at_its_best_k() -> None:
    ways = wall.chosen(_rows(), 0.6, "open")
    assert wall.best(ways, "chain") == "chain, k 3"
    assert wall.best(ways, "medusa") is None
    assert wall.gain(ways["parallel, k 7"], ways["chain, k 3"]) == pytest.approx(2.0)


@pytest.mark.parametrize(("parallel", "said"), [(2.0, "2.00 times the chain, 1.3 is reached"), (4.0, "not reached")])
def test_the_answer_says_whether_parallel_is_enough_and_why(parallel: float, said: str) -> None:
    answer = wall.answer(_rows(parallel=parallel))
    assert answer.count(said) == 2
    assert "chain, k 3: 3.00 tokens a step of 24.00 ms" in answer


def test_no_time_stands_beside_a_text_that_differs() -> None:
    rows = wall.table(_rows("parallel, k 7"))
    assert "| 0 | open | parallel, k 7 | - | 3.50 | - | 0 of 3 |" in rows
    assert "| 0 | open | chain, k 3 | 8.00 | 3.00 | 2.00 | 3 of 3 |" in rows
    assert "| 0.6 | open | transformers alone | 22.00 | 1.00 | 0.73 | own noise |" in rows


def test_the_picture_has_a_bar_a_way() -> None:
    shown = wall.picture(_rows())
    assert shown.count("k 3, 3.0") == 4
    assert "k 7, 4.0" not in shown


def test_a_k_that_no_build_takes_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wall, "build", None)
    for k, why in ((99, "1 to 31 tokens"), (17, "at most 16")):
        with pytest.raises(UserError, match=why):
            wall.main(["--ks", str(k), "--drafters", "parallel"])


def test_rows_of_a_run_are_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_by = {"source": "wall", "commit": "abc", "machine": "made", "date": "today", "tokens": 4}
    wall.write_result(tmp_path / "rows.json", made_by | {"rows": _rows("chain, k 7")})
    with pytest.raises(SystemExit):
        wall.main(["--report", str(tmp_path / "rows.json")])
    assert "source wall, commit abc" in capsys.readouterr().out
