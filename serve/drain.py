"""SIGTERM makes the server not ready: what runs is answered whole, /health and every new request get a 503."""

from __future__ import annotations

import json
import signal
from types import FrameType

from serve.seed import App, Message, Receive, Send

_GOING = {"error": {"message": "the server is shutting down; send the request again, to a different one", "code": 503}}


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
