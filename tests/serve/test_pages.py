"""vLLM's blocks over HTTP: with pieces of prompts, shared beginnings and too few blocks the ids are those of `LLM`."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from model.errors import UserError
from tests.model.demo_bundle import graphs
from tests.serve.server import NO_VLLM, Server, free_port, sample, served
from tests.serve.test_http import ask, ids_of
from trnspec.engine.request import Params
from trnspec.llm import LLM

pytestmark = pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM)
# two requests of the longest length, and one block for none
BLOCKS = 5


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo pair with a pool of few blocks and one size of chunks."""
    folder = tmp_path_factory.getbasetemp().parent / "demo_bundles"
    folder.mkdir(exist_ok=True)
    return graphs(folder, k=2, blocks=BLOCKS, chunks=(32,)).bundle.path


@pytest.fixture(scope="module")
def events() -> str:
    """Where the server says which blocks it holds."""
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def server(bundle: Path, events: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events}
    with served(bundle, tmp_path_factory.mktemp("pages"), "--kv-events-config", json.dumps(options)) as running:
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


def _asked(client: Any, name: str, request: tuple[list[int], int, Params]) -> list[int]:
    ids, length, params = request
    more = {"max_tokens": length, "temperature": params.temperature, "seed": params.seed}
    return ids_of(ask(client, name, ids, extra_body={"ignore_eos": True}, **more))


@pytest.mark.parametrize("blocks", [2, 6])
def test_a_number_of_blocks_that_the_bundle_does_not_have_is_a_sentence(blocks: int) -> None:
    # vLLM's seam
    from serve.platform import _refuse_blocks  # noqa: PLC0415

    spec: Any = SimpleNamespace(max_len=256, pool=BLOCKS)
    for taken in (None, 3, BLOCKS):
        _refuse_blocks(spec, taken)
    with pytest.raises(UserError, match=f"num-gpu-blocks-override is {blocks}; this bundle takes 3 to 5"):
        _refuse_blocks(spec, blocks)


def test_ids_do_not_show_who_had_the_blocks(server: Server, client: Any, name: str, llm: LLM) -> None:
    requests = _requests(40)
    with ThreadPoolExecutor(8) as pool:
        online = list(pool.map(lambda request: _asked(client, name, request), requests))
    llm._eos = ()
    for request, ids in zip(requests, online, strict=True):
        prompt, length, params = request
        assert ids == list(llm.generate(prompt, params, max_new_tokens=length).ids)
    assert sample(server, "vllm:prefix_cache_hits_total") > 0
    assert sample(server, "vllm:num_preemptions_total") > 0
    assert sample(server, "vllm:kv_cache_usage_perc") == 0


def test_the_second_of_two_like_prompts_pays_for_its_last_block(server: Server, client: Any, name: str) -> None:
    rng = random.Random(2)
    prompt = [rng.randrange(1, 400) for _ in range(140)]
    before = sample(server, "vllm:prefix_cache_hits_total")
    first, second = (_asked(client, name, (prompt, 8, Params(0.5, seed=3))) for _ in range(2))
    assert first == second
    assert sample(server, "vllm:prefix_cache_hits_total") - before == 128


@pytest.mark.parametrize("clients", [1, 2])
def test_no_piece_of_a_prompt_is_longer_than_its_graph(server: Server, client: Any, name: str, clients: int) -> None:
    rng = random.Random(40 + clients)
    prompts = [[rng.randrange(1, 400) for _ in range(160)] for _ in range(clients)]
    before = sample(server, "trnspec_chunks_total")
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda prompt: _asked(client, name, (prompt, 1, Params())), prompts))
    # with a piece longer by what is meant for steps, or shorter, there would be more
    assert sample(server, "trnspec_chunks_total") - before == clients * 160 / 32


def test_a_router_hears_which_blocks_there_are(client: Any, name: str, events: str) -> None:
    # vLLM's seams
    import msgspec  # noqa: PLC0415
    import zmq  # noqa: PLC0415
    from vllm.distributed.kv_events import BlockStored, KVEventBatch  # noqa: PLC0415

    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    rng, stored, removed = random.Random(3), set[Any](), set[Any]()
    with zmq.Context() as context, context.socket(zmq.SUB) as heard:
        heard.setsockopt(zmq.SUBSCRIBE, b"")
        # vLLM connects to an address without a wildcard, after a while
        heard.bind(events)
        for _ in range(40):
            _asked(client, name, ([rng.randrange(1, 400) for _ in range(130)], 2, Params()))
            while heard.poll(200):
                for event in decoder.decode(heard.recv_multipart()[2]).events:
                    assert not isinstance(event, BlockStored) or event.block_size == 128
                    (stored if isinstance(event, BlockStored) else removed).update(event.block_hashes)
            if removed & stored:
                break
    assert removed & stored


def test_penalties_count_the_ids_of_a_beginning_that_was_there(client: Any, name: str, llm: LLM) -> None:
    prompt = list(range(1, 140))
    more = {"max_tokens": 12, "temperature": 0.8, "seed": 5, "extra_body": {"repetition_penalty": 1.4}}
    first, second = (ids_of(ask(client, name, prompt, **more)) for _ in range(2))
    assert (
        first
        == second
        == list(llm.generate(prompt, Params(0.8, seed=5, repetition_penalty=1.4), max_new_tokens=12).ids)
    )


def test_scores_of_a_prompt_in_pieces(client: Any, name: str, llm: LLM) -> None:
    prompt = list(range(3, 143))
    offline = llm.generate(prompt, max_new_tokens=2, prompt_logprobs=0, logprobs=0)
    for _ in range(2):
        answer = ask(client, name, prompt, max_tokens=2, temperature=0, echo=True, logprobs=0)
        logprobs = answer.choices[0].logprobs.token_logprobs
        assert logprobs[1:140] == pytest.approx([s.logprob for s in offline.prompt_scores], abs=1e-5)
