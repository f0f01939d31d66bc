"""A whole run against two local servers: order, load, gate, acceptance, exit code, files."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import boto3
import pytest
from moto import mock_aws

from bench.serving.__main__ import main
from bench.serving.acceptance import acceptance, difference, parse_metrics
from bench.serving.client import Endpoint, Prompt, ask, http_client
from bench.serving.gate import compare
from bench.serving.load import Block, plan, run_block
from bench.serving.options import Options
from bench.serving.prompts import prompt_sets
from bench.serving.sample import Sample
from model.errors import UserError
from tests.bench.fake_server import FakeServer, Script, Truth, running


class Counters:
    """A speculative server's script and counters: four tokens a step out of k = 5, at every step."""

    k = 5

    def __init__(self, script: Script) -> None:
        self.script, self.steps = script, 0

    def answer(self, body: dict[str, Any]) -> Script:
        self.steps += len(self.script.chunks)
        return self.script

    def page(self) -> str:
        position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        counted = {
            'vllm:spec_decode_num_drafts_total{engine="0"}': self.steps,
            'vllm:spec_decode_num_draft_tokens_total{engine="0"}': self.k * self.steps,
            'vllm:spec_decode_num_accepted_tokens_total{engine="0"}': 3 * self.steps,
            **{f'{position}{{engine="0",position="{i}"}}': self.steps if i < 3 else 0 for i in range(self.k)},
        }
        return "# HELP x\n" + "".join(f"{name} {float(value)}\n" for name, value in counted.items())


SLOW = Script(chunks=(1,) * 16, step_s=0.004)
FAST = Script(chunks=(4,) * 4, step_s=0.004)


def run(
    out: Path, baseline: Script, speculative: Script, *more: str
) -> tuple[int, dict[str, Any], dict[str, list[Truth]]]:
    """A whole run: its exit code, its summary, and what the servers themselves wrote down."""
    counters = Counters(speculative)
    servers = FakeServer(lambda _: baseline), FakeServer(counters.answer, counters.page)
    with running(servers[0]) as a, running(servers[1]) as b:
        arguments = ["--baseline", a, "--speculative", b + "/v1", "--out", str(out), "--requests", "8"]
        try:
            main([*arguments, "--rounds", "2", "--warmup", "1", *more])
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
    truths = dict(zip(("baseline", "speculative"), (s.truths for s in servers), strict=True))
    return code, json.loads((out / "summary.json").read_text()), truths


def test_a_run_finds_the_speedup_the_acceptance_and_the_truth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, summary, truths = run(tmp_path, SLOW, FAST)
    assert code == 0
    assert summary["gate"]["passed"] is True
    rows = {(r["variant"], r["case"]): r for r in summary["rows"]}
    written = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    for (variant, case), row in rows.items():
        assert (row["requests"], row["errors"], row["output_tokens"]) == (8, 0, 8 * 16)
        rows_of_it = [r for r in written if (r["stage"], r["variant"], r["case"]) == ("load", variant, case)]
        assert row["itl_s"]["p50"][0] == pytest.approx(statistics.median(r["itl_s"] for r in rows_of_it))
        # the seed is the request's number; the last request of a number is that of the load
        prompt = next(p.text for p in prompt_sets("article", 0) if p.name == case)
        asked = {t.body["seed"]: t for t in truths[variant] if t.body["messages"][0]["content"] == prompt}
        assert min(abs(r["itl_s"] - asked[r["index"]].itl_s(16)) for r in rows_of_it) < 0.0005
        assert min(abs(r["ttft_s"] - asked[r["index"]].ttft_s) for r in rows_of_it) < 0.01
    for speedup in summary["speedup"]:
        assert 2.5 < speedup["itl_s"][0] < 8
    taken = rows["speculative", "meaning_of_life"]["acceptance"]
    assert (taken["k"], taken["rate"], taken["length"]) == (5, 0.6, 4.0)
    assert taken["steps"] == 8 * len(FAST.chunks)
    assert taken["unconditional"] == [1, 1, 1, 0, 0]
    assert summary["run"]["settings"]["k"] == 5
    shown = capsys.readouterr().out
    assert "baseline over speculative" in shown
    assert shown.splitlines()[-1] == str(tmp_path / "report.html")
    assert [sum(r["stage"] == stage for r in written) for stage in ("warm-up", "gate", "load")] == [2, 4, 2 * 2 * 8]
    assert all(r["itl_s"] > 0 and r["source"] == "wall" for r in written)


