"""The server over HTTP: its ids are those of `LLM`, vLLM cuts where it should, and what is not served is a 400."""

from __future__ import annotations

import json
import re
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.model.demo_bundle import PROMPTS, ROOT
from tests.serve.server import NO_VLLM, Server, sample
from trnspec.engine.request import Params
from trnspec.llm import LLM

pytestmark = pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM)
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.9, "seed": 11, "extra_body": {"top_k": 50, "min_p": 0.02}, "top_p": 0.95}


def ask(client: Any, name: str, prompt: Any, **more: Any) -> Any:
    """A completion whose choices have their ids."""
    extra = {"return_token_ids": True} | more.pop("extra_body", {})
    return client.completions.create(model=name, prompt=prompt, extra_body=extra, **more)


def ids_of(completion: Any) -> list[int]:
    return list(completion.choices[0].token_ids)


@pytest.mark.parametrize("prompt", PROMPTS[:4])
def test_greedy_ids_are_the_offline_ones(client: Any, name: str, llm: LLM, prompt: str) -> None:
    offline = llm.generate(prompt, max_new_tokens=40)
    online = ask(client, name, prompt, max_tokens=40, **GREEDY)
    assert ids_of(online) == list(offline.ids)
    assert online.choices[0].finish_reason == {"eos": "stop", "length": "length"}[offline.finish_reason]


@pytest.mark.parametrize("prompt", PROMPTS[:4])
def test_seeded_ids_are_the_offline_ones(client: Any, name: str, llm: LLM, prompt: str) -> None:
    offline = llm.generate(prompt, Params(0.9, 50, 0.95, 0.02, 11), max_new_tokens=40)
    assert ids_of(ask(client, name, prompt, max_tokens=40, **SEEDED)) == list(offline.ids)


def test_more_requests_than_slots_with_uneven_lengths(client: Any, name: str, llm: LLM) -> None:
    lengths = [1, 33, 5, 60, 17, 2, 48, 9, 25, 40]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(lengths))]
    with ThreadPoolExecutor(len(lengths)) as pool:
        asked = [
            pool.submit(ask, client, name, p, max_tokens=n, temperature=0.8, seed=i)
            for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
        ]
        online = [ids_of(a.result()) for a in asked]
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        assert online[i] == list(llm.generate(prompt, Params(0.8, seed=i), max_new_tokens=length).ids)


def test_a_prompt_of_one_id_beside_one_that_runs(client: Any, name: str, llm: LLM) -> None:
    """vLLM takes it for a step, and refuses more ids than a step can have; all that is guessed after it is right."""
    long = {"extra_body": {"ignore_eos": True}, "max_tokens": 240, "stream": True} | GREEDY
    offline = list(llm.generate("{", max_new_tokens=20).ids)
    for _ in range(3):
        stream = ask(client, name, PROMPTS[0], **long)
        next(iter(stream))
        assert ids_of(ask(client, name, "{", max_tokens=20, **GREEDY)) == offline
        stream.close()


def test_a_stream_joins_to_the_text_that_comes_at_once(client: Any, name: str) -> None:
    whole = ask(client, name, PROMPTS[0], max_tokens=40, **SEEDED).choices[0].text
    pieces = [c.choices[0].text for c in ask(client, name, PROMPTS[0], max_tokens=40, stream=True, **SEEDED)]
    assert "".join(pieces) == whole


def test_a_stop_string_inside_a_block_cuts_the_text_before_it(client: Any, name: str) -> None:
    whole = ask(client, name, PROMPTS[0], max_tokens=60, **GREEDY).choices[0].text
    for begin in (7, 11, 16):
        stop = whole[begin : begin + 3]
        choice = ask(client, name, PROMPTS[0], max_tokens=60, stop=stop, **GREEDY).choices[0]
        assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_a_stop_id_inside_a_block_ends_it(client: Any, name: str) -> None:
    whole = ids_of(ask(client, name, PROMPTS[0], max_tokens=40, **GREEDY))
    for place in (2, 5, 9):
        extra = {"stop_token_ids": [whole[place]]}
        ids = ids_of(ask(client, name, PROMPTS[0], max_tokens=40, extra_body=extra, **GREEDY))
        assert ids == whole[: whole.index(whole[place]) + 1]


