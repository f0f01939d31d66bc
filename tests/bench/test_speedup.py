"""The README's numbers are those of the committed rows, and no gain stands beside tokens that differ."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import readme
from bench.speedup import ALONE, ASSISTED, GREEDY, OURS, table
from model.errors import UserError

MS = {OURS: 2.0, ALONE: 8.0, GREEDY: 11.0, ASSISTED: 5.0}


def _rows(identical: bool = True) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{entropy} {number}", "entropy": entropy, "way": way, "source": "wall",
         # a machine that slows down over the run slows every way of a prompt
         "ms_per_token": ms * (1 + number), "tokens_per_step": 4.0 if way == OURS else None,
         "identical": identical or way != OURS}
        for entropy in ("structured", "open") for number in range(3) for way, ms in MS.items()
    ]  # fmt: skip


def _result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"source": "wall", "commit": "abc", "machine": "made", "date": "today", "settings": "k 7", "rows": rows}


def test_gains_are_medians_over_prompts() -> None:
    assert readme.gain(_rows(), "open", ALONE) == pytest.approx(4.0)
    shown = readme.section(_result(_rows()))
    assert "4.0 (structured) and 4.0 (open) times as fast as our target alone" in shown
    assert "2.5 (structured) and 2.5 (open) times as fast as assisted generation" in shown
    assert "source wall, commit abc, made, today; k 7." in shown


def test_other_tokens_show_no_time_and_no_gain() -> None:
    rows = _rows(identical=False)
    assert "| open | ours, speculation | - | 4.00 | 0 of 3 |" in table(rows)
    assert "times as fast" not in readme.section(_result(rows))


def test_the_section_is_replaced_and_nothing_else() -> None:
    before = f"a\n{readme.BEGIN}\nold\n{readme.END}\nb\n"
    after = readme.written(before, _result(_rows()))
    assert after.startswith("a\n")
    assert after.endswith(f"{readme.END}\nb\n")
    assert "old" not in after
    assert readme.written(after, _result(_rows())) == after
    with pytest.raises(UserError, match="lacks the marks"):
        readme.written("no marks", _result(_rows()))


def test_the_readme_shows_the_committed_rows() -> None:
    text = readme.README.read_text(encoding="utf-8")
    committed = json.loads(readme.RESULT.read_text(encoding="utf-8"))
    assert readme.written(text, committed) == text
    assert readme.written(text, _result(_rows())) != text
