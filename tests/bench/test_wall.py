"""Backends in blocks: random order, ratios within a block, and no time for a different output."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from bench import wall
from bench.demo import ENTROPIES, Prompt
from bench.wall import ASSISTED, BASELINE, GREEDY, OURS, Answer, Backend, Rows, aggregate, measure

MS = {BASELINE: 8.0, OURS: 2.0, GREEDY: 11.0, ASSISTED: 5.0}
PROMPTS = [(Prompt(f"{entropy} {n}", entropy, ""), [n]) for entropy in ENTROPIES for n in (1, 2, 3)]


def _measured(others: dict[str, list[int]]) -> tuple[Rows, list[str]]:
    """Runs in which these backends return other ids, and the order of calls; larger ids take longer."""
    served: list[str] = []

    def way(name: str) -> Backend:
        def answer(ids: list[int], tokens: int) -> Answer:
            served.append(name)
            new = others.get(name, [1, 2, 3])
            return Answer(new, MS[name] * ids[0] * len(new) / 1e3, 2)

        return answer

    runs = measure({name: way(name) for name in MS}, PROMPTS, tokens=3, rounds=2)
    return runs, served[len(MS) :]


def test_every_backend_serves_every_block_in_random_order_and_ratios_are_within_a_block() -> None:
    runs, served = _measured({})
    blocks = [served[at : at + len(MS)] for at in range(0, len(served), len(MS))]
    assert len(blocks) == 2 * len(PROMPTS)
    assert all(set(block) == set(MS) for block in blocks)
    assert len({tuple(block) for block in blocks}) > 1
    assert [r["way"] for r in aggregate(runs)] == [*MS, *MS]
    # a ratio of medians over unequal loads would be another number
    uneven = [r for r in runs if r["way"] != OURS or r["block"][0] != "open 1"]
    rows = {r["way"]: r for r in aggregate(uneven)[4:]}
    assert rows[OURS]["times"] == {BASELINE: 4.0, ASSISTED: 2.5}
    assert rows[BASELINE]["ms"] / rows[OURS]["ms"] != 4.0


def test_a_speculative_output_with_other_ids_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"source": "wall", "commit": "abc", "machine": "made", "date": "today", "settings": "k 7"}
    for name in (GREEDY, OURS):
        rows = aggregate(_measured({name: [7]})[0])
        monkeypatch.setattr(wall, "run", lambda *_, rows=rows: about | {"rows": rows})
        with pytest.raises(SystemExit, match="1") if name == OURS else nullcontext():
            wall.main([])
        out = capsys.readouterr().out
        assert out.startswith("source wall, commit abc, made, today; k 7.\n\n|")
        assert f"| open | {name} | - | 0.00 | - | - | 0 of 6 |" in out
