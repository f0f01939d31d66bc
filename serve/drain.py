"""SIGTERM ends a server that starts. A server that is ready refuses new requests, ends the running ones and exits."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType

from serve.folder import METRICS_PREFIX, METRICS_VARIABLE
from serve.seed import App, Message, Receive, Send

_GOING = {"error": {"message": "the server is shutting down; send the request again, to a different one", "code": 503}}


def end_while_starting() -> None:
    """Let a SIGTERM end this server's processes at once, with status 143, until vLLM's handler takes its place.

    vLLM alone would wait until every graph is compiled: no request is running that must be answered first.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for child in multiprocessing.active_children():
            child.kill()
        print("trnspec: SIGTERM came before the server was ready; it ends", file=sys.stderr, flush=True)
        # `atexit` does not run after `_exit`
        if Path(folder := os.environ[METRICS_VARIABLE]).name.startswith(METRICS_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(128 + number)

    # only the process that receives the signals
    if multiprocessing.parent_process() is None:
        signal.signal(signal.SIGTERM, end)


class DrainMiddleware:
    """An ASGI middleware. vLLM's own handler of the signal stays; it ends the server when nothing runs any more.

    vLLM alone would stay healthy until its end, and would answer a new request with no token.
    """

    def __init__(self, app: App) -> None:
        self.app, self.draining = app, False

    def _listen(self) -> None:
        # the event loop hears of a signal through a file descriptor: a handler beside its own takes nothing from it
        before = signal.getsignal(signal.SIGTERM)

        def drain(number: int, frame: FrameType | None) -> None:
            self.draining = True
            if callable(before):
                before(number, frame)

        signal.signal(signal.SIGTERM, drain)
        signal.siginterrupt(signal.SIGTERM, False)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            # the application starts, and vLLM has set its handler
            self._listen()
        new = scope["type"] == "http" and (scope["method"] == "POST" or scope["path"] == "/health")
        if not (self.draining and new):
            await self.app(scope, receive, send)
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
