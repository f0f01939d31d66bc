"""The quality report: equal answers are said to be equal, and a planted difference is caught, placed and weighed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import pair, speedup, stale_draft, step_costs
from bench.quality import __main__ as quality
from bench.quality.__main__ import Question, Row, compare, load_prompts, server
from bench.quality.report import markdown, page, verdict
from bench.quality.target_logits import TargetLogits
from model.bundle.manifest import FUSED
from model.errors import UserError
from model.serving.request import Params, Request, Result
from tests.model.demo_bundle import PROMPTS, graphs, request, shape_of

STEP = 2


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of bundles that the model's tests share too."""
    folder = tmp_path_factory.getbasetemp().parent / "demo_bundles"
    folder.mkdir(exist_ok=True)
    return folder


class _Planted:
    """The graphs, but one fused step's last accepted id is another."""

    def __init__(self, inner) -> None:
        self.inner, self.steps = inner, 0

    def run(self, tag, bucket, inputs):
        outputs = self.inner.run(tag, bucket, inputs)
        if tag == FUSED:
            self.steps += 1
            if self.steps == STEP:
                accepted = np.array(outputs.accepted)
                last = int((accepted[0] >= 0).sum()) - 1
                accepted[0, last] = (accepted[0, last] + 1) % 2048
                return outputs._replace(accepted=accepted)
        return outputs


def _cases(g, temperature: float, count: int) -> list[Question]:
    return [
        Question(f"p{i}", "all", request(g, PROMPTS[i], Params(temperature, seed=i), count=24))
        for i in range(0, 2 * count, 2)
    ]


def _rows(g, runner, cases: list[Question]) -> list[Row]:
    return compare(server(runner, shape_of(g.bundle), None, lambda count: None), cases, TargetLogits(g.bundle))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_demo_pair_passes_and_a_planted_difference_is_caught(base: Path, temperature: float) -> None:
    g = graphs(base, k=3, max_len=128)
    clean = _rows(g, g, _cases(g, temperature, 3))
    assert [r.at for r in clean] == [None] * 3
    assert all(r.tokens and r.tokens_per_step > 1 for r in clean)
    cases = _cases(g, temperature, 1)
    (row,) = _rows(g, _Planted(g), cases)
    truth = server(g, shape_of(g.bundle), None, lambda count: None)(False, [cases[0].request])[0].ids
    assert row.at is not None
    assert row.alone[0] == truth[row.at] != row.speculative[0] == (truth[row.at] + 1) % 2048
    assert row.gap is not None
    assert row.gap.own_is_best
    assert row.gap.scores > 0
    assert (row.gap.logits == row.gap.scores) == (temperature == 0)


def test_the_eager_target_draws_what_the_graphs_draw(base: Path) -> None:
    g = graphs(base, k=3, max_len=128)
    logits = TargetLogits(g.bundle)
    for params in (Params(), Params(0.9, seed=7), Params(1.2, top_k=5, seed=8), Params(1.0, top_p=0.5, min_p=0.1)):
        made = request(g, PROMPTS[13], params, count=12)
        ids = server(g, shape_of(g.bundle), None, lambda count: None)(False, [made])[0].ids
        for at, own in enumerate(ids):
            gap = logits.gap((*made.ids, *ids[:at]), own, (own + 1) % 2048, params)
            assert gap is not None
            assert gap.own_is_best, (params, at)


def test_another_seed_is_not_what_the_graphs_drew(base: Path) -> None:
    g = graphs(base, k=3, max_len=128)
    made = request(g, PROMPTS[13], Params(1.2, seed=8), count=12)
    ids = server(g, shape_of(g.bundle), None, lambda count: None)(False, [made])[0].ids
    found = [
        TargetLogits(g.bundle).gap((*made.ids, *ids[:i]), own, 0, Params(1.2, seed=9)) for i, own in enumerate(ids)
    ]
    assert not all(gap is None or gap.own_is_best for gap in found)


def _served(alone: list[int], speculative: list[int]):
    case = Question("p", "open", Request((1, 2), Params()))
    return compare(lambda way, requests: [Result(speculative if way else alone)], [case], _NoLogits())[0]


class _NoLogits(TargetLogits):
    def __init__(self) -> None:
        self.available = False


@pytest.mark.parametrize(
    ("alone", "speculative", "at"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 9, 3], 1), ([1, 2, 3], [1, 2], 2), ([1], [1, 2], 1), ([4], [5], 0)],
    ids=["equal", "differs", "shorter", "longer", "first"],
)
def test_the_first_difference_is_placed(alone: list[int], speculative: list[int], at: int | None) -> None:
    row = _served(alone, speculative)
    assert row.at == at
    assert row.tokens == len(alone)


def test_the_report_says_what_was_found() -> None:
    good, bad = asdict(_served([1, 2], [1, 2])), asdict(_served([1, 2], [1, 7]))
    facts = {"Bundle": "k 3 <&>"}
    assert verdict([good]) == "All 1 answers (2 tokens) are token-identical with and without speculation."
    assert verdict([good, bad]).startswith("1 of 2 answers differ")
    for render in (markdown, page):
        passed, failed = render([good], facts), render([good, bad], facts)
        assert "First differences" not in passed
        assert "First differences" in failed
        assert "not available" in failed
        assert "1 of 1" in passed
        assert "1 of 2" in failed
    assert "k 3 &lt;&amp;&gt;" in page([good], facts)


def test_prompts_come_from_json_or_lines(tmp_path: Path) -> None:
    assert [p[2] for p in load_prompts(quality.PROMPTS)] == PROMPTS
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    assert load_prompts(tmp_path / "p.txt") == [("line 1", "all", "one"), ("line 3", "all", "two")]
    for name, content in (("bad.json", "{}"), ("worse.json", "[")):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match="holds no prompts"):
            load_prompts(tmp_path / name)
    with pytest.raises(UserError, match="holds no prompts"):
        load_prompts(tmp_path / "absent.txt")


def test_the_command_writes_its_report_and_fails_on_a_difference(base: Path, tmp_path: Path, monkeypatch) -> None:
    g, out = graphs(base, k=3, max_len=128), tmp_path / "report"
    options = [
        "--bundle",
        str(g.bundle.path),
        "--limit",
        "1",
        "--tokens",
        "12",
        "--temperatures",
        "0",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(quality, "Graphs", lambda bundle: g)
    quality.main(options)
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert [r["at"] for r in rows] == [None]
    assert "All 1 answers" in (out / "quality.html").read_text()
    monkeypatch.setattr(quality, "Graphs", lambda bundle: _Planted(g))
    with pytest.raises(SystemExit) as ended:
        quality.main(options)
    assert ended.value.code == 1
    assert "1 of 1 answers differ" in (out / "quality.md").read_text()


@pytest.mark.parametrize("command", [quality, step_costs, stale_draft, speedup])
def test_a_target_alone_is_not_compared_with_itself(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pair, "open_bundle", lambda folder: {"k": 0})
    with pytest.raises(UserError, match="give the bundle of a pair"):
        command.main(["--bundle", str(tmp_path), *(["--out", str(tmp_path)] if command is quality else [])])
