"""SIGTERM: what runs is answered whole, and the process ends with 0."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from tests.model.demo_bundle import graphs
from tests.serve.conftest import BATCH, LENGTH, K, start


def test_sigterm_lets_running_requests_end(base: Path, tmp_path: Path) -> None:
    server = start(graphs(base, k=K, batch=BATCH, max_len=LENGTH).bundle.path, tmp_path / "log")
    answers: list[Any] = []

    def ask() -> None:
        # sampled ids of an open text: few a step, so that the signal comes in the middle
        body = {"ignore_eos": True}
        answers.append(
            server.client.completions.create(
                model=server.model, prompt="The girl", max_tokens=240, temperature=1.5, seed=1, n=12, extra_body=body
            )
        )

    asking = threading.Thread(target=ask)
    asking.start()
    while server.metrics("vllm:num_requests_running") == 0:
        time.sleep(0.02)
    server.process.terminate()
    asking.join(timeout=120)
    assert server.process.wait(timeout=120) == 0
    assert [c.finish_reason for c in answers[0].choices] == ["length"] * 12
    assert answers[0].usage.completion_tokens == 12 * 240
