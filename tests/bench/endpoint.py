"""An OpenAI-compatible completions endpoint on loopback that answers with given ids or text."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def seeded_ids(body: dict[str, Any]) -> dict[str, Any]:
    """An answer whose token ids are the prompt's length and the seed."""
    return {"text": "x", "token_ids": [len(body["prompt"]), body["seed"] % 1000]}


@contextmanager
def endpoint(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[str]:
    """The address of a server whose one choice is `answer(the request's body)`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [answer(body)]}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
