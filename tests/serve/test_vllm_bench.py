"""`vllm bench serve` as a client: every request is answered in full, and its figures are there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.model.demo_bundle import ROOT
from tests.serve.server import NO_CLIENTS, Server, command, model_name

pytestmark = pytest.mark.skipif(bool(NO_CLIENTS), reason=NO_CLIENTS)


def test_every_request_is_answered_and_timed(server: Server, tmp_path: Path) -> None:
    flags = {
        "backend": "openai", "base-url": server.url, "model": model_name(server), "tokenizer": ROOT / "demo/target",
        "dataset-name": "random", "random-input-len": 24, "random-output-len": 16, "num-prompts": 8,
        "max-concurrency": 4, "temperature": 0, "result-filename": tmp_path / "result.json",
    }  # fmt: skip
    named = [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
    run = [command("vllm"), "bench", "serve", *named, "--ignore-eos", "--save-result"]
    subprocess.run(run, cwd=tmp_path, check=True)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (8, 0, 8 * 16)
    for figure in ("median_ttft_ms", "median_tpot_ms", "output_throughput"):
        assert result[figure] > 0, figure
