"""Accepted drafts by position: what is counted of outputs, and that the tuner reads the file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import demo
from bench.demo import Prompt
from bench.tune import acceptance, trace
from model.errors import UserError
from trnspec.llm import Output

ASKED = [Prompt("a", "structured", "x"), Prompt("b", "structured", "y"), Prompt("c", "open", "z")]
# accepted drafts by position and steps of each prompt
ACCEPTED = {"x": ((2, 1), 2), "y": ((1,), 2), "z": ((0, 0), 3)}


class Served:
    """In place of an LLM."""

    def __init__(self, folder: Path) -> None:
        self.bundle = SimpleNamespace(spec=SimpleNamespace(k=0 if folder.name == "alone" else 2, drafter="chain"))

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, texts: list[str], params: list[Any], max_new_tokens: int) -> list[Output]:
        assert [p.seed for p in params] == list(range(len(texts)))
        return [Output((1,) * max_new_tokens, "", "length", ACCEPTED[t][1], 0.0, (), ACCEPTED[t][0]) for t in texts]


def test_shares_are_of_all_steps_and_the_tuner_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trace, "LLM", Served)
    monkeypatch.setattr(demo, "prompts", lambda: ASKED)
    trace.main(["--bundle", str(tmp_path), "--out", str(tmp_path / "a.json")])
    read = acceptance.read(tmp_path / "a.json")
    assert [(known.workload, known.shares) for known in read[:2]] == [
        ("structured, T 0", (0.75, 0.25)), ("open, T 0", (0.0, 0.0)),
    ]  # fmt: skip
    assert [known.workload for known in read[2:]] == [
        f"{entropy}, T {t}" for t in ("0.6", "1") for entropy in ("structured", "open")
    ]
    assert "| chain | structured, T 0 | 1.75, 2.00 |" in capsys.readouterr().out
    with pytest.raises(UserError, match="give the bundle of a pair"):
        trace.main(["--bundle", str(tmp_path / "alone")])


def test_prompts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("one\n\ntwo\n")
    assert [(p.entropy, p.text) for p in demo.prompts_of(tmp_path / "mine.txt")] == [("mine", "one"), ("mine", "two")]
    (tmp_path / "mine.txt").write_bytes(b"\n")
    with pytest.raises(UserError, match="holds no prompt"):
        demo.prompts_of(tmp_path / "mine.txt")
    (tmp_path / "mine.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8"):
        demo.prompts_of(tmp_path / "mine.txt")
