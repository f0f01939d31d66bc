"""Percentiles and intervals against known distributions; the prompts; CloudWatch against moto."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws
from moto.cloudwatch.models import cloudwatch_backends
from moto.core import DEFAULT_ACCOUNT_ID

from bench.serving.client import Prompt
from bench.serving.cloudwatch import data, dimension, publish, requests
from bench.serving.figures import estimate, ratio, summary_row
from bench.serving.load import Block, BlockResult
from bench.serving.plots import ticks
from bench.serving.prompts import prompt_sets, read_prompts
from bench.serving.run import Run
from bench.serving.sample import Sample
from model.errors import UserError


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    rng, covered = np.random.default_rng(0), 0
    for seed in range(120):
        found = estimate(rng.exponential(size=60).tolist(), 50, seed)
        assert found.low <= found.value <= found.high
        covered += found.low <= np.log(2) <= found.high
    assert 0.88 <= covered / 120 <= 0.99


def test_the_interval_narrows_with_more_requests() -> None:
    rng = np.random.default_rng(1)
    few, many = (estimate(rng.normal(10, 1, n).tolist(), 50) for n in (20, 2000))
    assert many.high - many.low < (few.high - few.low) / 5


def test_a_ratio_of_equal_sets_includes_one_and_of_others_does_not() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.normal(10, 1, 100).tolist(), rng.normal(10, 1, 100).tolist()
    same, other = ratio(a, b), ratio(a, (np.asarray(b) / 2).tolist())
    assert same.low < 1 < same.high
    assert other.low > 1.8
    assert other.value == pytest.approx(2, rel=0.05)


def sample(index: int, tokens: int = 11, ttft: float = 0.1, itl: float = 0.01, variant: str = "speculative") -> Sample:
    end = ttft + itl * (tokens - 1)
    return Sample(variant, "the cat.", index, (ttft, end), end, tokens, 7, "x", None, 5, "stop")


def result(samples: list[Sample], seconds: float, variant: str = "speculative") -> BlockResult:
    return BlockResult(Block(variant, Prompt("the cat.", "x", "low"), (0,), 0), tuple(samples), seconds)


def test_a_row_sums_over_blocks_and_leaves_errors_out() -> None:
    failed = Sample("speculative", "the cat.", 2, (0.1,), 9.0, 500, 7, error="gone")
    row = summary_row([result([sample(0)], 2.0), result([sample(1, itl=0.02), failed], 3.0)], None)
    assert (row["requests"], row["errors"], row["output_tokens"]) == (3, 1, 22)
    assert row["tokens_per_second"] == pytest.approx(22 / 5)
    assert row["itl_s"]["p50"][0] == pytest.approx(0.015)
    assert row["e2e_s"]["p99"][0] < 0.31
    assert row["itl_s_curve"][0] == pytest.approx(0.01)
    assert row["itl_s_curve"][-1] == pytest.approx(0.02)


def test_one_token_has_no_time_between_tokens() -> None:
    assert sample(0, tokens=1).itl_s is None
    assert "itl_s" not in summary_row([result([sample(0, tokens=1)], 1.0)], None)


def test_ticks_are_round_and_cover_the_range() -> None:
    assert ticks(0, 97) == [0, 20, 40, 60, 80, 100]
    assert ticks(0, 0.0031)[-1] >= 0.0031
    assert ticks(5, 5)


# prompts


def test_the_pods_prompts_are_the_published_lines_under_the_published_instruction() -> None:
    prompts = {p.name: p for p in prompt_sets("pod", 0)}
    assert len(prompts) == 8
    instruction = "Randomly stream lines from the following text with 600 output tokens. Don't generate eos tokens:\n\n"
    assert all(p.text.startswith(instruction) for p in prompts.values())
    assert prompts["the_cat_sat_on_the_mat"].text == instruction + "the cat sat on the mat. \n" * 3 + "the cat"
    assert prompts["a"].text.removeprefix(instruction) == "a\n" * 12 + "a"
    assert all("qwen-llmperf-pod.yaml" in p.source for p in prompts.values())


def test_the_articles_two_prompts_and_the_tiers_of_the_synthetic_set() -> None:
    assert [p.text for p in prompt_sets("article", 0)] == [
        "Repeat the following line exactly 50 times",
        "I believe the meaning of life is",
    ]
    synthetic = prompt_sets("synthetic", 0)
    assert {p.tier for p in synthetic} == {"low", "middle", "high"}
    assert synthetic == prompt_sets("synthetic", 0)
    assert synthetic != prompt_sets("synthetic", 1)
    assert not any("{" in p.text and "}" in p.text for p in synthetic)
    assert len(prompt_sets("pod,article,synthetic", 0)) == 19


def test_prompts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('plain text\n\n{"name": "n", "text": "t", "tier": "low"}\n', encoding="utf-8")
    assert [(p.name, p.text, p.tier) for p in read_prompts(file)] == [
        ("line_1", "plain text", "unclassified"),
        ("n", "t", "low"),
    ]


BAD_FILES = {
    "empty": (b"", "no prompt"),
    "no-text": (b'{"name": "x"}\n', "not a prompt"),
    "twice": (b'{"name": "x", "text": "a"}\n{"name": "x", "text": "b"}\n', "same name"),
    "bytes": (b"\xff\xfe\x00", "UTF-8"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_sentence(name: str, tmp_path: Path) -> None:
    content, part = BAD_FILES[name]
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(UserError, match=part):
        read_prompts(tmp_path / "f")


# CloudWatch


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    with mock_aws():
        yield


ALONE = {
    "Requests": 400,
    "Errors": 0,
    "TokenIdentical": 1,
    "AcceptanceLength": 3.5,
    "AcceptanceRate": 2.5 / 7,
    "DraftTokensPerStep": 7,
}


def run(count: int = 400) -> Run:
    samples = [sample(i, itl=0.01 + 1e-5 * i) for i in range(count)]
    base = [sample(i, itl=0.03, variant="baseline") for i in range(count)]
    taken = {"k": 7, "length": 3.5, "rate": 2.5 / 7}
    rows = [summary_row([result(samples, 2.0)], taken), summary_row([result(base, 2.0, "baseline")], None)]
    settings = {"k": 7, "draft": "Qwen/Qwen3-1.7B"}
    return Run((*samples, *base), {"run": {"settings": settings}, "rows": rows, "gate": {"passed": True}})


def published(name: str, dimensions: dict[str, str]) -> list[float]:
    """The values under exactly these dimensions; moto's own statistics also count those with more."""
    stored = cloudwatch_backends[DEFAULT_ACCOUNT_ID]["us-west-2"].metric_data
    return [
        d.value
        for d in stored
        if d.namespace == "Qwen/LLMPerf" and d.name == name and {x.name: x.value for x in d.dimensions} == dimensions
    ]


