"""Bodies over HTTP and the statuses that they get: every parameter is served, or a 400 with a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.demo_bundle import PROMPTS
from tests.serve.server import OVER_HTTP, Server

pytestmark = OVER_HTTP
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_USER = {"role": "user", "content": "a"}
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
_IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
_START: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0},
    CHAT: {"messages": [_USER], "max_tokens": 8, "temperature": 0},
}
# served for completions and chats alike
_SERVED: list[dict[str, Any]] = [
    {"temperature": 0.7, "seed": 3, "top_p": 0.9, "top_k": 20, "min_p": 0.1},
    {"temperature": 0.7, "n": 2},
    {"temperature": 0.7, "seed": -3},
    {"use_beam_search": True, "n": 2},
    {"stop": ["7"], "include_stop_str_in_output": True, "stop_token_ids": [5]},
    {"ignore_eos": True, "min_tokens": 8, "skip_special_tokens": False},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": {"17": 5.0}, "bad_words": ["7"], "allowed_token_ids": [12, 17, 19, 20, 221]},
    {"truncate_prompt_tokens": 8, "prompt_logprobs": 1, "return_token_ids": True},
    {"user": "a", "priority": 0, "request_id": "a", "stream": False, "length_penalty": 2.0},
    {"structured_outputs": {"choice": ["odd", "even"]}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}},
]
# a path -> bodies that are refused, and a part of the sentence
_REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((path, more, word) for path in (COMPLETIONS, CHAT) for more, word in (
        ({"vllm_xargs": {"a": 1}}, "extra_args is not served"),
        ({"kv_transfer_params": {"a": 1}}, "extra_args is not served"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"repetition_penalty": 1e9}, "repetition-penalty"),
        ({"logit_bias": {"2048": 10}}, "2048"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"seed": 1 << 70}, ""),
        ({"top_k": 1 << 24, "temperature": 0.5}, "top-k"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, ""),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"structured_outputs": {"regex": "(("}}, ""),
    )),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"logprob_token_ids": [5]}, ""),
    (COMPLETIONS, {"watermarking": {"gamma": 0.5, "delta": 2.0}}, ""),
    (COMPLETIONS, {"repetition_detection": {"max_pattern_size": 4, "min_count": 2}}, ""),
    (COMPLETIONS, {"suffix": " end"}, "suffix"),
    (COMPLETIONS, {"prompt_embeds": "AAAA"}, ""),
    (COMPLETIONS, {"prompt": [[5, 6], [5, 2048]]}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 256}, ""),
    (COMPLETIONS, {"prompt": ""}, ""),
    (CHAT, {"messages": []}, ""),
    (CHAT, {"messages": [{"role": "user", "content": [_IMAGE]}]}, "multimodal"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, ""),
    ("/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [5, 6]}, ""),
]  # fmt: skip
# deeper than a reader of JSON goes
_DEEP, _NESTED = b'{"a":' * 20000, b'{"prompt": "a", "user": ' + b"[" * 3000 + b"]" * 3000 + b"}"
# endpoints whose clients give no seed, and the field of their answer that has text
_SAMPLED: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/responses": ({"input": "a", "max_output_tokens": 32}, "output"),
    "/v1/messages": ({"messages": [_USER], "max_tokens": 32}, "content"),
    "/invocations": ({"prompt": "a", "max_tokens": 32}, "choices"),
}


def test_what_is_served_is_answered(server: Server, name: str) -> None:
    for path, start in _START.items():
        for more in _SERVED:
            status, answer = server.post(path, {"model": name} | start | more)
            assert status == 200, (path, more, answer)
            assert len(answer["choices"]) == more.get("n", 1)


def test_what_is_not_served_is_a_400_with_a_sentence(server: Server, name: str) -> None:
    for path, more, word in _REFUSED:
        status, answer = server.post(path, {"model": name} | _START.get(path, {}) | more)
        assert status == 400, (path, more, answer)
        message = answer["error"]["message"]
        assert len(message) > 10
        assert word in message, (path, more, message)
    assert server.post(COMPLETIONS, {"model": "no-such-model"} | _START[COMPLETIONS])[0] == 404


def test_a_body_that_is_no_request_is_a_400(server: Server) -> None:
    for body in (b"", b"no json", b"[]", b'{"prompt": "a"', b"\xff\xfe", _DEEP, _NESTED):
        status, answer = server.post(COMPLETIONS, body)
        assert status == 400, (body[:20], answer)
    assert server.status("/health") == 200


@pytest.mark.parametrize("path", _SAMPLED)
def test_every_endpoint_samples_without_a_seed(server: Server, name: str, path: str) -> None:
    body, field = _SAMPLED[path]
    answers = [server.post(path, {"model": name, **body}) for _ in range(4)]
    assert [status for status, _ in answers] == [200] * 4, answers
    # each has its seed: no four texts of this length are equal by chance
    assert len({str([part.get("text") or part.get("content") for part in a[field]]) for _, a in answers}) > 1