def test_an_end_token_ends_it_and_ignore_eos_does_not(client: Any, name: str, llm: LLM) -> None:
    """Of the demo's prompts at temperature 1, some seed ends by its end token."""
    for seed in range(40):
        offline = llm.generate(PROMPTS[0], Params(1.0, seed=seed), max_new_tokens=200)
        if offline.finish_reason == "eos":
            break
    else:
        pytest.fail("no seed of 40 ends by the end token: nothing is tested")
    asked = {"max_tokens": 200, "temperature": 1.0, "seed": seed}
    online = ask(client, name, PROMPTS[0], **asked)
    assert (ids_of(online), online.choices[0].finish_reason) == (list(offline.ids), "stop")
    longer = ids_of(ask(client, name, PROMPTS[0], extra_body={"ignore_eos": True}, **asked))
    assert longer[: len(offline.ids)] == list(offline.ids)
    assert len(longer) > len(offline.ids)


@pytest.mark.parametrize("length", [255, 250, 200])
def test_a_request_that_ends_at_the_last_token_of_the_context(client: Any, name: str, llm: LLM, length: int) -> None:
    prompt = [(7 * i) % 500 + 3 for i in range(length)]
    offline = llm.generate(prompt, max_new_tokens=256)
    online = ask(client, name, prompt, max_tokens=256 - length, extra_body={"ignore_eos": True}, **GREEDY)
    assert len(ids_of(online)) == 256 - length
    assert ids_of(online)[: len(offline.ids)] == list(offline.ids)


def test_a_client_that_leaves_mid_stream_frees_its_slot(client: Any, name: str, llm: LLM) -> None:
    extra = {"extra_body": {"ignore_eos": True}}
    for _ in range(6):
        stream = ask(client, name, PROMPTS[0], max_tokens=200, stream=True, **extra, **GREEDY)
        next(iter(stream))
        stream.close()
    offline = llm.generate(PROMPTS[1], max_new_tokens=30)
    assert ids_of(ask(client, name, PROMPTS[1], max_tokens=30, **GREEDY)) == list(offline.ids)


def test_clients_that_leave_the_queue_are_forgotten(client: Any, name: str, llm: LLM) -> None:
    """Every slot is taken; who leaves has no slot, and the engine never heard of it."""
    # vendor seam: comes with vLLM
    import openai  # noqa: PLC0415

    long = {"extra_body": {"ignore_eos": True}, "max_tokens": 240, "stream": True} | GREEDY
    streams = [ask(client, name, PROMPTS[0], **long) for _ in range(8)]
    for stream in streams[:4]:
        next(iter(stream))
    for _ in range(3):
        with pytest.raises(openai.APITimeoutError):
            ask(client.with_options(timeout=0.05), name, PROMPTS[1], max_tokens=200, **GREEDY)
    for stream in streams:
        stream.close()
    offline = llm.generate(PROMPTS[1], max_new_tokens=30)
    assert ids_of(ask(client, name, PROMPTS[1], max_tokens=30, **GREEDY)) == list(offline.ids)


def test_running_requests_come_back_to_none(server: Server) -> None:
    end = time.monotonic() + 30
    while (running := sample(server, "vllm:num_requests_running")) and time.monotonic() < end:
        time.sleep(0.5)
    assert running == 0


