"""SIGTERM or Ctrl-C ends a starting server at once; a ready one refuses new requests and finishes the running ones."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from types import FrameType
from typing import Any

from serve.folder import METRICS_PREFIX, METRICS_VARIABLE
from serve.startup import started
from serve.vllm_patches import before_engine_shutdown

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# the last seconds of the shutdown timeout, in which unfinished requests get an error
_CANCEL_S = 1.0
_REFUSAL = b'{"error": {"message": "the server is shutting down; send the request to a different one", "code": 503}}'
_REFUSAL_HEADERS = [
    (b"content-type", b"application/json"),
    (b"content-length", b"%d" % len(_REFUSAL)),
    (b"retry-after", b"1"),
    (b"connection", b"close"),
]


def end_while_starting() -> None:
    """Install handlers that end a starting server at once; vLLM's would wait until every graph is compiled."""
    # only the process that receives the signals
    if multiprocessing.parent_process() is None:
        for number in _SIGNALS:
            signal.signal(number, lambda number, _: _end_now(number, "came before the server was ready"))


def _end_now(number: int, reason: str) -> None:
    """End every process of this server; nothing is answered."""
    for child in multiprocessing.active_children():
        child.kill()
    print(f"trnspec: {signal.Signals(number).name} {reason}; the server ends", file=sys.stderr, flush=True)
    # `atexit` does not run after `_exit`
    if Path(folder := os.environ[METRICS_VARIABLE]).name.startswith(METRICS_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(128 + number)


def ignore_ctrl_c_in_engine() -> None:
    """In the engine's process: a terminal sends Ctrl-C to both, and the API process ends the engine after the drain."""
    if multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


class DrainMiddleware:
    """ASGI middleware: after a signal, /health and new requests get 503 while running requests finish."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.app, self.draining, self.running = app, False, set[Any]()

    def _install_handlers(self) -> None:
        vllm_handlers = {number: signal.getsignal(number) for number in _SIGNALS}

        def drain(number: int, frame: FrameType | None) -> None:
            if self.draining and self.running:
                _end_now(number, "came again while requests were running")
            self.draining = True
            if callable(handler := vllm_handlers[signal.Signals(number)]):
                handler(number, frame)

        for number in _SIGNALS:
            signal.signal(number, drain)
            signal.siginterrupt(number, False)

    def _wait(self, seconds: float) -> float:
        """Wait for running requests in a thread of vLLM's, cancel the rest; returns the seconds left for the engine."""
        end = time.monotonic() + seconds
        while self.running and time.monotonic() < end - _CANCEL_S:
            time.sleep(0.05)
        for task in self.running.copy():
            task.get_loop().call_soon_threadsafe(task.cancel)
        while self.running and time.monotonic() < end:
            time.sleep(0.05)
        return max(0.0, end - time.monotonic())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._install_handlers()

            async def send_ready(message: Message) -> None:
                if message["type"] == "lifespan.startup.complete":
                    before_engine_shutdown(scope["app"].state.engine_client, self._wait)
                    started()
                await send(message)

            await self.app(scope, receive, send_ready)
            return
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        new = scope["type"] == "http" and (scope["method"] == "POST" or path == "/health")
        if self.draining and new:
            await _refuse(send, streaming=False)
            return
        streaming, task = False, asyncio.current_task()

        async def send_and_note(message: Message) -> None:
            nonlocal streaming
            streaming = True
            await send(message)

        self.running |= {task} if new else set()
        try:
            await self.app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            if not self.draining:
                raise
            # vLLM's tasks of this request fail unread when the engine ends
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
            await _refuse(send, streaming)
        finally:
            self.running.discard(task)


async def _refuse(send: Send, streaming: bool) -> None:
    if not streaming:
        await send({"type": "http.response.start", "status": 503, "headers": _REFUSAL_HEADERS})
    await send({"type": "http.response.body", "body": b"data: " + _REFUSAL + b"\n\n" if streaming else _REFUSAL})
