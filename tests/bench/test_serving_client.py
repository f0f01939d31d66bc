"""The client's figures are the server's truth, and a client that counts lines is wrong where it is."""

from __future__ import annotations

import asyncio
import itertools
import statistics

import pytest

from bench.serving.client import Endpoint, Prompt, ask, body, http_client
from bench.serving.options import Options
from bench.serving.sample import Sample
from bench.serving.sse import Events
from tests.bench.fake_server import FakeServer, Script, Truth, running

# other processes share the cores of a test machine and delay some requests; a client that measures
# wrongly does so in every request, so the least disturbed of a few is held to this
TTFT_TOLERANCE_S = 0.010
ITL_TOLERANCE_S = 0.001

SCRIPTS = {
    "one-token-a-chunk": Script(chunks=(1,) * 12),
    "several-tokens-a-chunk": Script(chunks=(4, 1, 6, 2, 8, 1, 3), step_s=0.02),
    "no-role-line": Script(role_line=False),
    "slow-first-token": Script(first_s=0.25, chunks=(3, 3, 3)),
    "usage-late": Script(usage_after_s=0.15, chunks=(2, 2, 2, 2)),
    "usage-late-with-an-empty-choice": Script(usage_after_s=0.15, chunks=(2, 2, 2, 2), empty_choice=True),
    "cut-anywhere": Script(piece_bytes=7, chunks=(2, 5, 1), words="naïve 思"),
}


def measure(script: Script, count: int = 5, api: str = "chat", **options: object) -> tuple[list[Sample], list[Truth]]:
    server = FakeServer(lambda _: script)
    with running(server) as url:
        settings = Options(baseline=url, api=api, **options)  # type: ignore[arg-type]
        endpoint, prompt = Endpoint("baseline", url, "fake"), Prompt("p", "hello")

        async def go() -> list[Sample]:
            async with http_client(settings) as client:
                await ask(client, endpoint, body(settings, endpoint, prompt, 0, 0.0))
                return [await ask(client, endpoint, body(settings, endpoint, prompt, i, 0.0)) for i in range(count)]

        samples = asyncio.run(go())
    return samples, server.truths[1:]


def least_error(measured: list[float | None], true: list[float]) -> float:
    return min(abs((m or 0.0) - t) for m, t in zip(measured, true, strict=True))


@pytest.mark.parametrize("name", SCRIPTS)
def test_figures_are_the_servers_truth(name: str) -> None:
    script = SCRIPTS[name]
    samples, truths = measure(script)
    assert [s.error for s in samples] == [None] * len(samples)
    assert {s.tokens for s in samples} == {script.tokens}
    assert {s.text for s in samples} == {f"{script.words} " * script.tokens}
    assert least_error([s.ttft_s for s in samples], [t.ttft_s for t in truths]) < TTFT_TOLERANCE_S
    assert least_error([s.e2e_s for s in samples], [t.e2e_s for t in truths]) < TTFT_TOLERANCE_S
    itl_error = least_error([s.itl_s for s in samples], [t.itl_s(script.tokens) for t in truths])
    assert itl_error < ITL_TOLERANCE_S
    assert {len(s.gaps_s) for s in samples} == {len(script.chunks) - 1}
    true_gaps = [b - a for t in truths for a, b in itertools.pairwise(t.text_at)]
    assert least_error([g for s in samples for g in s.gaps_s], true_gaps) < ITL_TOLERANCE_S


def line_counting_itl(sample: Sample) -> float:
    """What the published benchmark computes: the whole time over the number of lines."""
    return sample.e2e_s / sample.lines


def test_a_line_counting_client_is_wrong_by_the_tokens_of_a_chunk() -> None:
    script = SCRIPTS["several-tokens-a-chunk"]
    samples, truths = measure(script)
    for sample, truth in zip(samples, truths, strict=True):
        assert line_counting_itl(sample) > 2 * truth.itl_s(script.tokens)
    assert least_error([s.itl_s for s in samples], [t.itl_s(script.tokens) for t in truths]) < ITL_TOLERANCE_S


def test_a_line_counting_client_sees_no_gain_from_speculation() -> None:
    """Same step time, one token against four a step: four times faster, and the lines do not show it."""
    slow, _ = measure(Script(chunks=(1,) * 32, step_s=0.01), count=3)
    fast, _ = measure(Script(chunks=(4,) * 8, step_s=0.01), count=3)
    real = min(s.itl_s or 0 for s in slow) / min(s.itl_s or 0 for s in fast)
    by_lines = min(map(line_counting_itl, slow)) / min(map(line_counting_itl, fast))
    assert real > 3
    assert by_lines < real / 2


def test_a_line_counting_client_puts_the_first_token_into_itl() -> None:
    samples, truths = measure(SCRIPTS["slow-first-token"], count=3)
    true = statistics.median(t.itl_s(9) for t in truths)
    assert statistics.median(map(line_counting_itl, samples)) > 5 * true


ERRORS = {
    "error-event": (Script(fail_after=3), "the engine died"),
    "connection-dropped": (Script(drop_after=3), "RemoteProtocolError"),
    "http-status": (Script(status=503), "HTTP 503"),
    "no-usage": (Script(usage=False), "no usage"),
    "no-text": (Script(chunks=()), "no text"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_told_and_give_no_figures(name: str) -> None:
    script, part = ERRORS[name]
    samples, _ = measure(script, count=2)
    for sample in samples:
        assert sample.error is not None
        assert part in sample.error
        assert "itl_s" not in sample.row()


def test_what_the_answer_depends_on_is_in_the_request() -> None:
    _, truths = measure(Script(), count=2, thinking="off", seed=7, max_tokens=33, ignore_eos=True, token_ids=True)
    for index, truth in enumerate(truths):
        assert truth.body["chat_template_kwargs"] == {"enable_thinking": False}
        assert truth.body["seed"] == 7 + index
        assert truth.body["temperature"] == 0.0
        assert truth.body["max_tokens"] == 33
        assert truth.body["stream_options"] == {"include_usage": True}
        assert truth.body["ignore_eos"]
        assert truth.body["return_token_ids"]


def test_completions_and_token_ids() -> None:
    samples, truths = measure(Script(token_ids=True, chunks=(2, 3)), count=1, api="completions", thinking="on")
    assert samples[0].error is None
    assert samples[0].token_ids == (0, 1, 0, 1, 2)
    assert truths[0].body["prompt"] == "hello"
    assert "chat_template_kwargs" not in truths[0].body


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_events_however_the_bytes_are_cut(size: int) -> None:
    stream = 'data: {"a": "é"}\n\n: comment\r\nevent: x\r\ndata:two\r\ndata: lines\r\n\r\ndata: [DONE]\n\n'.encode()
    events = Events()
    pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert [data for piece in pieces for data in events.feed(piece)] == ['{"a": "é"}', "two\nlines", "[DONE]"]
