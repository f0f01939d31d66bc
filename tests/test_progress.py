"""Progress: a line for long work where stderr is no terminal, and nothing for what is quick."""

from __future__ import annotations

import time

import pytest

from model import progress as module
from model.progress import each, progress


def test_a_long_task_is_one_line_and_a_short_one_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LINE_AFTER_S", 0.05)
    with progress("compiling", 7, "graphs") as task:
        task.advance()
        task.at("compiling more")
        task.total = 9
        time.sleep(0.3)
        assert task.total == 9
    assert capsys.readouterr().err == "compiling: 7 graphs\n"
    monkeypatch.setattr(module, "_LINE_AFTER_S", 30)
    assert list(each(range(3), "prompts")) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_an_error_passes_and_ends_the_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LINE_AFTER_S", 0.1)
    with pytest.raises(ValueError, match="of the caller"), progress("failing"):
        raise ValueError("of the caller")
    time.sleep(0.2)
    assert capsys.readouterr().err == ""
