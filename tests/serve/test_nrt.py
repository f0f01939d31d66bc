"""`vllm serve` of a bundle's NEFFs on two ranks, over a stand-in of nrtpy: its answers, and the end of a rank."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model.demo_bundle import PROMPTS, graphs
from tests.runtime.neffs import find_stand_ins, with_neffs
from tests.serve.server import NO_VLLM, Server, model_name, served
from trnspec.llm import LLM, Params

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM)]
DRAWN = Params(temperature=0.8, seed=5)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("neffs")
    built = graphs.__wrapped__(folder, tp=2, k=2, batch=2, max_len=128)
    (folder / "compiled").mkdir()
    return with_neffs(built.bundle, folder / "compiled").path


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        find_stand_ins(patch)
        with served(bundle, tmp_path_factory.mktemp("log"), "--additional-config", '{"platform": "nrt"}') as running:
            yield running


def complete(server: Server, prompt: str, params: Params) -> list[int]:
    """The ids of an answer of 30 tokens."""
    body = {
        "model": model_name(server), "prompt": prompt, "max_tokens": 30, "temperature": params.temperature,
        "seed": params.seed, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        ids: list[int] = json.load(response)["choices"][0]["token_ids"]
    return ids


def check_ids(server: Server, bundle: Path, params: Params, platform: str) -> None:
    """A server's ids are those of the same bundle on the CPU, and it runs on this platform."""
    with LLM(bundle) as llm:
        expected = [list(llm.generate(text, params, max_new_tokens=30).ids) for text in PROMPTS[:2]]
    assert [complete(server, text, params) for text in PROMPTS[:2]] == expected
    assert server.log is not None
    assert f"{platform}, fp32, tp 2" in server.log.read_text()


@pytest.mark.parametrize("params", [Params(), DRAWN], ids=["greedy", "drawn"])
def test_its_ids_are_those_of_the_same_bundle_on_the_cpu(params: Params, server: Server, bundle: Path) -> None:
    check_ids(server, bundle, params, "nrt")


def test_the_end_of_a_rank_ends_the_server_and_its_log_names_it(server: Server) -> None:
    """Last in this file: nothing serves after it."""
    # comes with vLLM
    import psutil  # noqa: PLC0415

    assert server.process is not None
    assert server.log is not None
    below = psutil.Process(server.process.pid).children(recursive=True)
    ranks = [p for p in below if "trnspec.runtime.nrt_rank" in p.cmdline()]
    assert len(ranks) == 2
    os.kill(ranks[1].pid, signal.SIGKILL)
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        complete(server, PROMPTS[0], Params())
    # vLLM's status says nothing of it
    server.process.wait(120)
    _, alive = psutil.wait_procs(below, 30)
    assert not alive
    assert "of 2 was ended by signal 9; read what it wrote before this, and start again" in server.log.read_text()
