"""SIGTERM: what runs is answered whole, and the process ends with 0."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serve.server import NO_VLLM, URL_VARIABLE, served

pytestmark = [
    pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM),
    pytest.mark.skipif(URL_VARIABLE in os.environ, reason=f"{URL_VARIABLE} names a server that others use"),
]


def test_sigterm_lets_running_requests_end(bundle: Path, tmp_path: Path) -> None:
    # vendor seam: comes with vLLM
    import openai  # noqa: PLC0415

    with served(bundle, tmp_path) as server, ThreadPoolExecutor(1) as pool:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        stream = client.completions.create(
            model=client.models.list().data[0].id,
            prompt="The girl",
            max_tokens=240,
            temperature=1.5,
            seed=1,
            n=12,
            stream=True,
            extra_body={"ignore_eos": True, "stream_options": {"include_usage": True}},
        )
        next(stream)
        status = pool.submit(server.stop)
        chunks = list(stream)
        assert status.result() == 0
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == ["length"] * 12
    assert chunks[-1].usage.completion_tokens == 12 * 240
