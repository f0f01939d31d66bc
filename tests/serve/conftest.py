"""One server of the demo bundle for all tests over HTTP, and the same bundle offline.

A module with a server of its own overrides `bundle` and `server`; what is below them is made for each module.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model.demo_bundle import ROOT, graphs
from tests.serve.server import Server, model_name, served, starting, wait
from trnspec.llm import LLM


@pytest.fixture(scope="session")
def bundle(demo_bundles: Path) -> Path:
    """The folder of a demo bundle: k 7, batch 4, length 256, fp32."""
    return graphs(demo_bundles).bundle.path


@pytest.fixture(scope="session")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(bundle, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM's engine with the same target, in fp32 and without drafts: a client of it; its model is named m."""
    options = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4", "--generation-config", "vllm"]
    # a tenth of the memory; prompt log-probabilities need the prompt's rows
    options += ["--gpu-memory-utilization", "0.1", "--no-enable-prefix-caching"]
    with pytest.MonkeyPatch.context() as patch:
        # vLLM then loads no platform plugin
        patch.setenv("VLLM_TARGET_DEVICE", "cpu")
        folder = tmp_path_factory.mktemp("stock")
        with starting(ROOT / "demo/target", folder, *options, "--served-model-name", "m") as server:
            patch.undo()
            wait(server)
            yield client_of(server)


def client_of(server: Server) -> Any:
    # vendor seam: comes with vLLM
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return client_of(server)


@pytest.fixture(scope="module")
def name(server: Server) -> str:
    return model_name(server)


@pytest.fixture(scope="module")
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle) as opened:
        yield opened
