"""Accepted drafts by position: what is counted of outputs, and that the tuner reads the file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from bench import demo
from bench.demo import Prompt
from bench.tune import acceptance, trace
from model.errors import UserError
from trnspec.llm import Output

PROMPTS = [Prompt("a", "structured", "x"), Prompt("b", "structured", "y"), Prompt("c", "open", "z")]
# accepted drafts by position and steps of each prompt
ACCEPTED = {"x": ((2, 1), 2), "y": ((1,), 2), "z": ((0, 0), 3)}


def _generate(texts: list[str], params: list[Any], max_new_tokens: int) -> list[Output]:
    assert [p.seed for p in params] == list(range(len(texts)))
    return [Output([1] * max_new_tokens, steps=ACCEPTED[t][1], accepted=[*ACCEPTED[t][0]]) for t in texts]


def test_shares_are_of_all_steps_and_the_tuner_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = mock.MagicMock()
    monkeypatch.setattr(trace, "LLM", llm)
    monkeypatch.setattr(demo, "prompts", lambda: PROMPTS)
    opened = llm.return_value.__enter__.return_value
    opened.bundle.spec, opened.generate = SimpleNamespace(k=2, drafter="chain"), _generate
    flags = ["--bundle", "pair", "--out", str(tmp_path / "a.json")]
    trace.main(flags)
    read = {known.workload: known.shares for known in acceptance.read(tmp_path / "a.json")}
    of_each = {"structured": (0.75, 0.25), "open": (0.0, 0.0)}
    assert read == {f"{entropy}, T {t}": of_each[entropy] for t in ("0", "0.6", "1") for entropy in of_each}
    opened.bundle.spec.k = 0
    with pytest.raises(UserError, match="give the bundle of a pair"):
        trace.main(flags)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    (file := tmp_path / "mine.txt").write_text("one\n\ntwo\n")
    assert [(p.entropy, p.text) for p in demo.prompts_of(file)] == [("mine", "one"), ("mine", "two")]
    file.write_bytes(b"\n")
    with pytest.raises(UserError, match="holds no prompt"):
        demo.prompts_of(file)
