"""The table of our server beside vLLM's: medians over prompts, each ratio of one prompt, texts that differ shown."""

from bench.side_by_side import WAYS, table


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