def test_n_draws_the_seeds_that_follow(client: Any, name: str, llm: LLM) -> None:
    choices = ask(client, name, PROMPTS[0], max_tokens=20, n=3, temperature=0.9, seed=5).choices
    for choice in choices:
        params = Params(0.9, seed=5 + choice.index)
        assert list(choice.token_ids) == list(llm.generate(PROMPTS[0], params, max_new_tokens=20).ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_drawn_seed_is_told_and_gives_the_same_bytes(client: Any, name: str, llm: LLM, stream: bool) -> None:
    raw = client.completions.with_raw_response.create(
        model=name, prompt=PROMPTS[0], max_tokens=30, temperature=1.0, stream=stream
    )
    seed = int(raw.headers["x-trnspec-seed"])
    text = "".join(c.choices[0].text for c in raw.parse()) if stream else raw.parse().choices[0].text
    assert text == ask(client, name, PROMPTS[0], max_tokens=30, temperature=1.0, seed=seed).choices[0].text


def test_chat_takes_the_bundles_template(client: Any, name: str, llm: LLM) -> None:
    messages = [{"role": "user", "content": PROMPTS[0]}]
    chat = client.chat.completions.create(model=name, messages=messages, max_tokens=20, **GREEDY)
    assert chat.choices[0].message.content == llm.generate(PROMPTS[0] + "\n", max_new_tokens=20).text


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("logprobs", {"logprobs": 21}),
    ("prompt_logprobs", {"extra_body": {"prompt_logprobs": 21}}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("repetition-penalty", {"extra_body": {"repetition_penalty": 1e9}}),
    ("2048", {"logit_bias": {"2048": 10}}),
    ("min_tokens", {"extra_body": {"min_tokens": 9}}),
    ("vllm_xargs", {"extra_body": {"vllm_xargs": {"a": 1}}}),
    ("kv_transfer_params", {"extra_body": {"kv_transfer_params": {"a": 1}}}),
    ("use_beam_search", {"n": 2, "extra_body": {"use_beam_search": True}}),
    ("seed", {"seed": -3}),
    ("prompt", {"prompt": [5, 2048]}),
    ("", {"prompt": [5] * 256}),
    ("temperature", {"temperature": -1}),
    ("top_p", {"top_p": 0}),
]


@pytest.mark.parametrize(("parameter", "more"), REFUSED, ids=[f"{p}-{i}" for i, (p, _) in enumerate(REFUSED)])
def test_what_is_not_served_is_a_400_with_a_sentence(
    client: Any, name: str, parameter: str, more: dict[str, Any]
) -> None:
    import openai  # noqa: PLC0415

    asked = {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0.5} | more
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, name, **asked)
    message = json.loads(refused.value.response.text)["error"]["message"]
    assert parameter in message
    assert len(message) > 20


def test_the_server_is_up_after_all_refusals(server: Server, client: Any, name: str) -> None:
    server.get("/health")
    assert len(ids_of(ask(client, name, PROMPTS[0], max_tokens=5, **GREEDY))) == 5


def test_our_own_metrics_are_beside_vllms(server: Server) -> None:
    steps, tokens = sample(server, "trnspec_steps_total"), sample(server, "trnspec_tokens_total")
    assert tokens > steps > 0
    assert 0 < sample(server, "trnspec_drafts_kept_total") < sample(server, "trnspec_drafted_total")
    assert sample(server, "trnspec_host_gap_seconds_count") > 0
    assert sample(server, "vllm:generation_tokens_total") > 0


def test_every_metric_that_a_page_names_is_shown(server: Server) -> None:
    pages = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("serving.md", "operating.md")]
    names = set(re.findall(r"\b(?:vllm:|trnspec_)[a-z_]+[a-z]", " ".join(pages)))
    assert {"trnspec_drafter_info", "vllm:kv_cache_usage_perc"} < names
    shown = {line.split("{")[0].split(" ")[0] for line in server.get("/metrics").splitlines()}
    # a histogram is shown as its parts
    assert {name for name in names if not shown & {name, f"{name}_count"}} == set()
    assert '{kind="chain"} 1.0' in next(
        li for li in server.get("/metrics").splitlines() if "trnspec_drafter_info{" in li
    )


def test_a_start_ends_with_a_request_to_try_and_tells_nothing_false(server: Server, name: str) -> None:
    if server.log is None:
        pytest.skip("the server is not ours, and neither is its log")
    lines = server.log.read_text(encoding="utf-8").splitlines()
    (place,) = (n for n, line in enumerate(lines) if "Application startup complete" in line)
    # whoever waits for the server calls it meanwhile, and each call it answers is a line too
    line = next(li for li in lines[place + 1 :] if '"GET /' not in li)
    assert line.startswith(f"curl {server.url}/v1/completions ")
    body = json.loads(shlex.split(line)[-1])
    assert (body["model"], body["max_tokens"]) == (name, 64)
    start = "\n".join(lines[:place])
    assert "slots    4, each of 256 tokens" in start
    for false in ("Maximum concurrency", "custom scheduler", "officially support"):
        assert false not in start
