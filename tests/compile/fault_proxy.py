"""A proxy on loopback between boto3 and an S3 server, which does to chosen requests what networks do."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>no</Message></Error>"
STATUS = {"SlowDown": 503, "AccessDenied": 403, "RequestTimeTooSkewed": 403}


@dataclass
class Fault:
    """What happens to requests of a method whose path holds a word, at most so often."""

    kind: str
    method: str
    word: str
    times: int = 10**6
    met: int = 0


@dataclass
class Proxy:
    """A running proxy: its address, its faults, and the requests that passed it."""

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


def _handler(upstream: int, proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def _serve(self) -> None:
            kind = proxy.fault(self.command, self.path)
            if kind == "drop":
                self.close_connection = True
                self.connection.close()
                return
            body = self._body()
            if kind in STATUS:
                self._answer(STATUS[kind], [], ERROR.format(kind).encode())
                return
            if kind == "flip upload" and body:
                body = body[:-1] + bytes([body[-1] ^ 1])
            status, headers, content = self._forward(upstream, body)
            if kind == "flip" and content:
                content = content[:-1] + bytes([content[-1] ^ 1])
            if kind == "truncate":
                self._answer(status, headers, content, len(content) // 2)
                self.close_connection = True
                self.connection.close()
                return
            self._answer(status, headers, content)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

        def _body(self) -> bytes:
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                pieces = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    pieces.append(self.rfile.read(size))
                    self.rfile.readline()
                while self.rfile.readline().strip():
                    pass
                return b"".join(pieces)
            if "100-continue" in self.headers.get("Expect", ""):
                pass
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def _forward(self, port: int, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            dropped = ("transfer-encoding", "expect", "connection", "content-length")
            headers = {k: v for k, v in self.headers.items() if k.lower() not in dropped}
            headers["Content-Length"] = str(len(body))
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in ("connection", "transfer-encoding")]
            connection.close()
            return answer.status, kept, content

        def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, sent: int | None = None) -> None:
            self.send_response_only(status)
            for key, value in headers:
                if key.lower() != "content-length" or self.command == "HEAD":
                    self.send_header(key, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content if sent is None else content[:sent])

    return Handler


@contextmanager
def proxied(upstream: int) -> Iterator[Proxy]:
    """A proxy before the server on a port of loopback."""
    proxy = Proxy(0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(upstream, proxy))
    proxy.port = server.server_port
    thread: Callable[[], Any] = server.serve_forever
    threading.Thread(target=thread, daemon=True).start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