def test_no_speedup_is_printed_when_the_answers_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, summary, _ = run(tmp_path, SLOW, Script(chunks=(4,) * 4, step_s=0.004, words="v"))
    assert code == 1
    assert summary["speedup"] == []
    assert summary["gate"]["passed"] is False
    shown = capsys.readouterr().out
    assert "over speculative" not in shown
    assert "'w w w" in shown
    assert "'v v v" in shown
    page = (tmp_path / "report.html").read_text()
    assert "baseline over speculative" not in page
    assert "<mark>v v v" in page


def test_equal_text_from_another_number_of_tokens_does_not_pass() -> None:
    pair = [Sample("baseline", "c", 0, text="a b", tokens=2), Sample("speculative", "c", 0, text="a b", tokens=3)]
    assert compare(pair).passed is False
    assert compare([pair[0], Sample("speculative", "c", 0, text="a b", tokens=2)]).passed is True


def test_the_gate_names_the_first_token_and_a_baseline_that_differs_from_itself() -> None:
    def sample(variant: str, text: str, ids: tuple[int, ...]) -> Sample:
        return Sample(variant, "c", 0, text=text, tokens=len(ids), token_ids=ids)

    samples = [
        sample("baseline", "one two three", (1, 2, 3)),
        sample("baseline", "one two four", (1, 2, 4)),
        sample("speculative", "one six", (1, 6)),
    ]
    verdict = compare(samples)
    assert [(d.unit, d.position, d.variants) for d in verdict.divergences] == [
        ("token", 2, ("baseline", "baseline")),
        ("token", 1, ("baseline", "speculative")),
    ]
    assert verdict.divergences[0].before == "one two "
    assert verdict.divergences[0].continuations == ("three", "four")
    assert "of the baseline with itself" in verdict.sentence


@pytest.mark.parametrize("variants", [("baseline",), ("speculative",)])
def test_one_endpoint_is_measured_without_a_verdict(variants: tuple[str, ...]) -> None:
    assert compare([Sample(v, "c", 0, text="a", tokens=1) for v in variants]).passed is None


def test_an_answer_that_failed_cannot_pass_the_gate() -> None:
    verdict = compare([Sample("baseline", "c", 0, text="a", tokens=1), Sample("speculative", "c", 0, error="gone")])
    assert verdict.passed is False
    assert verdict.missing == ("c",)


def test_errors_are_counted_and_named(tmp_path: Path) -> None:
    code, summary, _ = run(tmp_path, SLOW, Script(fail_after=2), "--temperature", "0.7")
    assert code == 1
    row = next(r for r in summary["rows"] if r["variant"] == "speculative")
    assert row["errors"] == row["requests"] == 8
    assert "the engine died" in row["error_kinds"][0]
    assert "itl_s" not in row
    assert "the engine died" in (tmp_path / "report.html").read_text()


def test_a_server_that_answers_nothing_is_an_exit_code_and_a_page(tmp_path: Path) -> None:
    arguments = ["--requests", "2", "--rounds", "1", "--out", str(tmp_path)]
    with running(FakeServer(lambda _: Script(status=500))) as url, pytest.raises(SystemExit) as left:
        main(["--baseline", url, *arguments])
    assert left.value.code == 1
    assert "HTTP 500" in (tmp_path / "report.html").read_text()


def test_the_order_of_endpoints_is_random_repeatable_and_fair() -> None:
    options = Options(baseline="http://a", speculative="http://b", requests=40, rounds=20, seed=3)
    prompts = [Prompt("x", "x"), Prompt("y", "y")]
    blocks = plan(options, prompts)
    assert blocks == plan(options, prompts)
    assert blocks != plan(Options(**{**options.__dict__, "seed": 4}), prompts)
    firsts = [blocks[i].variant for i in range(0, len(blocks), 2)]
    assert 5 < firsts.count("baseline") < 35
    for pair in zip(blocks[::2], blocks[1::2], strict=True):
        assert {b.variant for b in pair} == {"baseline", "speculative"}
        assert pair[0].indices == pair[1].indices
        assert pair[0].arrival_seed == pair[1].arrival_seed
    for variant in ("baseline", "speculative"):
        sent = sorted(i for b in blocks if (b.variant, b.prompt.name) == (variant, "x") for i in b.indices)
        assert sent == list(range(40))


