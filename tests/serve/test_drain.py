"""After SIGTERM: a request that runs goes on, /health and new requests are 503, metrics are still shown."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from serve.drain import DrainMiddleware
from serve.seed import Message, Receive, Send


@pytest.fixture(autouse=True)
def heard_before() -> Iterator[list[int]]:
    """The signals that the handler in place before the middleware's has heard of."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    yield heard
    signal.signal(signal.SIGTERM, before)


async def app(scope: Message, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})


async def status(of: DrainMiddleware, method: str, path: str) -> int:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    await of({"type": "http", "method": method, "path": path}, receive, send)
    return int(sent[0]["status"])


CALLS = {
    ("GET", "/health"): 503,
    ("POST", "/v1/completions"): 503,
    ("GET", "/metrics"): 200,
    ("GET", "/v1/models"): 200,
}


async def statuses(started: bool) -> tuple[list[int], list[int]]:
    """The statuses of all calls, before and after a SIGTERM."""
    middleware = DrainMiddleware(app)
    if started:
        await middleware({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    before = [await status(middleware, *call) for call in CALLS]
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0)
    return before, [await status(middleware, *call) for call in CALLS]


def test_a_server_that_ends_is_not_ready_and_takes_nothing_new(heard_before: list[int]) -> None:
    assert asyncio.run(statuses(started=True)) == ([200] * 4, list(CALLS.values()))
    assert heard_before == [signal.SIGTERM], "the handler before it heard of the signal too"


def test_a_middleware_that_never_started_hears_nothing(heard_before: list[int]) -> None:
    assert asyncio.run(statuses(started=False)) == ([200] * 4, [200] * 4)
