"""A second start: ready after its warm-up and not before, the same bytes; at SIGTERM what runs is answered whole."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.model.demo_bundle import PROMPTS
from tests.serve.server import NO_VLLM, URL_VARIABLE, Server, served

pytestmark = [
    pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM),
    pytest.mark.skipif(URL_VARIABLE in os.environ, reason=f"{URL_VARIABLE} names a server that others use"),
]


@pytest.fixture(scope="module")
def again(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The bundle's second server. The last test ends it."""
    with served(bundle, tmp_path_factory.mktemp("again")) as server:
        yield server


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
    def answer(which: Server) -> list[dict[str, Any]]:
        asked = {"prompt": PROMPTS[:3], "max_tokens": 60, "temperature": temperature, "seed": 3, "stream": stream}
        more = {"return_token_ids": True}
        came = _client(which).completions.create(model=name, extra_body=more, **asked)
        choices = [c for part in came for c in part.choices] if stream else came.choices
        return sorted((c.model_dump() for c in choices), key=lambda c: c["index"])

    first, second = answer(server), answer(again)
    assert {c["index"] for c in first} == {0, 1, 2}
    assert first == second


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
