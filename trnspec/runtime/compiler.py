"""`python -m trnspec.runtime.compiler`: a process that compiles graphs for a CPU in place of the one that runs them.

A process in which XLA has compiled many graphs runs all of them slower, for as long as it lives: a server's steps took
up to 16 % longer (LOG.md, 2026-11-27). This one reads graphs from a pipe and writes executables.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from multiprocessing.connection import Connection
from types import TracebackType

from jax import monitoring

from model.errors import UserError
from model.graph_spec import GraphSpec
from trnspec.runtime import pjrt
from trnspec.runtime.child import started

_TAKEN = "/jax/compilation_cache/cache_hits"
_Asked = tuple[bytes, GraphSpec]


class Compiler:
    """Compiles graphs of so many ranks in another process, which ends with the context."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def __enter__(self) -> Compiler:
        self._child = started(__name__, [str(self._ranks)])
        return self

    def compile(self, proto: bytes, graph: GraphSpec) -> bytes:
        """The serialized executable of a graph, or nothing where it was in JAX's cache (JAX_COMPILATION_CACHE_DIR).

        UserError if XLA refuses it, or if the process has ended.
        """
        try:
            self._child.pipe.send((proto, graph))
            answer: bytes | UserError = self._child.pipe.recv()
        except (EOFError, OSError):
            raise UserError(
                f"the process that compiles {graph.file} {self._child.how_it_ended()}; what it said stands above, and "
                "signal 9 means that the machine has no memory left"
            ) from None
        if isinstance(answer, UserError):
            raise answer
        return answer

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._child.end()
        self._child.pipe.close()


def _listen(pipe: Connection, asked: queue.SimpleQueue[_Asked]) -> None:
    """Take what comes, and end with the pipe: a compilation takes seconds, and a parent that ends waits for none."""
    try:
        while True:
            asked.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(0)


def main(pipe: Connection, ranks: int) -> None:
    """Compile until the pipe closes."""
    asked, taken = queue.SimpleQueue[_Asked](), list[str]()
    threading.Thread(target=_listen, args=(pipe, asked), daemon=True).start()
    monitoring.register_event_listener(lambda event, **_: taken.append(event) if event == _TAKEN else None)
    devices = pjrt.devices_of("cpu", ranks)
    while True:
        proto, graph = asked.get()
        taken.clear()
        try:
            executable = pjrt.compile_hlo(proto, devices, graph)
            # one that was taken from JAX's cache lacks its code when it is serialized again
            pipe.send(b"" if taken else executable.serialize())
        except UserError as refusal:
            pipe.send(refusal)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), int(sys.argv[2]))
