"""A second start: ready after its warm-up and not before, the same bytes; at SIGTERM what runs is answered whole."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.model.demo_bundle import PROMPTS
from tests.serve.server import NO_VLLM, URL_VARIABLE, Server

pytestmark = [
    pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM),
    pytest.mark.skipif(URL_VARIABLE in os.environ, reason=f"{URL_VARIABLE} names a server that others use"),
]


def _client(server: Server) -> Any:
    # vendor seam: comes with vLLM
    import openai  # noqa: PLC0415

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_a_server_is_ready_once_its_graphs_are(again: Server) -> None:
    assert again.log is not None
    # what the first answer of /health found in the log
    assert "graphs ready in" in again.log.read_text()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "seeded"])
def test_a_second_start_gives_the_same_bytes(
    server: Server, again: Server, name: str, temperature: float, stream: bool
) -> None:
    first, second = (_answers(_client(which), name, temperature, stream) for which in (server, again))
    assert first.keys() == {0, 1, 2}
    assert first == second


def _answers(client: Any, name: str, temperature: float, stream: bool) -> dict[int, tuple[str, list[int], str]]:
    """Text, ids and the reason of the end of each of three prompts; where a stream is cut into pieces is no part."""
    asked = {"prompt": PROMPTS[:3], "max_tokens": 60, "temperature": temperature, "seed": 3, "stream": stream}
    came = client.completions.create(model=name, extra_body={"return_token_ids": True}, **asked)
    answers: dict[int, tuple[str, list[int], str]] = {}
    for choice in [c for part in came for c in part.choices] if stream else came.choices:
        text, ids, _ = answers.get(choice.index, ("", [], ""))
        answers[choice.index] = text + choice.text, ids + list(choice.token_ids or ()), choice.finish_reason
    return answers


def test_sigterm_lets_running_requests_end_and_refuses_new_ones(again: Server, name: str) -> None:
    # vendor seam: comes with vLLM
    import openai  # noqa: PLC0415

    stream = _client(again).completions.create(
        model=name,
        prompt="The girl",
        max_tokens=240,
        temperature=1.5,
        seed=1,
        n=12,
        stream=True,
        extra_body={"ignore_eos": True, "stream_options": {"include_usage": True}},
    )
    next(stream)
    assert again.status("/health") == 200
    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(again.stop)
        _not_ready(again)
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            _client(again).completions.create(model=name, prompt="a", max_tokens=4)
        chunks = list(stream)
        assert status.result() == 0
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == ["length"] * 12
    assert chunks[-1].usage.completion_tokens == 12 * 240


def _not_ready(server: Server) -> None:
    """Wait until /health is a 503; it must be within a second of the signal."""
    end = time.monotonic() + 1
    while (status := server.status("/health")) == 200 and time.monotonic() < end:
        time.sleep(0.01)
    assert status == 503
