"""After SIGTERM or Ctrl-C: a request that runs goes on, /health and new requests are 503, metrics are still shown."""

import asyncio
import json
import logging
import os
import shlex
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve.drain import DrainMiddleware
from serve.ready import try_it
from serve.seed import Message, Receive, Send

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def heard_before() -> Iterator[list[int]]:
    """The signals that the handler in place before the middleware's has heard of."""
    heard: list[int] = []
    before = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in SIGNALS}
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)


async def app(scope: Message, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await send({"type": "lifespan.startup.complete"})
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


ARGS = SimpleNamespace(model="bundles/a", served_model_name=None, host=None, port=8000, uds=None, api_key=None)


def lifespan(stop: Callable[[float], None]) -> Message:
    """The scope of an application's start, whose engine ends by `stop`."""
    state = SimpleNamespace(args=ARGS, engine_client=SimpleNamespace(shutdown=stop))
    return {"type": "lifespan", "app": SimpleNamespace(state=state)}


async def statuses(started: bool, signal_: signal.Signals) -> tuple[list[int], list[int]]:
    """The statuses of all calls, before and after a signal."""
    middleware = DrainMiddleware(app)

    async def send(message: Message) -> None: ...

    if started:
        await middleware(lifespan(lambda timeout: None), None, send)  # type: ignore[arg-type]
    before = [await status(middleware, *call) for call in CALLS]
    os.kill(os.getpid(), signal_)
    await asyncio.sleep(0)
    return before, [await status(middleware, *call) for call in CALLS]


@pytest.mark.parametrize("signal_", SIGNALS)
def test_a_server_that_ends_is_not_ready_and_takes_nothing_new(
    heard_before: list[int], signal_: signal.Signals
) -> None:
    # asyncio.run would take Ctrl-C for itself
    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(statuses(True, signal_)) == ([200] * 4, list(CALLS.values()))
    loop.close()
    assert heard_before == [signal_], "the handler before it heard of the signal too"


def test_a_middleware_that_never_started_hears_nothing(heard_before: list[int]) -> None:
    assert asyncio.run(statuses(False, signal.SIGTERM)) == ([200] * 4, [200] * 4)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, ["curl http://127.0.0.1:8000/v1/completions", '"model": "bundles/a"']),
        ({"served_model_name": ["demo", "b"], "host": "0.0.0.0"}, ["http://127.0.0.1:8000/v1", '"model": "demo"']),
        ({"host": "::1", "port": 80}, ["http://[::1]:80/v1"]),
        ({"uds": "/run/a b"}, ["--unix-socket '/run/a b' http://localhost/v1"]),
        ({"api_key": ["secret"]}, ['-H "authorization: Bearer $KEY"']),
    ],
)
def test_the_last_line_of_a_start_is_a_request_to_try(changes: dict[str, Any], parts: list[str]) -> None:
    line = try_it(SimpleNamespace(**vars(ARGS) | changes))
    assert all(part in line for part in parts), line
    assert "secret" not in line
    assert json.loads(shlex.split(line)[-1])["max_tokens"] == 64


@pytest.mark.parametrize(("timeout", "left"), [(60.0, 59.0), (0.1, 0.0)], ids=["in time", "too slow"])
def test_the_engine_ends_after_the_requests_that_have_come(timeout: float, left: float) -> None:
    """Also those that it has not heard of yet; a request that takes too long is left alone."""
    ended, answered = list[float](), list[int]()
    go_on = asyncio.Event()

    async def slow(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await go_on.wait()
            answered.append(1)

    def end(timeout: float) -> None:
        ended.append(timeout)

    async def run() -> None:
        middleware = DrainMiddleware(slow)
        stop = middleware._after_requests(end)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
        request = asyncio.create_task(middleware(scope, None, None))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        ends = asyncio.get_running_loop().run_in_executor(None, stop, timeout)
        await asyncio.sleep(0.3)
        assert bool(ended) == (left == 0)
        go_on.set()
        await request
        await ends

    asyncio.run(run())
    assert answered
    assert len(ended) == 1
    assert left <= ended[0] <= timeout


def test_an_end_that_was_asked_for_is_logged_as_no_failure() -> None:
    """vLLM's client logs a traceback where its engine has ended before it has heard of that: a matter of luck."""
    client = logging.getLogger("vllm.v1.engine.async_llm")
    said = [
        logging.makeLogRecord({"msg": text}) for text in ("AsyncLLM output_handler failed.", "EngineCore failed: %s")
    ]
    try:
        DrainMiddleware(_nothing)._after_requests(lambda timeout: None)(1.0)
        assert [bool(client.filter(record)) for record in said] == [False, True]
    finally:
        client.filters.clear()
    if origin := find_spec("vllm"):
        # vendor seam: its name and its words
        source = Path(str(origin.origin)).parent / "v1/engine/async_llm.py"
        assert said[0].msg in source.read_text(encoding="utf-8")


async def _nothing(scope: Message, receive: Receive, send: Send) -> None:
    pass
