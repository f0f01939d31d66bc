"""`vllm serve` of two ranks without a device: a real PJRT plugin registered as `neuron`, and NEFFs over a stand-in."""

from __future__ import annotations

import os
import signal
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model.demo_bundle import PROMPTS, graphs
from tests.runtime.neffs import find_stand_ins, with_neffs
from tests.serve.server import OVER_HTTP, Server, model_name, served
from tests.stand_ins import PACKAGES, PLUGIN
from trnspec.bundle.opening import Bundle
from trnspec.llm import LLM, Params

pytestmark = OVER_HTTP


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return graphs.__wrapped__(tmp_path_factory.mktemp("built"), tp=2, k=2, batch=2, max_len=128).bundle  # type: ignore[attr-defined,no-any-return]


@pytest.fixture(scope="module", params=["pjrt", "neuron"])
def platform(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def bundle(platform: str, built: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_neffs(built, tmp_path_factory.mktemp("neffs")).path if platform == "neuron" else built.path


@pytest.fixture(scope="module")
def server(platform: str, bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        find_stand_ins(patch, PACKAGES if platform == "neuron" else PLUGIN)
        option = f'{{"platform": "{platform}"}}'
        with served(bundle, tmp_path_factory.mktemp("log"), "--additional-config", option) as running:
            yield running


def complete(server: Server, prompt: str, params: Params) -> list[int]:
    """The ids of an answer of 30 tokens."""
    body = {"prompt": prompt, "max_tokens": 30, "temperature": params.temperature, "seed": params.seed}
    _, answer = server.post("/v1/completions", body | {"model": model_name(server), "return_token_ids": True})
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


@pytest.mark.parametrize("params", [Params(), Params(temperature=0.8, seed=5)], ids=["greedy", "sampled"])
def test_its_ids_are_those_of_the_same_bundle_on_the_cpu(
    params: Params, platform: str, server: Server, bundle: Path
) -> None:
    with LLM(bundle) as llm:
        expected = [list(llm.generate(text, params, max_new_tokens=30).ids) for text in PROMPTS[:2]]
    assert [complete(server, text, params) for text in PROMPTS[:2]] == expected
    assert server.log is not None
    assert f"{platform}, fp32, tp 2" in server.log.read_text()


def test_the_end_of_a_rank_ends_the_server_and_its_log_names_it(platform: str, server: Server) -> None:
    """Last in this file: nothing serves after it."""
    # comes with vLLM
    import psutil

    if platform != "neuron":
        pytest.skip("one process has all ranks")
    assert server.process is not None
    assert server.log is not None
    processes = psutil.Process(server.process.pid).children(recursive=True)
    ranks = [p for p in processes if "trnspec.runtime.nrt_rank" in p.cmdline()]
    assert len(ranks) == 2
    os.kill(ranks[1].pid, signal.SIGKILL)
    # no answer, or one of an error
    with pytest.raises((urllib.error.URLError, ConnectionError, KeyError)):
        complete(server, PROMPTS[0], Params())
    # vLLM's status says nothing of it
    server.process.wait(120)
    _, alive = psutil.wait_procs(processes, 30)
    assert not alive
    assert "of 2 was ended by signal 9; see the log above, and start again" in server.log.read_text()
