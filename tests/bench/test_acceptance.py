"""Acceptance by position and by k: shares and tokens a step of answers, and what must be equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import acceptance as bench
from bench.demo import Prompt
from bench.provenance import write_result
from bench.tune import acceptance as traces
from trnspec.llm import Output

ASKED = [Prompt("a", "structured", ""), Prompt("b", "open", "")]


def _output(ids: tuple[int, ...], steps: int, *kept: int) -> Output:
    return Output(ids, "", "length", steps, 0.0, drafts_kept=kept)


# by k, for each of the prompts
OUTPUTS = {
    1: [_output((1, 2, 3, 4, 5), 2, 2), _output((1, 2, 3), 2)],
    2: [_output((1, 2, 3, 4, 5), 2, 1, 1), _output((1, 2, 3), 2, 0, 0)],
}


def test_shares_are_of_the_steps_of_the_largest_k_and_tokens_of_each(tmp_path: Path) -> None:
    structured, opened = bench.tables(ASKED, 0.6, OUTPUTS)
    assert (structured["temperature"], structured["steps"], structured["unconditional"]) == (0.6, 2, [0.5, 0.5])
    assert structured["tokens_per_step"] == {"1": 2.0, "2": 2.0}
    assert (opened["unconditional"], opened["tokens_per_step"]) == ([0.0, 0.0], {"1": 1.0, "2": 1.0})
    # the tuner reads the file
    write_result(tmp_path / "a.json", {"source": "wall", "tables": [{"draft": "chain"} | structured]})
    (read,) = traces.read(tmp_path / "a.json")
    assert (read.draft, read.shares, read.steps) == ("chain", (0.5, 0.5), 2)


@pytest.mark.parametrize("different", [False, True])
def test_answers_are_compared_over_drafters_and_k(different: bool) -> None:
    rows = [{"draft": d} | row for d in ("chain", "eagle3") for row in bench.tables(ASKED, 0.0, OUTPUTS)]
    if different:
        rows[3]["ids"][1] = [(1, 2, 4)]
    assert bench.differences(rows) == different
    assert "ids" not in rows[0]
    assert json.dumps(rows)
