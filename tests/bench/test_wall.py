"""Ways side by side: blocks in random order, ratios within a block, and no time where a text differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import wall
from bench.demo import ENTROPIES, Prompt
from bench.provenance import write_result
from bench.wall import ALONE, ASSISTED, GREEDY, OURS, Answer, Rows, Way, aggregate, measure

MS = {ALONE: 8.0, OURS: 2.0, GREEDY: 11.0, ASSISTED: 5.0}
PROMPTS = [(Prompt(f"{entropy} {n}", entropy, ""), [n]) for entropy in ENTROPIES for n in (1, 2, 3)]


def _measured(others: dict[str, list[int]]) -> tuple[Rows, list[str]]:
    """The runs where these ways answer otherwise, and the order of calls; the machine is slower for larger ids."""
    served: list[str] = []

    def way(name: str) -> Way:
        def answer(ids: list[int], tokens: int) -> Answer:
            served.append(name)
            new = others.get(name, [1, 2, 3])
            return Answer(new, MS[name] * ids[0] * len(new) / 1e3, 2)

        return answer

    runs = measure({name: way(name) for name in MS}, PROMPTS, tokens=3, rounds=2)
    return runs, served[len(MS) :]


def test_every_way_serves_every_block_in_a_new_order_and_ratios_are_of_runs_side_by_side() -> None:
    runs, served = _measured({})
    blocks = [served[at : at + len(MS)] for at in range(0, len(served), len(MS))]
    assert len(blocks) == 2 * len(PROMPTS)
    assert all(set(block) == set(MS) for block in blocks)
    assert len({tuple(block) for block in blocks}) > 1
    assert [r["way"] for r in aggregate(runs)] == [*MS, *MS]
    # a ratio of medians over unequal loads would be another number
    uneven = [r for r in runs if r["way"] != OURS or r["block"][0] != "open 1"]
    rows = {r["way"]: r for r in aggregate(uneven)[4:]}
    assert rows[OURS]["times"] == {ALONE: 4.0, ASSISTED: 2.5}
    assert rows[ALONE]["ms"] / rows[OURS]["ms"] != 4.0


def _result(folder: Path, others: dict[str, list[int]]) -> str:
    about = {"source": "wall", "commit": "abc", "machine": "made", "date": "today", "settings": "k 7"}
    write_result(folder / "r.json", about | {"rows": aggregate(_measured(others)[0])})
    return str(folder / "r.json")


def test_a_result_is_shown_and_other_ids_with_drafts_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wall.main(["--show", _result(tmp_path, {GREEDY: [7]})])
    said = capsys.readouterr().out
    assert said.startswith("source wall, commit abc, made, today; k 7.\n\n|")
    assert f"| open | {GREEDY} | - | 0.00 | - | - | 0 of 6 |" in said
    with pytest.raises(SystemExit, match="1"):
        wall.main(["--show", _result(tmp_path, {OURS: [7]})])
