"""Worker processes, one per rank: all receive the same messages, rank 0 replies, and all end if one ends."""

import contextlib
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

from model.errors import UserError

# seconds to wait, after a rank reports an error, for another rank to crash, which is then the likely cause
_FAILURE_GRACE_S = 0.5
# seconds to wait for a process to end
_END_S = 10


class Ranks:
    """Processes `python -m module PIPE RANK *arguments` that serve the messages of their pipe in order.

    If one ends or fails, all are killed, since they would wait for it in a collective, and every call raises a
    UserError that names it. If this process ends, their pipes close and they end.
    """

    def __init__(self, module: str, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        self._numbers, self._lock = itertools.count(), threading.Lock()
        # message number -> the future, and the ranks that have not replied
        self._pending: dict[int, tuple[Future[Any], set[int]]] = {}
        self._error: UserError | None = None
        self._closing = False
        self._pipes, self.processes = list[Connection](), list[subprocess.Popen[bytes]]()
        for rank, environment in enumerate(environments):
            parent, child = Pipe()
            with child:
                command = [sys.executable, "-m", module, str(child.fileno()), str(rank), *arguments]
                # a new session, so that Ctrl-C in the terminal does not reach the ranks
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[child.fileno()],
                    start_new_session=True,
                )  # fmt: skip
            self._pipes.append(parent)
            self.processes.append(process)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def submit(self, name: str, *arguments: Any, every: bool = False) -> Future[Any]:
        """Sends a call to all ranks. The future has rank 0's result; with `every` it waits for all ranks."""
        number, future = next(self._numbers), Future[Any]()
        with self._lock:
            if self._error:
                raise self._error
            self._pending[number] = future, set(range(len(self._pipes) if every else 1))
        # pickled once: pickling per rank would take most of the time
        message = ForkingPickler.dumps((number, every, name, arguments))
        try:
            for pipe in self._pipes:
                pipe.send_bytes(message)
        except OSError:
            # the listener is about to set the exception
            future.exception(_END_S)
        return future

    def broadcast(self, name: str, *arguments: Any) -> None:
        """Sends a call to all ranks and waits for their replies."""
        self.submit(name, *arguments, every=True).result()

    def close(self) -> None:
        """Ends the processes after the calls that were sent."""
        self._closing = True
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        self._kill()
        self._listener.join()
        for pipe in self._pipes:
            pipe.close()

    def _listen(self) -> None:
        ranks = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while True:
            for pipe in wait(list(ranks)):
                assert isinstance(pipe, Connection)
                try:
                    number, value = pipe.recv()
                except (EOFError, OSError):
                    return self._fail(ranks[pipe], "")
                if isinstance(value, UserError):
                    return self._fail(ranks[pipe], str(value))
                future, missing = self._pending[number]
                missing.discard(ranks[pipe])
                if not missing:
                    del self._pending[number]
                    future.set_result(value)

    def _fail(self, rank: int, message: str) -> None:
        """Kills all ranks and fails all calls; the error names `rank`, or a rank that crashed if `rank` did not."""
        if self._closing:
            return
        if message:
            time.sleep(_FAILURE_GRACE_S)
            crashed = (r for r, process in enumerate(self.processes) if process.poll())
            rank, message = next(((r, "") for r in crashed), (rank, message))
        why = message or _exit_reason(self.processes[rank])
        error = UserError(f"rank {rank} of {len(self._pipes)} {why}; see the log above, and start again")
        # before the error is raised anywhere: its receiver may end this process
        self._kill()
        with self._lock:
            self._error, pending = error, list(self._pending.values())
            self._pending.clear()
        for future, _ in pending:
            future.set_exception(error)

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def _exit_reason(process: subprocess.Popen[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    status = process.poll()
    if status is None:
        return "closed its pipe and is still running"
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def serve(pipe: Connection, rank: int, make: Callable[[], Any]) -> None:
    """In a rank's process: calls the methods of `make()` that the messages name, until None or the pipe closes."""
    number, worker = 0, None
    try:
        while (message := pipe.recv()) is not None:
            number, every, name, arguments = message
            worker = worker or make()
            value = getattr(worker, name)(*arguments)
            if every or rank == 0:
                pipe.send((number, value))
    except (EOFError, ConnectionError):
        return
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        # `Ranks._fail` prepends the rank to this message
        known = isinstance(error, UserError)
        pipe.send((number, error if known else UserError(f"failed ({type(error).__name__}: {str(error)[:200]})")))
