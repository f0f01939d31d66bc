"""moto's S3 server on loopback, which does to chosen requests what networks do."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server
from werkzeug.wrappers import Response

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "2", "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}  # fmt: skip
STATUS = {"SlowDown": 503, "AccessDenied": 403, "RequestTimeTooSkewed": 403}


@dataclass
class Fault:
    """What happens to requests of a method whose path contains a word, at most so often."""

    kind: str
    method: str
    word: str
    times: int = 10**6
    met: int = 0


class FaultyS3:
    """A WSGI application: its faults, and the requests that reached it."""

    def __init__(self) -> None:
        self.port, self.faults, self.seen = 0, list[Fault](), list[tuple[str, str]]()
        self._lock, self._moto = threading.Lock(), DomainDispatcherApplication(create_backend_app)

    def _fault(self, method: str, path: str) -> str | None:
        with self._lock:
            self.seen.append((method, path))
            for fault in self.faults:
                if fault.method == method and fault.word in path and fault.met < fault.times:
                    fault.met += 1
                    return fault.kind
        return None

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        kind = self._fault(environ["REQUEST_METHOD"], f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}")
        if kind == "drop":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError
        if kind in STATUS:
            response = Response(f"<Error><Code>{kind}</Code><Message>no</Message></Error>", STATUS[kind])
        else:
            response = Response.from_app(self._moto, environ)
        if (content := response.data) and kind == "flip":
            response.data = content[:-1] + bytes([content[-1] ^ 1])
        elif kind == "truncate":
            response.data = content[: len(content) // 2]
            response.content_length = len(content)
        return response(environ, start_response)


@contextmanager
def faulty_s3() -> Iterator[FaultyS3]:
    """A running server."""
    # it logs every request
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    s3 = FaultyS3()
    server = make_server("127.0.0.1", 0, s3, threaded=True, request_handler=MotoRequestHandler)
    s3.port = server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield s3
    finally:
        server.shutdown()
        server.server_close()
