"""SIGTERM or Ctrl-C ends a server that starts. One that is ready refuses new requests, ends the running ones, exits."""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from serve.folder import METRICS_PREFIX, METRICS_VARIABLE
from serve.ready import try_it
from serve.seed import App, Message, Receive, Send
from serve.sentence import started

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# after the web server's own lines about its start
_LAST_S = 0.2
# between two looks at the requests that run
_LOOK_S = 0.05
# vLLM's client takes the end of the engine that it has asked for as a failure, and logs a traceback of it
_CLIENT, _FAILED = "vllm.v1.engine.async_llm", "output_handler failed"

_GOING = {"error": {"message": "the server is shutting down; send the request again, to a different one", "code": 503}}


def end_while_starting() -> None:
    """Let SIGTERM and Ctrl-C end this server's processes at once, until vLLM's handler takes its place.

    vLLM alone would wait until every graph is compiled: no request is running that must be answered first.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for child in multiprocessing.active_children():
            child.kill()
        name = signal.Signals(number).name
        print(f"trnspec: {name} came before the server was ready; it ends", file=sys.stderr, flush=True)
        # `atexit` does not run after `_exit`
        if Path(folder := os.environ[METRICS_VARIABLE]).name.startswith(METRICS_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(128 + number)

    # only the process that receives the signals
    if multiprocessing.parent_process() is None:
        for number in _SIGNALS:
            signal.signal(number, end)


def leave_ctrl_c_to_the_server() -> None:
    """In the engine's process: a terminal sends Ctrl-C to both, and the first process ends this one when it is time."""
    if multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


class DrainMiddleware:
    """An ASGI middleware. vLLM's own handler of the signal stays; it ends the server when nothing runs any more.

    vLLM alone would stay healthy until its end, and would answer with no token a new request, and one that has come and
    that the engine does not have yet.
    """

    def __init__(self, app: App) -> None:
        self.app, self.draining, self.running = app, False, 0

    def _listen(self) -> None:
        # the event loop hears of a signal through a file descriptor: a handler beside its own takes nothing from it
        before = {number: signal.getsignal(number) for number in _SIGNALS}

        def drain(number: int, frame: FrameType | None) -> None:
            self.draining = True
            if callable(handler := before[signal.Signals(number)]):
                handler(number, frame)

        for number in _SIGNALS:
            signal.signal(number, drain)
            signal.siginterrupt(number, False)

    def _ready(self, scope: Message, send: Send) -> Send:
        """Send a message; with the one that the application has started, it is ready: print a request to try."""

        async def tell(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                state = scope["app"].state
                state.engine_client.shutdown = self._after_requests(state.engine_client.shutdown)
                started()
                line = try_it(state.args)
                asyncio.get_running_loop().call_later(_LAST_S, lambda: print(line, file=sys.stderr, flush=True))
            await send(message)

        return tell

    def _after_requests(self, stop: Callable[..., None]) -> Callable[..., None]:
        """What vLLM calls in a thread to end the engine: it waits until every request has its answer, or too long."""

        def wait(timeout: float | None = None) -> None:
            end = time.monotonic() + (timeout or 0)
            while self.running and time.monotonic() < end:
                time.sleep(_LOOK_S)
            logging.getLogger(_CLIENT).addFilter(lambda record: _FAILED not in str(record.msg))
            stop(timeout=max(0.0, end - time.monotonic()))

        return wait

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            # the application starts, and vLLM has set its handler
            self._listen()
            await self.app(scope, receive, self._ready(scope, send))
            return
        new = scope["type"] == "http" and (scope["method"] == "POST" or scope["path"] == "/health")
        if not (self.draining and new):
            self.running += new
            try:
                await self.app(scope, receive, send)
            finally:
                self.running -= new
            return
        body = json.dumps(_GOING).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", b"1"),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})
