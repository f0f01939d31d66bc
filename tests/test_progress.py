"""Progress: a few lines if stderr is a file, none for a quick task."""

from __future__ import annotations

import time

import pytest

from model import progress as module
from model.progress import each, progress


def test_a_long_task_prints_its_progress_and_a_short_one_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_S", 0.05)
    with progress("copying", 4_000_000_000, "bytes") as task:
        time.sleep(0.12)
        task.advance(1_500_000_000)
    assert "copying: 1.5 of 4 GB, 0 s\n" in capsys.readouterr().err
    for _ in each(range(3), "prompts"):
        time.sleep(0.06)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("prompts: 1 of 3, ")
    assert len(lines) <= 3, "the interval grows"
    monkeypatch.setattr(module, "FIRST_S", 2.0)
    with progress("quick"):
        pass
    assert capsys.readouterr().err == ""


def test_an_error_ends_the_progress() -> None:
    with pytest.raises(ValueError, match="of the caller"), progress("failing"):
        raise ValueError("of the caller")
