"""A process that runs a module of this package, and the pipe to it: it ends once this end of the pipe closes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

_END_S = 10


class Child(NamedTuple):
    """A process, and this process's end of the pipe to it."""

    process: subprocess.Popen[bytes]
    pipe: Connection

    def end(self) -> None:
        """Kill it, if it runs."""
        self.process.kill()
        self.process.wait()

    def how_it_ended(self) -> str:
        """Of one whose end of the pipe has closed, as the end of a sentence."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        status = self.process.poll()
        if status is None:
            return "closed its pipe and does not end"
        return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def started(module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
    """A process of a module, whose first argument is the number of its end of the pipe."""
    ours, theirs = Pipe()
    with theirs:
        command = [sys.executable, "-m", module, str(theirs.fileno()), *arguments]
        # in a session of its own it gets no Ctrl-C of a terminal's: this process decides
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()],
            start_new_session=True,
        )  # fmt: skip
    return Child(process, ours)
