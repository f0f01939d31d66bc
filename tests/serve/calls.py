"""Calls that clients of an OpenAI-compatible server make, and the outcome of each at a server.

The openai package sends completions, chats and responses; the rest is posted as JSON. A call is answered if the server
says 200 and the answer has the requested part; the outcome is the status otherwise.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

COMPLETIONS, CHAT, RESPONSES = "completions", "chat", "responses"
_PROMPT, _WORDS = "Count from 1 to 20: 1, 2, 3,", 12
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
_TOOL = {
    "type": "function",
    "function": {"name": "count", "description": "Count to a number.", "parameters": _SCHEMA},
}


class Call(NamedTuple):
    """A path of the API or the name of an endpoint of the openai package, a body, and what an answer must have."""

    name: str
    path: str
    body: dict[str, Any]
    has: Callable[[Any], bool] = bool
    method: str = "POST"


def _first(answer: Any) -> Any:
    return answer["choices"][0]


def _text(answer: Any) -> bool:
    choice = _first(answer)
    return bool(choice.get("text") or (choice.get("message") or {}).get("content"))


def _logprobs(count: int) -> Callable[[Any], bool]:
    def has(answer: Any) -> bool:
        found = _first(answer)["logprobs"]
        if "content" in found:
            return all(len(token["top_logprobs"]) >= count for token in found["content"])
        return all(len(top) >= count for top in found["top_logprobs"] if top) and bool(found["token_logprobs"])

    return has


def _choices(count: int) -> Callable[[Any], bool]:
    return lambda answer: len(answer["choices"]) == count


# of completions and chats alike: a name, the parameters, what the answer must have
_BOTH: tuple[tuple[str, dict[str, Any], Callable[[Any], bool]], ...] = (
    ("plain", {}, _text),
    ("temperature 0.7, seed", {"temperature": 0.7, "seed": 3}, _text),
    ("temperature 0.7, no seed", {"temperature": 0.7}, _text),
    ("top_p", {"temperature": 0.7, "top_p": 0.9}, _text),
    ("top_k", {"temperature": 0.7, "top_k": 20}, _text),
    ("min_p", {"temperature": 0.7, "min_p": 0.1}, _text),
    ("n 2", {"n": 2, "temperature": 0.7}, _choices(2)),
    ("stop", {"stop": ["7"]}, _text),
    ("stop_token_ids", {"stop_token_ids": [5]}, _text),
    ("include_stop_str_in_output", {"stop": ["7"], "include_stop_str_in_output": True}, _text),
    ("ignore_eos", {"ignore_eos": True}, _text),
    ("skip_special_tokens false", {"skip_special_tokens": False}, _text),
    ("presence_penalty", {"presence_penalty": 1.5}, _text),
    ("frequency_penalty", {"frequency_penalty": 0.5}, _text),
    ("repetition_penalty", {"repetition_penalty": 1.2}, _text),
    ("logit_bias", {"logit_bias": {"17": 5.0}}, _text),
    ("min_tokens", {"min_tokens": 8}, _text),
    ("bad_words", {"bad_words": ["7"]}, _text),
    ("allowed_token_ids", {"allowed_token_ids": [12, 17, 19, 20, 221]}, _text),
    ("return_token_ids", {"return_token_ids": True}, lambda a: bool(_first(a)["token_ids"])),
    ("return_tokens_as_token_ids", {"return_tokens_as_token_ids": True}, _text),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 8}, _text),
    (
        "prompt_logprobs",
        {"prompt_logprobs": 1},
        lambda a: bool(a.get("prompt_logprobs") or _first(a)["prompt_logprobs"]),
    ),
    ("user", {"user": "someone"}, _text),
    ("priority 0", {"priority": 0}, _text),
    ("request_id", {"request_id": "one"}, _text),
    ("structured: regex", {"structured_outputs": {"regex": "[a-c]{3}"}}, _text),
    ("structured: choice", {"structured_outputs": {"choice": ["odd", "even"]}}, _text),
    ("structured: grammar", {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, _text),
    ("structured: json", {"structured_outputs": {"json": _SCHEMA}}, _text),
    ("response_format json_object", {"response_format": {"type": "json_object"}}, _text),
    (
        "response_format json_schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}},
        _text,
    ),
    ("use_beam_search", {"use_beam_search": True, "n": 2}, _text),
    ("vllm_xargs", {"vllm_xargs": {"a": 1}}, _text),
    ("kv_transfer_params", {"kv_transfer_params": {"a": 1}}, _text),
    ("thinking_token_budget", {"thinking_token_budget": 5}, _text),
)
_COMPLETION_ONLY = (
    ("a list of prompts", {"prompt": [_PROMPT, "a"]}, _choices(2)),
    ("token ids", {"prompt": [221, 17, 12]}, _text),
    ("lists of token ids", {"prompt": [[221, 17], [12]]}, _choices(2)),
    ("echo", {"echo": True}, lambda a: _first(a)["text"].startswith("Count")),
    ("logprobs 0", {"logprobs": 0}, _logprobs(0)),
    ("logprobs 5", {"logprobs": 5}, _logprobs(5)),
    ("echo and logprobs, one id", {"echo": True, "logprobs": 1, "max_tokens": 1}, _logprobs(1)),
    ("suffix", {"suffix": "the end"}, _text),
    ("prompt_embeds", {"prompt_embeds": "AAAA"}, _text),
)
_CHAT_ONLY = (
    ("system message",
     {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]}, _text),
    ("several turns", {"messages": [{"role": r, "content": "a"} for r in ("user", "assistant", "user")]}, _text),
    ("content parts", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, _text),
    ("an image",
     {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}, _text),
    ("logprobs", {"logprobs": True}, _logprobs(0)),
    ("top_logprobs 5", {"logprobs": True, "top_logprobs": 5}, _logprobs(5)),
    ("top_logprobs 20", {"logprobs": True, "top_logprobs": 20}, _logprobs(20)),
    ("chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": False}}, _text),
    ("continue_final_message", {"messages": [{"role": "assistant", "content": "1, 2,"}], "continue_final_message": True,
                                "add_generation_prompt": False}, _text),
    ("tools, auto", {"tools": [_TOOL]}, _choices(1)),
    ("tools, required", {"tools": [_TOOL], "tool_choice": "required", "max_tokens": 60}, _choices(1)),
    ("tools, named", {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "count"}}},
     _choices(1)),
    ("tools, none", {"tools": [_TOOL], "tool_choice": "none"}, _text),
    ("reasoning_effort", {"reasoning_effort": "low"}, _text),
)  # fmt: skip
_MESSAGES = [{"role": "user", "content": _PROMPT}]
_OTHERS = (
    Call("responses", RESPONSES, {"input": _PROMPT}),
    Call("responses, temperature 0", RESPONSES, {"input": _PROMPT, "temperature": 0}),
    Call("responses, stream", RESPONSES, {"input": _PROMPT, "stream": True}),
    Call("messages", "/v1/messages", {"messages": _MESSAGES, "max_tokens": _WORDS}),
    Call("messages, temperature 0", "/v1/messages", {"messages": _MESSAGES, "max_tokens": _WORDS, "temperature": 0}),
    Call("messages, count_tokens", "/v1/messages/count_tokens", {"messages": _MESSAGES}),
    Call("tokenize", "/tokenize", {"prompt": "a b"}, lambda a: bool(a["tokens"])),
    Call("detokenize", "/detokenize", {"tokens": [17, 12]}, lambda a: bool(a["prompt"])),
    Call("invocations", "/invocations", {"prompt": _PROMPT, "max_tokens": _WORDS}),
    Call("generative_scoring", "/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [17, 12]}),
    Call("embeddings", "/v1/embeddings", {"input": "a"}),
    Call("score", "/score", {"text_1": "a", "text_2": "b"}),
    Call("models", "/v1/models", {}, lambda a: a["data"][0]["id"] == "m", "GET"),
    Call("version", "/version", {}, method="GET"),
    Call("health", "/health", {}, lambda _: True, method="GET"),
    Call("ping", "/ping", {}, lambda _: True, method="GET"),
    Call("metrics", "/metrics", {}, method="GET"),
)


def calls() -> Iterator[Call]:
    """Every call of the table."""
    for path, own in ((COMPLETIONS, _COMPLETION_ONLY), (CHAT, _CHAT_ONLY)):
        start = {"prompt": _PROMPT} if path == COMPLETIONS else {"messages": _MESSAGES}
        for name, more, has in (*_BOTH, *own):
            yield Call(f"{path}: {name}", path, start | {"max_tokens": _WORDS, "temperature": 0} | more, has)
        for name, more in (("stream", {}), ("stream with usage", {"stream_options": {"include_usage": True}})):
            yield Call(f"{path}: {name}", path, start | {"max_tokens": _WORDS, "stream": True} | more)
    yield from _OTHERS


class _Refused(Exception):
    """A status other than 200, and its sentence."""


class Client:
    """Sends calls to one server."""

    def __init__(self, address: str) -> None:
        # both come with vLLM
        httpx, openai = (importlib.import_module(name) for name in ("httpx", "openai"))
        self._refused = (openai.APIStatusError,)
        self._sdk = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=300)
        self._http = httpx.Client(base_url=address, timeout=300)

    def outcome(self, call: Call) -> str:
        """yes, the status of a refusal with its sentence, or what the answer lacks."""
        try:
            answer = self._send(call)
        except self._refused as refused:
            return f"{refused.status_code}: {_sentence(refused.response.text)}"
        except _Refused as refused:
            return str(refused)
        try:
            return "yes" if call.has(answer) else "200 without what was asked for"
        except (LookupError, TypeError, AttributeError):
            return "200 without what was asked for"

    def _send(self, call: Call) -> Any:
        body = dict(call.body)
        if call.path == RESPONSES:
            stream = body.pop("stream", False)
            made = self._sdk.responses.create(model="m", max_output_tokens=_WORDS, stream=stream, **body)
            return [event.type for event in made] if stream else made.output
        if call.path in (COMPLETIONS, CHAT):
            endpoint = self._sdk.completions if call.path == COMPLETIONS else self._sdk.chat.completions
            given = {name: body.pop(name) for name in ("prompt", "messages", "stream") if name in body}
            made = endpoint.create(model="m", extra_body=body, **given)
            return [part.id for part in made] if given.get("stream") else made.model_dump()
        sent = self._http.request(call.method, call.path, json=({"model": "m"} | body) if body else None)
        if sent.status_code != 200:
            raise _Refused(f"{sent.status_code}: {_sentence(sent.text)}")
        return sent.json() if "json" in sent.headers.get("content-type", "") else sent.text


def _sentence(body: str) -> str:
    try:
        value = json.loads(body)
        found = value.get("error", value)
        return str(found.get("message", found) if isinstance(found, dict) else found)
    except (ValueError, AttributeError):
        return body[:200]