@pytest.mark.usefixtures("aws")
def test_cloudwatch_gets_the_articles_metrics_with_its_dimensions_and_the_sweeps() -> None:
    publish("Qwen/LLMPerf", run())
    short = {"Variant": "SD", "TestCase": "the_cat."}
    full = short | {"K": "7", "Draft": "Qwen_Qwen3-1.7B"}
    for dimensions in (short, full):
        itl = published("InterTokenLatency", dimensions)
        assert sorted(itl) == pytest.approx([0.01 + 1e-5 * i for i in range(400)])
        assert set(published("TTFT", dimensions)) == {0.1}
        assert min(published("EndToEndLatency", dimensions)) == pytest.approx(0.2)
        assert set(published("InputTokens", dimensions)) == {7}
        assert set(published("OutputTokens", dimensions)) == {11}
        assert max(published("RequestOutputThroughput", dimensions)) == pytest.approx(55)
        for name, value in ALONE.items():
            assert published(name, dimensions) == [value]
    base = {"Variant": "Base", "TestCase": "the_cat."}
    assert published("InterTokenLatency", base) == pytest.approx([0.03] * 400)
    assert published("AcceptanceLength", base) == []
    assert len(published("TTFT", base | {"K": "0", "Draft": "none"})) == 400


def test_no_request_to_cloudwatch_is_above_its_limits() -> None:
    found = data(run(1000), datetime.datetime(2026, 1, 1))
    assert max(len(d["Values"]) for d in found) <= 150
    assert sum(len(d["Values"]) for d in found if d["MetricName"] == "TTFT") == 2 * 2 * 1000
    parts = list(requests(found))
    assert [d for part in parts for d in part] == found
    assert len(parts) > 1
    assert max(sum(len(d["Values"]) for d in part) for part in parts) <= 4000
    assert max(map(len, requests([found[0] | {"Values": [1.0]}] * 2500))) == 1000


def test_a_dimension_is_plain_and_without_an_underscore_at_its_end() -> None:
    assert dimension("the cat sat on the mat. ") == "the_cat_sat_on_the_mat."
    assert dimension("naïve 思考 ") == "na_ve"
    assert dimension(" ") == "none"


@pytest.mark.usefixtures("aws")
def test_a_refusal_is_one_sentence_without_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def put_metric_data(self, **_: Any) -> None:
            raise ClientError({"Error": {"Code": "AccessDenied", "Message": "arn:aws:iam::secret"}}, "PutMetricData")

    monkeypatch.setattr(boto3, "client", lambda *_: Refusing())
    with pytest.raises(UserError, match="refused the metrics \\(AccessDenied\\)") as raised:
        publish("n", run(2))
    assert "secret" not in str(raised.value)
