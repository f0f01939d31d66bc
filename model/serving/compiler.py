"""`python -m model.serving.compiler`: a process that compiles graphs for a CPU in place of the one that runs them.

A process in which XLA has compiled many graphs runs all of them slower, for as long as it lives: a server's steps by 4
to 16 % (LOG.md, 2026-11-27). This one reads graphs from a pipe, writes executables, and ends with its parent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType

import jax

from model.bundle.graph_spec import GraphSpec
from model.errors import UserError
from model.serving import pjrt


class Compiler:
    """Compiles graphs of so many ranks in another process, which ends with the context."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def __enter__(self) -> Compiler:
        self._pipe, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(self._ranks)]
            # in a session of its own it gets no Ctrl-C of a terminal's: it ends when its input does
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=2, pass_fds=[theirs.fileno()], start_new_session=True
            )
        return self

    def compile(self, proto: bytes, graph: GraphSpec) -> bytes:
        """The serialized executable of a graph, or nothing where it is in JAX's cache now (JAX_COMPILATION_CACHE_DIR).

        UserError if XLA refuses it, or if the process has ended.
        """
        try:
            self._pipe.send((proto, graph))
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise UserError(
                f"the process that compiles graphs ended with status {self._process.wait()} at {graph.file}; what it "
                "said stands above, and -9 means that the machine has no memory left"
            ) from None
        if isinstance(answer, UserError):
            raise answer
        return bytes(answer)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()
        assert self._process.stdin
        self._process.stdin.close()


def _end_with_the_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main(pipe: Connection, ranks: int) -> None:
    """Compile until the pipe ends."""
    # a compilation takes seconds, and a parent that ends does not wait for it
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    devices = pjrt.devices_of("cpu", ranks)
    while True:
        try:
            proto, graph = pipe.recv()
        except EOFError:
            return
        try:
            executable = pjrt.compile_hlo(proto, devices, graph)
            # one that was taken from the cache lacks its code when it is serialized again
            pipe.send(b"" if jax.config.jax_compilation_cache_dir else executable.serialize())  # type: ignore[attr-defined]
        except UserError as refusal:
            pipe.send(refusal)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), int(sys.argv[2]))
