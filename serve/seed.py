"""The seed of a request without one: drawn here, put into the request, and returned in a header of the response."""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

HEADER = b"x-trnspec-seed"
_PATHS = ("/v1/completions", "/v1/chat/completions")
_BITS = 53

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class SeedMiddleware:
    """An ASGI middleware: a header goes out before the first token, so a client of a stream has its seed too.

    It reads a body when the application does: who has no key is refused before.
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in _PATHS:
            await self.app(scope, receive, send)
            return
        seed: int | None = None
        read = False

        async def seeded() -> Message:
            nonlocal seed, read
            # after the body, the next message says that the client has left
            if read:
                return await receive()
            read, (body, last) = True, await _whole(receive)
            if last["type"] == "http.disconnect":
                return last
            body, seed = with_seed(body)
            return {**last, "body": body, "more_body": False}

        async def tell(message: Message) -> None:
            if seed is not None and message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (HEADER, str(seed).encode())]}
            await send(message)

        # the body's length is not known yet
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        await self.app({**scope, "headers": headers}, seeded, tell)


def drawn_seed() -> int:
    """A seed that every reader of JSON keeps exactly."""
    return secrets.randbits(_BITS)


def with_seed(body: bytes) -> tuple[bytes, int | None]:
    """A JSON body with a seed, and the seed if it was drawn here; a body that is no JSON object stays as it is."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return body, None
    # -1 is vLLM's word for none
    if not isinstance(fields, dict) or fields.get("seed") not in (None, -1):
        return body, None
    seed = drawn_seed()
    return json.dumps(fields | {"seed": seed}).encode(), seed


async def _whole(receive: Receive) -> tuple[bytes, Message]:
    """All parts of a request's body, and the last message."""
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts), message
