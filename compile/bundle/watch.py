"""Ends the connections of requests on which nothing moves, so that a stalled or dripping server becomes an error.

A timeout of a socket starts again with every byte that comes; here the system's own counters of all connections are
added up, and a request that ends counts too.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator

from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)

# a server that moves less than these bytes in these seconds, on all connections, has stalled
STALLED_SECONDS = 30.0
LEAST_BYTES = 32 << 10
# source: struct tcp_info of include/uapi/linux/tcp.h (torvalds/linux): tcpi_bytes_acked and tcpi_bytes_received
_COUNTERS, _COUNTERS_AT = struct.Struct("QQ"), 120
_SOCKETS = weakref.WeakSet[socket.socket]()


class _Plain(AWSHTTPConnection):  # type: ignore[misc, unused-ignore]
    def connect(self) -> None:
        super().connect()
        _SOCKETS.add(self.sock)


class _Secure(AWSHTTPSConnection):  # type: ignore[misc, unused-ignore]
    def connect(self) -> None:
        super().connect()
        _SOCKETS.add(self.sock)


AWSHTTPConnectionPool.ConnectionCls = _Plain
AWSHTTPSConnectionPool.ConnectionCls = _Secure


class Watch:
    """Watches while requests are open; `stalled` says that it has ended them, and that no request may follow."""

    def __init__(self) -> None:
        self.stalled = False
        self._open, self._ended, self._lock = 0, 0, threading.Lock()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """While a request is open."""
        with self._lock:
            self._open += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                self._ended += 1

    def _watch(self) -> None:
        counts, moved, ended, since = weakref.WeakKeyDictionary[socket.socket, int](), 0, 0, time.monotonic()
        while True:
            with self._lock:
                if not self._open:
                    self._thread = None
                    return
                progress, ended = self._ended > ended, self._ended
            for connection in list(_SOCKETS):
                moved += (count := _moved(connection)) - counts.get(connection, 0)
                counts[connection] = count
            if progress or moved >= LEAST_BYTES:
                moved, since = 0, time.monotonic()
            elif time.monotonic() - since > STALLED_SECONDS:
                self.stalled = True
                _end_all()
            time.sleep(min(1.0, STALLED_SECONDS / 4))


def _moved(connection: socket.socket) -> int:
    with contextlib.suppress(OSError, struct.error):
        said = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return sum(_COUNTERS.unpack_from(said, _COUNTERS_AT))
    return 0


def _end_all() -> None:
    for connection in list(_SOCKETS):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
