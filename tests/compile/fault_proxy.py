"""A proxy on loopback between boto3 and an S3 server, which does to chosen requests what networks do."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STATUS = {"SlowDown": 503, "AccessDenied": 403, "RequestTimeTooSkewed": 403}
_HOP = ("transfer-encoding", "expect", "connection", "content-length")


@dataclass
class Fault:
    """What happens to requests of a method whose path contains a word, at most so often."""

    kind: str
    method: str
    word: str
    times: int = 10**6
    met: int = 0


@dataclass
class Proxy:
    """A running proxy: its port, its faults, and the requests that passed it."""

    port: int
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault(self, method: str, path: str) -> str | None:
        with self.lock:
            self.seen.append((method, path))
            for fault in self.faults:
                if fault.method == method and fault.word in path and fault.met < fault.times:
                    fault.met += 1
                    return fault.kind
        return None


@contextmanager
def proxied(upstream: int) -> Iterator[Proxy]:
    """A proxy before the server on a port of loopback."""
    proxy = Proxy(0)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def _serve(self) -> None:
            kind = proxy.fault(self.command, self.path)
            if kind != "drop":
                body = self._body()
                if kind in STATUS:
                    error = f"<?xml version='1.0'?><Error><Code>{kind}</Code><Message>no</Message></Error>"
                    return self._answer(STATUS[kind], [], error.encode())
                status, headers, content = self._forward(body)
                if kind == "flip" and content:
                    content = content[:-1] + bytes([content[-1] ^ 1])
                self._answer(status, headers, content, len(content) // 2 if kind == "truncate" else None)
            if kind in ("drop", "truncate"):
                self.close_connection = True
                self.connection.close()
            return None

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return b"".join(pieces)

        def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", upstream, timeout=30)
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
            connection.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in _HOP or self.command == "HEAD"]
            return answer.status, kept, content

        def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, sent: int | None = None) -> None:
            self.send_response_only(status)
            for key, value in headers:
                self.send_header(key, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:sent] if self.command != "HEAD" else b"")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.port = server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