def load(script: Script, count: int, **options: Any) -> tuple[list[Sample], FakeServer, float]:
    server = FakeServer(lambda _: script)
    with running(server) as url:
        settings = Options(baseline=url, **options)

        async def go() -> list[Sample]:
            block = Block("baseline", Prompt("p", "x"), tuple(range(count)), 1)
            async with http_client(settings) as client:
                found = await run_block(client, settings, Endpoint("baseline", url, "fake"), block, lambda _: None)
            return list(found.samples)

        begin = time.monotonic()
        samples = asyncio.run(go())
        return samples, server, time.monotonic() - begin


def test_concurrency_is_what_was_asked() -> None:
    samples, server, seconds = load(Script(first_s=0.05, chunks=(1,)), 12, concurrency=3)
    assert [s.index for s in samples] == list(range(12))
    assert server.most_under_way == 3
    assert seconds > 4 * 0.05


def test_a_rate_does_not_wait_for_answers() -> None:
    samples, server, seconds = load(Script(first_s=0.8, chunks=(1,)), 12, rate=30.0, concurrency=1)
    assert server.most_under_way > 4
    assert seconds < 12 * 0.8
    assert not any(s.error for s in samples)
    gaps = [b - a for a, b in itertools.pairwise(t.received for t in server.truths)]
    rng = random.Random(1)
    due = [rng.expovariate(30.0) for _ in range(12)]
    assert statistics.median(abs(g - d) for g, d in zip(gaps, due[1:], strict=True)) < 0.02


