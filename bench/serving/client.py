"""One streaming request to an OpenAI-compatible endpoint, timed as its events arrive."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2

from bench.serving.options import Options
from bench.serving.sample import Sample
from bench.serving.sse import DONE, Events
from model.errors import UserError

_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True)
class Endpoint:
    """A server under load: its part in the comparison, its address, the model it is asked for."""

    variant: str
    url: str
    model: str


@dataclass(frozen=True)
class Prompt:
    """A test case; `tier` is the entropy class its answer is expected to have."""

    name: str
    text: str
    tier: str = "unclassified"
    source: str = ""


def http_client(options: Options) -> httpx2.AsyncClient:
    """A client without a limit on connections; OPENAI_API_KEY is sent when the environment has it."""
    key = os.environ.get("OPENAI_API_KEY")
    return httpx2.AsyncClient(
        timeout=httpx2.Timeout(options.timeout),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        trust_env=False,
    )


async def find_endpoint(client: httpx2.AsyncClient, variant: str, url: str, model: str) -> Endpoint:
    """The endpoint with its model's name, asked of the server unless given; UserError if nobody answers."""
    try:
        answer = await client.get(f"{url}/v1/models", timeout=30)
        answer.raise_for_status()
        served = [entry["id"] for entry in answer.json()["data"]]
    except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{url}/v1/models gave no list of models ({type(error).__name__}); "
            f"start the {variant} server and check its address"
        ) from error
    if not served or (model and model not in served):
        raise UserError(f"{url} serves {', '.join(served) or 'no model'}, not {model!r}; correct --model")
    return Endpoint(variant, url, model or served[0])


def body(options: Options, endpoint: Endpoint, prompt: Prompt, index: int, temperature: float) -> dict[str, Any]:
    """The request; whatever the answer depends on is explicit in it."""
    asked: dict[str, Any] = {
        "model": endpoint.model,
        "max_tokens": options.max_tokens,
        "temperature": temperature,
        "seed": options.seed + index,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.api == "completions":
        asked["prompt"] = prompt.text
    else:
        asked["messages"] = [{"role": "user", "content": prompt.text}]
        if options.thinking != "unset":
            asked["chat_template_kwargs"] = {"enable_thinking": options.thinking == "on"}
    if options.token_ids:
        asked["return_token_ids"] = True
    if options.ignore_eos:
        asked["ignore_eos"] = True
    return asked


@dataclass
class _Stream:
    """What the events of one answer have said so far."""

    text_at: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    ids: list[int] | None = None
    end_s: float = 0.0
    lines: int = 0
    usage: dict[str, Any] | None = None
    finish: str | None = None
    error: str | None = None
    done: bool = False

    def take(self, data: str, now: float) -> None:
        self.lines += 1
        if data == DONE:
            self.done = True
            return
        try:
            event = json.loads(data)
            if event.get("error"):
                self.error = f"error in the stream: {_short(event['error'])}"
            self.usage = event.get("usage") or self.usage
            for choice in event.get("choices") or ():
                self._choice(choice, now)
        except (ValueError, AttributeError, TypeError):
            self.error = f"an event is not what the API says: {_short(data)}"

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        delta = choice.get("delta") or {}
        pieces = (delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content"), choice.get("text"))
        text = "".join(piece for piece in pieces if piece)
        if text:
            self.text_at.append(now)
            self.text.append(text)
        if choice.get("token_ids"):
            self.ids = (self.ids or []) + choice["token_ids"]
        self.finish = choice.get("finish_reason") or self.finish
        if text or choice.get("finish_reason"):
            self.end_s = now


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:200]


async def ask(
    client: httpx2.AsyncClient, endpoint: Endpoint, request: dict[str, Any], due: float | None = None
) -> Sample:
    """Send one request and time its events; what goes wrong is in the sample's error.

    `due` is the monotonic time at which the request should have been sent; latencies count from it.
    """
    path = _PATHS["chat" if "messages" in request else "completions"]
    begin, stream = time.monotonic() if due is None else due, _Stream()
    try:
        async with client.stream("POST", endpoint.url + path, json=request) as answer:
            if answer.status_code != 200:
                await answer.aread()
                stream.error = f"HTTP {answer.status_code}: {_short(answer.text)}"
            else:
                events = Events()
                async for received in answer.aiter_bytes():
                    now = time.monotonic() - begin
                    for data in events.feed(received):
                        stream.take(data, now)
    except httpx2.HTTPError as error:
        stream.error = stream.error or f"{type(error).__name__}: {_short(str(error))}"
    return _sample(endpoint.variant, stream)


def _sample(variant: str, stream: _Stream) -> Sample:
    usage = stream.usage or {}
    tokens = usage.get("completion_tokens")
    error = stream.error
    if not error and stream.finish is None:
        error = "the stream ended before the answer did"
    elif not error and tokens is None:
        error = "the server sent no usage, so its tokens cannot be counted"
    elif not error and not stream.text_at:
        error = "the answer has no text"
    return Sample(
        variant, "", 0, tuple(stream.text_at), stream.end_s, tokens, usage.get("prompt_tokens"), "".join(stream.text),
        None if stream.ids is None else tuple(stream.ids), stream.lines, stream.finish, error,
    )  # fmt: skip
