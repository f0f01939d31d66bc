"""Acceptance traces: what is read from each kind of file, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bench.tune import acceptance
from bench.tune.acceptance import at_rate, from_steps, tokens
from model.errors import UserError


def test_steps_that_draft_less_do_not_bias() -> None:
    """Steps cut short at random: their rate is that of the full ones, which a plain share would miss."""
    rng, rate = random.Random(0), 0.8
    steps = []
    for _ in range(20_000):
        drafted = rng.choice((2, 7))
        run = next((i for i in range(drafted) if rng.random() > rate), drafted)
        steps.append((drafted, run))
    found = from_steps("w", "", steps, "test")
    assert found.shares == pytest.approx([rate**i for i in range(1, 8)], abs=0.02)
    plain = [sum(a >= i for _, a in steps) / len(steps) for i in range(1, 8)]
    assert abs(plain[6] - rate**7) > 0.05


@pytest.mark.parametrize("k", [0, 1, 4, 15])
def test_tokens_of_one_rate_and_beyond_the_record(k: int) -> None:
    assert at_rate(0.7, 15).tokens(k) == pytest.approx(tokens(0.7, k))
    # extrapolated with the record's rate, which is the true one here
    assert at_rate(0.7, 3).tokens(k) == pytest.approx(tokens(0.7, k))


def _write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_both_kinds_of_file(tmp_path: Path) -> None:
    steps = [{"drafted": 2, "accepted": a, "prompt": 0, "draft": "demo/draft", "more": 1} for a in (0, 1, 2, 2)]
    lines = _write(tmp_path, "steps.jsonl", "\n".join(map(json.dumps, steps)) + "\n")
    (recorded,) = acceptance.read(lines)
    assert (recorded.name, recorded.draft, recorded.steps) == ("steps", "draft", 4)
    assert recorded.shares == (0.75, 0.5)

    tables = {"tables": [{"name": "t", "draft": "1.7B", "lengths": [1.5, 1.7]}, {"name": "u", "unconditional": [0.4]}]}
    first, second = acceptance.read(_write(tmp_path, "tables.json", json.dumps(tables)))
    assert first.shares == pytest.approx((0.5, 0.2))
    assert (second.draft, second.shares) == ("", (0.4,))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("nonsense", "is not JSON"),
        ('{"drafted": 2}', "expected JSON lines"),
        ('{"drafted": 2, "accepted": 3}', "3 of 2 drafts accepted"),
        ('{"drafted": 0, "accepted": 0}', "no step with drafts"),
        ('{"tables": [{"name": "x"}]}', "neither lengths nor unconditional"),
        ('{"tables": [{"unconditional": [0.5, 0.8]}]}', "can't exceed the one before"),
        ('{"rows": [{"case": "a"}]}', "expected JSON lines"),
    ],
)
def test_refusals(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        acceptance.read(_write(tmp_path, "trace.json", text))


def test_a_missing_file_and_a_rate_outside(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        acceptance.read(tmp_path / "none.json")
    with pytest.raises(UserError, match="from 0 to below 1"):
        at_rate(1.0, 3)
