"""lm-eval by likelihood and by generation: a bundle's server gives it what vLLM's own engine gives it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.model.demo_bundle import ROOT
from tests.serve.server import NO_CLIENTS, Server, command, model_name

pytestmark = pytest.mark.skipif(bool(NO_CLIENTS), reason=NO_CLIENTS)
TASKS = {path.stem: path for path in (ROOT / "tests/serve/tasks").glob("*.yaml")}
# fp32 keeps a logit below 32 to 2 ** -19; a likelihood is the sum over at most 10 ids, each up to 5 such steps apart
_TOLERANCE = 1e-4
Samples = dict[str, list[dict[str, Any]]]


def evaluated(server: Server, folder: Path) -> Samples:
    """What lm-eval saves of each question, by task."""
    about = {
        "base_url": f"{server.url}/v1/completions", "model": model_name(server), "tokenizer": ROOT / "demo/target",
        "tokenizer_backend": "huggingface", "num_concurrent": 8, "max_length": 256,
    }  # fmt: skip
    run = [command("lm_eval"), "run", "--model", "local-completions", "--log_samples", "--output_path", str(folder)]
    run += ["--model_args", ",".join(f"{key}={value}" for key, value in about.items())]
    # the tasks name their questions from the root; nothing is looked up in a hub
    environment = os.environ | {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    subprocess.run([*run, "--tasks", *map(str, TASKS.values())], cwd=ROOT, env=environment, check=True)
    files = {task: next(folder.rglob(f"samples_{task}_*.jsonl")) for task in TASKS}
    return {task: [json.loads(line) for line in file.read_text().splitlines()] for task, file in files.items()}


@pytest.fixture(scope="module")
def ours(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return evaluated(server, tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(stock_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return evaluated(stock_server, tmp_path_factory.mktemp("theirs"))


def _scores(samples: list[dict[str, Any]], metric: str) -> list[float]:
    found = [sample[metric] for sample in samples]
    assert 0 < sum(found) < len(found) == 12, "some of the questions are answered rightly, not all"
    return found


def test_likelihoods_are_vllm_s_own(ours: Samples, theirs: Samples) -> None:
    """Of four continuations of each question, and which of them is greedy."""
    mine, other = (
        [(float(value), greedy) for sample in found["chosen"] for value, greedy in sample["filtered_resps"]]
        for found in (ours, theirs)
    )
    assert len(mine) == 48
    assert [value for value, _ in mine] == pytest.approx([value for value, _ in other], rel=0, abs=_TOLERANCE)
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in other]
    assert _scores(ours["chosen"], "acc") == _scores(theirs["chosen"], "acc")


def test_continuations_are_vllm_s_own(ours: Samples, theirs: Samples) -> None:
    mine, other = ([sample["resps"] for sample in found["continued"]] for found in (ours, theirs))
    assert mine == other
    assert _scores(ours["continued"], "exact_match") == _scores(theirs["continued"], "exact_match")
