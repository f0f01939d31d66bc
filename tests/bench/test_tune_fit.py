"""The published H100 series from one rate and one ratio, and acceptance read from every kind of file."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bench.tune import acceptance, published
from bench.tune.acceptance import at_rate, from_steps, tokens
from bench.tune.fit import evaluate, fit
from model.errors import UserError

LENGTHS, SPEEDUPS = published.MT_BENCH_LENGTHS, published.MT_BENCH_SPEEDUPS


def test_the_published_series_within_three_percent() -> None:
    """Both series for k = 1..6 from two numbers; the ratio agrees with the pass times published apart from them."""
    found = fit(LENGTHS, SPEEDUPS)
    assert found.worst < 0.03
    assert max(map(abs, found.length_errors)) < 0.03
    assert max(map(abs, found.speedup_errors)) < 0.03
    assert found.cost_ratio == pytest.approx(published.H100_DRAFT_MS / published.H100_TARGET_MS, rel=0.15)


def test_the_fit_is_the_best_of_its_neighbours() -> None:
    found = fit(LENGTHS, SPEEDUPS)
    for a in (-0.004, 0.0, 0.004):
        for c in (-0.004, 0.0, 0.004):
            assert evaluate(found.rate + a, found.cost_ratio + c, LENGTHS, SPEEDUPS).worst >= found.worst - 1e-4


@pytest.mark.parametrize("broken", [SPEEDUPS[::-1], (1.0,) * 6, tuple(2 * s for s in SPEEDUPS)], ids=str)
def test_a_series_that_is_none_cannot_be_fitted(broken: tuple[float, ...]) -> None:
    """Negative control: two numbers don't fit anything whatsoever."""
    assert fit(LENGTHS, broken).worst > 0.05


def test_a_made_series_gives_its_numbers_back() -> None:
    made = evaluate(0.83, 0.07, (1.0,) * 6, (1.0,) * 6)
    found = fit(made.lengths, made.speedups)
    assert (found.rate, found.cost_ratio) == pytest.approx((0.83, 0.07), abs=1e-3)


def test_published_lengths_and_shares_agree() -> None:
    """Two tables of the same blog: sums of the shares by position against tokens a step at k = 6."""
    for lengths, shares in (
        (LENGTHS, published.MT_BENCH_SHARES),
        (published.INSTRUCT_CODER_LENGTHS, published.INSTRUCT_CODER_SHARES),
    ):
        assert 1 + sum(shares) == pytest.approx(lengths[-1], abs=0.03)


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


def test_every_kind_of_file(tmp_path: Path) -> None:
    steps = [{"drafted": 2, "accepted": a, "prompt": 0, "draft": "demo/draft", "more": 1} for a in (0, 1, 2, 2)]
    lines = _write(tmp_path, "steps.jsonl", "\n".join(map(json.dumps, steps)) + "\n")
    (recorded,) = acceptance.read(lines)
    assert (recorded.name, recorded.draft, recorded.steps) == ("steps", "draft", 4)
    assert recorded.shares == (0.75, 0.5)

    rows = [{"case": "a", "acceptance": {"unconditional": [0.5, 0.25], "steps": 9}}, {"case": "b", "acceptance": None}]
    summary = {"run": {"settings": {"draft": "Qwen/Qwen3-1.7B"}}, "rows": rows}
    (served,) = acceptance.read(_write(tmp_path, "summary.json", json.dumps(summary)))
    assert (served.name, served.draft, served.shares, served.steps) == ("a", "1.7B", (0.5, 0.25), 9)

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
        ('{"rows": [{"case": "a"}]}', "no row with an acceptance"),
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
