"""After SIGTERM or Ctrl-C running requests go on, /health and new requests are 503, metrics are still shown."""

import asyncio
import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import serve.drain
from serve.drain import DrainMiddleware, Message, Receive, Send
from serve.folder import METRICS_PREFIX, METRICS_VARIABLE
from serve.vllm_patches import before_engine_shutdown

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def signals_before() -> Iterator[list[int]]:
    """The signals that the handler before the middleware's has received."""
    received: list[int] = []
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in SIGNALS}
    yield received
    for number, handler in before.items():
        signal.signal(number, handler)


async def app(scope: Message, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await send({"type": "lifespan.startup.complete"})
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})


async def status(of: DrainMiddleware, method: str, path: str, root_path: str = "") -> int:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    await of({"type": "http", "method": method, "path": path, "root_path": root_path}, receive, send)
    return int(sent[0]["status"])


# method, path and root path of a call, and its status after a signal
CALLS = {("GET", "/health"): 503, ("POST", "/v1/completions"): 503, ("GET", "/metrics"): 200,
         ("GET", "/v1/models"): 200, ("GET", "/api/health", "/api"): 503}  # fmt: skip


async def statuses(signal_: signal.Signals) -> tuple[list[int], list[int]]:
    """The statuses of all calls, before and after a signal."""
    middleware, engine = DrainMiddleware(app), SimpleNamespace(shutdown=None)
    lifespan: Message = {"type": "lifespan", "app": SimpleNamespace(state=SimpleNamespace(engine_client=engine))}

    async def send(message: Message) -> None: ...

    await middleware(lifespan, None, send)  # type: ignore[arg-type]
    assert engine.shutdown is not None, "it waits for the running requests"
    before = [await status(middleware, *call) for call in CALLS]
    os.kill(os.getpid(), signal_)
    await asyncio.sleep(0)
    return before, [await status(middleware, *call) for call in CALLS]


@pytest.mark.parametrize("signal_", SIGNALS)
def test_a_server_that_ends_is_not_ready_and_takes_nothing_new(
    signals_before: list[int], signal_: signal.Signals
) -> None:
    # asyncio.run would take Ctrl-C for itself
    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(statuses(signal_)) == ([200] * 5, list(CALLS.values()))
    loop.close()
    assert signals_before == [signal_], "the handler before it receives the signal too"


@pytest.mark.parametrize(("seconds", "streaming"), [(60.0, False), (1.1, False), (1.1, True)])
def test_the_engine_ends_after_the_running_requests_or_after_their_errors(seconds: float, streaming: bool) -> None:
    """A second of the timeout is left for the errors of what cannot end in time."""
    sent, go_on = list[Message](), asyncio.Event()

    async def slow(scope: Message, receive: Receive, send: Send) -> None:
        if streaming:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"all"})

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> float:
        middleware = DrainMiddleware(slow)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
        request = asyncio.create_task(middleware(scope, None, send))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        middleware.draining = True
        left = asyncio.get_running_loop().run_in_executor(None, middleware._wait, seconds)
        await asyncio.sleep(0.3)
        go_on.set()
        await request
        assert not middleware.running
        return await left

    left = asyncio.run(run())
    assert seconds - 1 < left <= seconds - 0.1
    statuses = [message["status"] for message in sent if "status" in message]
    assert statuses == ([200] if streaming else [503] if seconds < 2 else [])
    assert (sent[-1]["body"] == b"all") == (seconds > 2)
    assert sent[-1]["body"].startswith(b"data: ") == streaming


def test_the_engine_gets_the_seconds_that_are_left_and_its_end_is_logged_as_no_failure() -> None:
    """vLLM's client may log a traceback where its engine ends before it."""
    client, left = logging.getLogger("vllm.v1.engine.async_llm"), list[float | None]()

    def shutdown(timeout: float) -> None:
        left.append(timeout)

    engine = SimpleNamespace(shutdown=shutdown)
    lines = [logging.makeLogRecord({"msg": m}) for m in ("AsyncLLM output_handler failed.", "EngineCore failed: %s")]
    try:
        before_engine_shutdown(engine, lambda seconds: seconds - 2)
        engine.shutdown(timeout=3.0)
        engine.shutdown(timeout=2.0)
        assert left == [1.0, 0.0]
        assert [bool(client.filter(line)) for line in lines] == [False, True]
    finally:
        client.filters.clear()


def test_a_second_signal_ends_the_server_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[int]()
    monkeypatch.setattr(serve.drain, "_end_now", lambda number, reason: ended.append(number))
    middleware = DrainMiddleware(app)
    middleware._install_handlers()
    middleware.running.add(None)
    os.kill(os.getpid(), signal.SIGINT)
    assert not ended
    middleware.running.clear()
    os.kill(os.getpid(), signal.SIGINT)
    assert not ended, "vLLM's handler ends a server that has answered everyone"
    middleware.running.add(None)
    os.kill(os.getpid(), signal.SIGINT)
    assert ended == [signal.SIGINT]


def test_a_client_that_leaves_is_no_drain() -> None:
    async def leave() -> None:
        async def slow(scope: Message, receive: Receive, send: Send) -> None:
            await asyncio.sleep(60)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
        request = asyncio.create_task(DrainMiddleware(slow)(scope, None, None))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        request.cancel()
        await request

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(leave())


@pytest.mark.parametrize("name", [METRICS_PREFIX + "x", "of-the-user"])
def test_a_signal_before_the_server_is_ready_ends_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It removes the folder of metrics, unless that is the user's."""
    (tmp_path / name).mkdir()
    child, ended = mock.Mock(), list[int]()
    monkeypatch.setenv(METRICS_VARIABLE, str(tmp_path / name))
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [child])
    monkeypatch.setattr(os, "_exit", ended.append)
    serve.drain.end_while_starting()
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [128 + signal.SIGTERM]
    child.kill.assert_called_once_with()
    assert (tmp_path / name).exists() == (name == "of-the-user")


def test_only_the_process_of_the_terminal_ends_by_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    serve.drain.ignore_ctrl_c_in_engine()
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    serve.drain.end_while_starting()
    assert signal.getsignal(signal.SIGTERM) is before
    serve.drain.ignore_ctrl_c_in_engine()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
