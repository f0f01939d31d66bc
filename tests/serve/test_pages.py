"""vLLM's KV blocks over HTTP: with chunks of prompts, shared prefixes and preemption the tokens are those of `LLM`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.model.demo_bundle import graphs
from tests.serve.server import NO_VLLM, Server, sample, served
from tests.serve.test_http import complete, ids_of
from trnspec.engine.request import Params
from trnspec.llm import LLM

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM)]
# two requests of the longest length, and one block for none
BLOCKS = 5


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo pair with a pool of few blocks and one size of chunks."""
    folder = tmp_path_factory.getbasetemp().parent / "demo_bundles"
    folder.mkdir(exist_ok=True)
    return graphs(folder, k=2, blocks=BLOCKS, chunks=(32,)).bundle.path


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(bundle, tmp_path_factory.mktemp("pages")) as running:
        yield running


def _requests(count: int) -> list[tuple[list[int], int, Params]]:
    """Prompts of which many begin alike, with answers that take them over the edge of a block."""
    rng = random.Random(1)
    texts = [[rng.randrange(1, 400) for _ in range(200)] for _ in range(2)]
    requests = []
    for n in range(count):
        begin = rng.choice(texts)[: rng.choice((1, 100, 127, 128, 129, 170))]
        ids = begin + [rng.randrange(1, 400) for _ in range(rng.choice((1, 9)))]
        requests.append((ids, rng.randint(20, 70), Params(0.9 * (n % 2), seed=n)))
    return requests


def _completed(client: Any, name: str, request: tuple[list[int], int, Params]) -> list[int]:
    ids, length, params = request
    more = {"max_tokens": length, "temperature": params.temperature, "seed": params.seed}
    return ids_of(complete(client, name, ids, extra_body={"ignore_eos": True}, **more))


def test_ids_do_not_show_who_had_the_blocks(server: Server, client: Any, name: str, llm: LLM) -> None:
    requests = _requests(40)
    with ThreadPoolExecutor(8) as pool:
        online = list(pool.map(lambda request: _completed(client, name, request), requests))
    llm._eos = ()
    for request, ids in zip(requests, online, strict=True):
        prompt, length, params = request
        assert ids == list(llm.generate(prompt, params, max_new_tokens=length).ids)
    assert sample(server, "vllm:prefix_cache_hits_total") > 0
    assert sample(server, "vllm:num_preemptions_total") > 0
    assert sample(server, "vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("clients", [1, 2])
def test_no_piece_of_a_prompt_is_longer_than_its_graph(server: Server, client: Any, name: str, clients: int) -> None:
    rng = random.Random(40 + clients)
    prompts = [[rng.randrange(1, 400) for _ in range(160)] for _ in range(clients)]
    before = sample(server, "trnspec_prefill_chunks_total")
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda prompt: _completed(client, name, (prompt, 1, Params())), prompts))
    # with a piece longer by what is meant for steps, or shorter, there would be more
    assert sample(server, "trnspec_prefill_chunks_total") - before == clients * 160 / 32
