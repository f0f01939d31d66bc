"""Worker processes, one a rank: all get the same messages, rank 0 replies, and the end of one ends all."""

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

# seconds in which another rank, whose end may be the cause of a failure, is seen to have ended
_FAILURE_GRACE_S = 0.5
_END_S = 10


class Ranks:
    """Processes of a module that serve messages in order, each on its end of a pipe, which is its first argument.

    Once one has ended or failed all are ended, since they would wait for it in a collective, and every call raises a
    UserError that names it. They end with this process too, when their pipes close.
    """

    def __init__(self, module: str, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        self._numbers, self._lock = itertools.count(), threading.Lock()
        # by message number: the future, and the ranks whose reply is missing
        self._pending: dict[int, tuple[Future[Any], set[int]]] = {}
        self._error: UserError | None = None
        self._closing = False
        self._pipes, self.processes = list[Connection](), list[subprocess.Popen[bytes]]()
        for rank, environment in enumerate(environments):
            ours, theirs = Pipe()
            with theirs:
                command = [sys.executable, "-m", module, str(theirs.fileno()), str(rank), *arguments]
                # in a session of its own a rank gets no Ctrl-C of the terminal
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )  # fmt: skip
            self._pipes.append(ours)
            self.processes.append(process)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def submit(self, name: str, *arguments: Any, every: bool = False) -> Future[Any]:
        """Send a call to all ranks; the result is there when rank 0, or `every` rank, has replied."""
        number, future = next(self._numbers), Future[Any]()
        with self._lock:
            if self._error:
                raise self._error
            self._pending[number] = future, set(range(len(self._pipes) if every else 1))
        # the same bytes for all: a pickle a rank would take most of the time
        message = ForkingPickler.dumps((number, every, name, arguments))
        try:
            for pipe in self._pipes:
                pipe.send_bytes(message)
        except OSError:
            # the listener is about to see why
            future.exception(_END_S)
        return future

    def broadcast(self, name: str, *arguments: Any) -> None:
        """Send a call to all ranks and wait for all of them."""
        self.submit(name, *arguments, every=True).result()

    def close(self) -> None:
        """End the processes after what they have been sent."""
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
        """End every rank and every call because of this one, or of one that ended without a message."""
        if self._closing:
            return
        if message:
            time.sleep(_FAILURE_GRACE_S)
            crashed = (r for r, process in enumerate(self.processes) if process.poll())
            rank, message = next(((r, "") for r in crashed), (rank, message))
        why = message or _exit_reason(self.processes[rank])
        error = UserError(f"rank {rank} of {len(self._pipes)} {why}; read what it wrote before this, and start again")
        # before anybody hears of it, who may end this process
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
        return "closed its pipe and does not end"
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def serve(pipe: Connection, rank: int, make: Callable[[], Any]) -> None:
    """In a rank: call the methods of `make()` that the messages name, until None or the pipe's end."""
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
    except Exception as error:  # the other ranks must not wait for this one, whatever it was
        # the last reply is the end of a sentence
        known = isinstance(error, UserError)
        pipe.send((number, error if known else UserError(f"failed ({type(error).__name__}: {str(error)[:200]})")))
