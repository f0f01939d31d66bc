"""The server over HTTP: its tokens are those of `LLM`, vLLM cuts where it should, and its metrics are there."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.model.demo_bundle import PROMPTS, ROOT
from tests.serve.server import OVER_HTTP, Server, sample
from trnspec.engine.request import Params
from trnspec.llm import LLM

pytestmark = OVER_HTTP
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.9, "seed": 11, "extra_body": {"top_k": 50, "min_p": 0.02}, "top_p": 0.95}


def complete(client: Any, name: str, prompt: Any, **more: Any) -> Any:
    """A completion whose choices have their ids."""
    extra = {"return_token_ids": True} | more.pop("extra_body", {})
    return client.completions.create(model=name, prompt=prompt, extra_body=extra, **more)


def ids_of(completion: Any) -> list[int]:
    return list(completion.choices[0].token_ids)


def test_tokens_are_the_offline_ones(client: Any, name: str, llm: LLM) -> None:
    """Of more requests than slots, with uneven lengths, greedy and sampled."""
    ways = [(Params(), GREEDY), (Params(0.9, 50, 0.95, 0.02, 11), SEEDED)] * 5
    requests = list(zip(PROMPTS, [1, 33, 5, 60, 17, 2, 48, 9, 40, 25], ways, strict=False))
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = [pool.submit(complete, client, name, p, max_tokens=n, **body) for p, n, (_, body) in requests]
    for answer, (prompt, length, (params, _)) in zip(answers, requests, strict=True):
        online, offline = answer.result(), llm.generate(prompt, params, max_new_tokens=length)
        assert ids_of(online) == list(offline.ids)
        assert online.choices[0].finish_reason == {"eos": "stop", "length": "length"}[offline.finish_reason]


def test_a_stop_string_inside_a_block_cuts_the_text_before_it(client: Any, name: str) -> None:
    full = complete(client, name, PROMPTS[0], max_tokens=60, **GREEDY).choices[0].text
    for begin in (7, 11, 16):
        stop = full[begin : begin + 3]
        choice = complete(client, name, PROMPTS[0], max_tokens=60, stop=stop, **GREEDY).choices[0]
        assert (choice.text, choice.finish_reason) == (full[: full.index(stop)], "stop")


@pytest.mark.parametrize("length", [255, 250, 200])
def test_a_request_that_ends_at_the_last_token_of_the_context(client: Any, name: str, llm: LLM, length: int) -> None:
    prompt = [(7 * i) % 500 + 3 for i in range(length)]
    offline = llm.generate(prompt, max_new_tokens=256)
    online = complete(client, name, prompt, max_tokens=256 - length, extra_body={"ignore_eos": True}, **GREEDY)
    assert len(ids_of(online)) == 256 - length
    assert ids_of(online)[: len(offline.ids)] == list(offline.ids)


def test_n_samples_use_the_seeds_that_follow(client: Any, name: str, llm: LLM) -> None:
    choices = complete(client, name, PROMPTS[0], max_tokens=20, n=3, temperature=0.9, seed=5).choices
    for choice in choices:
        params = Params(0.9, seed=5 + choice.index)
        assert list(choice.token_ids) == list(llm.generate(PROMPTS[0], params, max_new_tokens=20).ids)


def test_chat_takes_the_bundles_template(client: Any, name: str, llm: LLM) -> None:
    messages = [{"role": "user", "content": PROMPTS[0]}]
    chat = client.chat.completions.create(model=name, messages=messages, max_tokens=20, **GREEDY)
    assert chat.choices[0].message.content == llm.generate(PROMPTS[0] + "\n", max_new_tokens=20).text


def test_every_metric_that_a_page_names_is_shown(server: Server) -> None:
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("docs/serving.md", "deploy/README.md")]
    names = set(re.findall(r"\b(?:vllm:|trnspec_)[a-z_]+[a-z]", " ".join(pages)))
    assert {"trnspec_drafter_info", "vllm:kv_cache_usage_perc"} < names
    shown = {line.split("{")[0].split(" ")[0] for line in server.get("/metrics").splitlines()}
    # a histogram is shown as its parts
    assert {name for name in names if not shown & {name, f"{name}_count"}} == set()
    assert sample(server, "trnspec_steps_total") > 0
