"""Over HTTP, nothing that a request may ask is served by halves: it is on the list, or a 400, or changes no id."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.model.demo_bundle import PROMPTS
from tests.serve.server import NO_VLLM, Server

pytestmark = pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM)
ASKED = {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0}
# fields of a completion's body, beside those of test_http
REFUSED: list[dict[str, Any]] = [
    {"watermarking": {"gamma": 0.5, "delta": 2.0}},
    {"thinking_token_budget": 4},
    {"repetition_detection": {"max_pattern_size": 4, "min_count": 2}},
    {"logprob_token_ids": [5]},
    {"use_beam_search": True, "n": 2},
    {"suffix": " end"},
    {"prompt_embeds": "AAAA"},
    {"routed_experts_prompt_start": 1},
    {"prompt": [[5, 6], [5, 2048]]},
    {"prompt": ""},
    {"prompt": []},
    {"n": 0},
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"temperature": "hot"},
    {"seed": 1 << 70},
    {"top_k": 1 << 24, "temperature": 0.5},
    {"min_p": 2},
    {"stop": [""]},
    {"model": "no-such-model"},
]
# what changes nothing for a bundle
IDLE: list[dict[str, Any]] = [{"user": "a"}, {"priority": 0}, {"length_penalty": 2.0}, {"request_id": "a"}]


# deeper than a reader of JSON goes
DEEP, NESTED = b'{"a":' * 20000, b'{"prompt": "a", "user": ' + b"[" * 3000 + b"]" * 3000 + b"}"
# endpoints whose clients have no seed, and the field of their answer that has text
# long enough that no four answers are equal by chance
SAMPLED: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/responses": ({"input": "a", "max_output_tokens": 32}, "output"),
    "/v1/messages": ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 32}, "content"),
    "/invocations": ({"prompt": "a", "max_tokens": 32}, "choices"),
}


def post(server: Server, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    """The status and the JSON of an answer."""
    request = urllib.request.Request(server.url + path, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize("more", REFUSED, ids=[f"{n}-{next(iter(m))}" for n, m in enumerate(REFUSED)])
def test_a_completion_of_what_is_not_served_is_refused(server: Server, name: str, more: dict[str, Any]) -> None:
    status, answer = post(server, "/v1/completions", json.dumps({"model": name} | ASKED | more).encode())
    assert status == (404 if "model" in more else 400), answer
    assert len(answer["error"]["message"]) > 10


@pytest.mark.parametrize("more", IDLE, ids=[next(iter(m)) for m in IDLE])
def test_what_means_nothing_to_a_bundle_changes_no_id(server: Server, name: str, more: dict[str, Any]) -> None:
    plain = {"model": name, "return_token_ids": True} | ASKED
    answers = [post(server, "/v1/completions", json.dumps(plain | extra).encode()) for extra in ({}, more)]
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0][1]["choices"][0]["token_ids"] == answers[1][1]["choices"][0]["token_ids"]


@pytest.mark.parametrize("more", [{"tools": [{"type": "function", "function": {"name": "f"}}]}, {"messages": []}])
def test_a_chat_of_what_is_not_served_is_refused(server: Server, name: str, more: dict[str, Any]) -> None:
    asked = {"model": name, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0} | more
    status, answer = post(server, "/v1/chat/completions", json.dumps(asked).encode())
    assert status == 400, answer


@pytest.mark.parametrize("path", SAMPLED)
def test_every_endpoint_samples_without_a_seed(server: Server, name: str, path: str) -> None:
    asked, field = SAMPLED[path]
    answers = [post(server, path, json.dumps({"model": name, **asked}).encode()) for _ in range(4)]
    assert [status for status, _ in answers] == [200] * 4, answers
    # a seed of its own for each
    assert len({str([part.get("text") or part.get("content") for part in a[field]]) for _, a in answers}) > 1


def test_scoring_is_refused_by_its_name(server: Server, name: str) -> None:
    asked = {"model": name, "query": "a", "items": ["b"], "label_token_ids": [5, 6]}
    status, answer = post(server, "/generative_scoring", json.dumps(asked).encode())
    assert status == 400
    assert answer["error"]["message"].startswith("generative scoring is not served")


@pytest.mark.parametrize("body", [b"", b"no json", b"[]", b'{"prompt": "a"', b"\xff\xfe", DEEP, NESTED], ids=range(7))
def test_a_body_that_is_no_request_is_refused(server: Server, body: bytes) -> None:
    status, answer = post(server, "/v1/completions", body)
    assert status == 400, answer


def test_the_server_is_up_after_all_of_it(server: Server, name: str) -> None:
    status, answer = post(server, "/v1/completions", json.dumps({"model": name} | ASKED).encode())
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
