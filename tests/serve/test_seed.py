"""The seed that is drawn: it is in the request that goes on, in the header that comes back, and never replaces one."""

import asyncio
import json
from typing import Any

import pytest

from serve.seed import HEADER, Message, Receive, SeedMiddleware, Send, with_seed


def call(parts: list[bytes], path: str = "/v1/completions") -> tuple[bytes, dict[bytes, bytes], Message]:
    """What an application behind the middleware reads, the headers of its response, and what it receives next."""
    seen: dict[str, Any] = {}
    coming: list[Message] = [{"type": "http.request", "body": p, "more_body": p is not parts[-1]} for p in parts]
    coming.append({"type": "http.disconnect"})

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        seen.update(body=body, scope=scope, after=await receive())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})

    async def receive() -> Message:
        return coming.pop(0)

    async def send(message: Message) -> None:
        seen["headers"] = dict(message["headers"])

    scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"content-length", b"1")]}
    asyncio.run(SeedMiddleware(app)(scope, receive, send))
    lengths = [v for n, v in seen["scope"]["headers"] if n == b"content-length"]
    assert not lengths or path != "/v1/completions", "the body's length is not known before it is read"
    return seen["body"], seen["headers"], seen["after"]


def test_a_request_without_a_seed_gets_one_and_its_client_is_told() -> None:
    body, headers, after = call([b'{"prompt": ', b'"a"}'])
    assert json.loads(body) == {"prompt": "a", "seed": int(headers[HEADER])}
    assert headers[b"a"] == b"b"
    assert after["type"] == "http.disconnect"


@pytest.mark.parametrize("body", [b'{"seed": null}', b'{"seed": -1}'])
def test_what_vllm_reads_as_no_seed_is_none(body: bytes) -> None:
    seeded, seed = with_seed(body)
    assert json.loads(seeded) == {"seed": seed}
    assert seed is not None


def test_two_requests_draw_two_seeds() -> None:
    assert with_seed(b"{}")[1] != with_seed(b"{}")[1]


def test_a_body_that_the_application_refuses_to_read_is_not_read() -> None:
    """vLLM's check of the key is inside of this middleware."""
    asked, sent = [], list[Message]()

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})

    async def receive() -> Message:
        asked.append(1)
        return {"type": "http.request", "body": b"x", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(SeedMiddleware(app)(scope, receive, send))
    assert not asked
    assert sent == [{"type": "http.response.start", "status": 401, "headers": []}]


def test_a_client_that_leaves_inside_its_body_is_told_of_as_that() -> None:
    seen = list[Message]()
    coming: list[Message] = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        seen.append(await receive())

    async def receive() -> Message:
        return coming.pop(0)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(SeedMiddleware(app)(scope, receive, None))  # type: ignore[arg-type]
    assert seen == [{"type": "http.disconnect"}]


DEEP = b'{"a":' * 20000


@pytest.mark.parametrize("body", [b'{"seed": 0}', b"[1]", b"no json", b"", DEEP], ids=[*map(str, range(4)), "deep"])
def test_what_names_a_seed_or_is_no_request_goes_through_as_it_is(body: bytes) -> None:
    seen, headers, _ = call([body])
    assert seen == body
    assert HEADER not in headers


def test_other_paths_are_left_alone() -> None:
    body, headers, _ = call([b"{}"], "/tokenize")
    assert body == b"{}"
    assert HEADER not in headers