def test_with_a_rate_latencies_count_from_when_a_request_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sees the requests after a stall late; a user would have waited through it."""
    told: list[float | None] = []

    async def late(client: Any, endpoint: Endpoint, request: dict[str, Any], due: float | None = None) -> Sample:
        told.append(due)
        return await ask(client, endpoint, request, None if due is None else due - 0.5)

    monkeypatch.setattr("bench.serving.load.ask", late)
    samples, _, _ = load(Script(first_s=0.01, chunks=(1,)), 6, rate=50.0)
    rng = random.Random(1)
    assert [b - a for a, b in itertools.pairwise(t or 0.0 for t in told)] == pytest.approx(
        [rng.expovariate(50.0) for _ in range(6)][1:]
    )
    assert all(s.ttft_s > 0.5 for s in samples)


def test_a_request_that_never_ends_is_an_error_after_the_timeout() -> None:
    samples, _, seconds = load(Script(first_s=30), 1, timeout=0.2)
    assert samples[0].error == "no complete answer within 0.2 s"
    assert seconds < 5


def test_counters_of_the_older_engine_and_of_several_engines() -> None:
    old = parse_metrics(
        'vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 30\n'
        "vllm:spec_decode_num_draft_tokens_total 70\nvllm:spec_decode_num_emitted_tokens_total 40\n"
        "vllm:spec_decode_num_drafts_created 1.7e9\nvllm:other_total 5\n"
    )
    found = acceptance(old)
    assert found is not None
    assert (found["k"], found["length"], found["rate"]) == (7, 4.0, 30 / 70)
    two = parse_metrics('vllm:spec_decode_num_drafts{engine="0"} 1\nvllm:spec_decode_num_drafts{engine="1"} 2\n')
    assert two == {"drafts": 3.0}


def test_shares_of_positions_of_all_steps_and_of_those_that_got_so_far() -> None:
    counted = {"drafts": 10.0, "draft_tokens": 30.0, "accepted_tokens": 13.0}
    found = acceptance(counted | {f"per_pos/{i}": n for i, n in enumerate((8.0, 4.0, 1.0))})
    assert found is not None
    assert found["unconditional"] == [0.8, 0.4, 0.1]
    assert found["conditional"] == pytest.approx([0.8, 0.5, 0.25])


def test_no_acceptance_without_counters_or_across_a_restart() -> None:
    assert acceptance({}) is None
    assert difference({"drafts": 5.0}, {"drafts": 2.0}) == {}


BAD = {
    "none": ([], "no endpoint"),
    "address": (["--baseline", "localhost:8000"], "not an address"),
    "requests": (["--baseline", "http://x", "--requests", "0"], "at least 1"),
    "rounds": (["--baseline", "http://x", "--requests", "2", "--rounds", "3"], "cannot fill"),
    "thinking": (["--baseline", "http://x", "--thinking", "maybe"], "must be one of"),
    "set": (["--baseline", "http://x", "--prompt-set", "mine"], "no prompt set"),
    "timeout": (["--baseline", "http://x", "--timeout", "0"], "number of seconds"),
    "out": (["--baseline", "http://x", "--out", __file__], "cannot be a folder"),
    "nobody": (["--baseline", "http://127.0.0.1:9"], "no list of models"),
    "report": (["--report", "/nonexistent"], "holds no summary"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_sentence(name: str, tmp_path: Path) -> None:
    arguments, part = BAD[name]
    with pytest.raises(UserError, match=part):
        main(["--out", str(tmp_path), *arguments])


def test_one_endpoint_alone_and_its_metrics_in_cloudwatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    with mock_aws(), running(FakeServer(lambda _: SLOW)) as url:
        main(["--baseline", url, "--requests", "2", "--rounds", "1", "--out", str(tmp_path), "--cloudwatch", "mine"])
        names = {m["MetricName"] for m in boto3.client("cloudwatch").list_metrics(Namespace="mine")["Metrics"]}
    assert {"TTFT", "InterTokenLatency", "Requests", "Errors"} <= names
    assert "TokenIdentical" not in names
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["gate"]["passed"], summary["speedup"]) == (None, [])
    assert {r["variant"] for r in summary["rows"]} == {"baseline"}


def test_ctrl_c_keeps_the_rows_and_shows_no_traceback(tmp_path: Path) -> None:
    with running(FakeServer(lambda _: Script(first_s=0.1, chunks=(1, 1)))) as url:
        command = [sys.executable, "-m", "bench.serving", "--baseline", url, "--out", str(tmp_path)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            rows = tmp_path / "requests.jsonl"
            while not rows.is_file() or len(rows.read_text().splitlines()) < 8:
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            shown = process.communicate(timeout=20)[1]
    assert process.returncode == 130
    assert "Traceback" not in shown
    assert "interrupted: the rows so far are in" in shown
    assert all(json.loads(line)["tokens"] == 2 for line in rows.read_text().splitlines())


def test_many_prompts_are_summed_up_by_tier(tmp_path: Path) -> None:
    run(tmp_path, SLOW, FAST, "--prompt-set", "pod,article", "--requests", "2", "--concurrency", "8")
    page = (tmp_path / "report.html").read_text()
    assert "low entropy, 7 prompts" in page
    assert "high entropy, 2 prompts" in page
    assert page.index("the_cat_sat_on_the_mat (low)") < page.index("shakespeare (high)")


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_the_report_draws_every_plot_and_the_sweep_over_stored_runs(tmp_path: Path) -> None:
    for k, script in ((5, FAST), (6, Script(chunks=(2,) * 8, step_s=0.004))):
        run(tmp_path / str(k), SLOW, script, "--k", str(k), "--draft", "<draft>")
    one = (tmp_path / "5" / "report.html").read_text()
    # per case, three latency curves, two of acceptance
    assert len(svgs(one)) == 6
    assert "How many draft tokens" not in one
    main(["--report", f"{tmp_path / '5'},{tmp_path / '6'}", "--out", str(tmp_path / "sweep")])
    sweep = (tmp_path / "sweep" / "report.html").read_text()
    assert len(svgs(sweep)) == 8
    assert "k 6" in sweep
    assert "<draft>" not in sweep
    for svg in svgs(sweep):
        width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
        for circle in svg.iter("{http://www.w3.org/2000/svg}circle"):
            assert 0 <= float(circle.attrib["cx"]) <= width
            assert 0 <= float(circle.attrib["cy"]) <= height


def test_bars_are_as_long_as_their_values(tmp_path: Path) -> None:
    _, summary, _ = run(tmp_path, SLOW, FAST)
    svg = svgs((tmp_path / "report.html").read_text())[0]
    # the ground has no place of its own, the legend stands at 28
    rects = [r.attrib for r in svg.iter("{http://www.w3.org/2000/svg}rect") if r.attrib.get("y", "28") != "28"]
    drawn = [float(r["width"]) for r in rects]
    rows = sorted(summary["rows"], key=lambda r: ([x["case"] for x in summary["rows"]].index(r["case"]), r["variant"]))
    true = [r["itl_s"]["p50"][0] for r in rows]
    assert [d / drawn[0] for d in drawn] == pytest.approx([t / true[0] for t in true], rel=0.02)
