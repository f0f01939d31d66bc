"""The table of our server beside vLLM's: medians over prompts, each ratio of one prompt, texts that differ shown."""

import argparse

import pytest

from bench.side_by_side import WAYS, _rows, table


def rows(batch: int, ms: dict[str, list[float]], same: dict[str, bool]) -> list[dict[str, object]]:
    return [
        {"batch": batch, "entropy": "open", "way": way.name, "prompt": str(n), "ms": value, "same": same[way.name]}
        for n in range(3)
        for way in WAYS
        for value in [ms[way.name][n]]
    ]


def test_a_ratio_is_that_of_the_same_prompt_and_only_ours_has_one() -> None:
    ours, theirs, drafted, their_drafts = (way.name for way in WAYS)
    ms = {ours: [4.0, 8.0, 2.0], theirs: [8.0, 8.0, 1.0], drafted: [1.0, 1.0, 1.0], their_drafts: [3.0, 2.0, 2.0]}
    text = table(rows(1, ms, dict.fromkeys(ms, True) | {their_drafts: False}))
    lines = {line.split(" | ")[2]: line.strip("| ").split(" | ")[3:] for line in text.splitlines()[2:]}
    assert lines[ours] == ["4.00", "1.00", "3 of 3"]
    assert lines[drafted] == ["1.00", "2.00", "3 of 3"]
    assert lines[theirs] == ["8.00", "", "3 of 3"]
    assert lines[their_drafts] == ["2.00", "", "0 of 3"]


def test_each_try_asks_every_way_and_the_best_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(address: str, prompt: str, tokens: int) -> tuple[list[int], float]:
        asked.append(address)
        return [int(address == "vLLM, 7 drafts")] * tokens, 0.0

    monkeypatch.setattr("bench.side_by_side._ask", ask)
    options = argparse.Namespace(tries=3, tokens=5)
    prompt = {"name": "p", "text": "a", "entropy": "open"}
    measured = _rows({way: way.name for way in WAYS}, 2, prompt, options)
    # two requests at once, each try all ways before the next try
    tries = [set(asked[i : i + 8]) for i in range(0, len(asked), 8)]
    assert tries == [{way.name for way in WAYS}] * 3
    assert [row["way"] for row in measured] == [way.name for way in WAYS]
    assert all(row["ms"] == min(row["all_ms"]) and len(row["all_ms"]) == 3 for row in measured)
    assert [row["same"] for row in measured] == [True, True, True, False]
