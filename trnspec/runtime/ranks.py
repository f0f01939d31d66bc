"""A process for each rank: all get the same messages, rank 0 answers for them, and the end of one ends all."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from model.errors import UserError
from trnspec.runtime.child import started

# how long a rank that has failed is doubted: the loss of another one may have been the cause
_DOUBT_S = 0.5
_END_S = 10


class Failure(NamedTuple):
    """Why a rank ends, as the end of a sentence: its last answer."""

    said: str


class Ranks:
    """Processes that serve messages one after the other, each on its end of a pipe.

    A message is (number, whether every rank answers it, name, arguments), and None is the last; an answer is (number,
    value). The processes end too when their pipes close, so they do not outlive this one. Once a rank has ended or
    failed the others are ended too, since they would wait for it in a collective, and every call raises a UserError
    that names it.
    """

    def __init__(self, module: str, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        self._numbers, self._lock = itertools.count(), threading.Lock()
        # answers that are due: the future, and the ranks that it still waits for
        self._due: dict[int, tuple[Future[Any], set[int]]] = {}
        self._error: UserError | None = None
        self._closed = False
        self._ranks = [
            started(module, [str(rank), *arguments], environment) for rank, environment in enumerate(environments)
        ]
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def tell(self, name: str, *arguments: Any) -> Future[Any]:
        """Rank 0's answer to a message, when it comes."""
        return self._send(False, name, *arguments)

    def ask(self, name: str, *arguments: Any) -> None:
        """Return when every rank has answered a message."""
        self._send(True, name, *arguments).result()

    def _send(self, every: bool, name: str, *arguments: Any) -> Future[Any]:
        number, future = next(self._numbers), Future[Any]()
        with self._lock:
            if self._error:
                raise self._error
            self._due[number] = future, set(range(len(self._ranks) if every else 1))
        try:
            for rank in self._ranks:
                rank.pipe.send((number, every, name, arguments))
        except OSError:
            # its end is on the way to the listener, which knows why
            future.exception(_END_S)
        return future

    def _listen(self) -> None:
        ranks = {rank.pipe: number for number, rank in enumerate(self._ranks)}
        while True:
            for pipe in wait(list(ranks)):
                assert isinstance(pipe, Connection)
                rank = ranks[pipe]
                try:
                    number, value = pipe.recv()
                except (EOFError, OSError):
                    return self._fail(rank)
                if isinstance(value, Failure):
                    return self._fail(rank, value)
                self._answered(number, rank, value)

    def _answered(self, number: int, rank: int, value: Any) -> None:
        future, waiting = self._due[number]
        waiting.discard(rank)
        if not waiting:
            del self._due[number]
            future.set_result(value)

    def _fail(self, rank: int, failure: Failure | None = None) -> None:
        """End every rank and every call, because of this one."""
        if self._closed:
            return
        if failure:
            time.sleep(_DOUBT_S)
            others = (number for number, other in enumerate(self._ranks) if other.process.poll() is not None)
            silent = (number for number in others if number != rank and not self._says_why(number))
            rank, failure = next(((number, None) for number in silent), (rank, failure))
        said = failure.said if failure else self._ranks[rank].how_it_ended()
        error = UserError(f"rank {rank} of {len(self._ranks)} {said}; read what it wrote before this, and start again")
        # nobody hears of it, and ends this process, before they have ended
        self._kill()
        with self._lock:
            self._error, due = error, list(self._due.values())
            self._due.clear()
        for future, _ in due:
            future.set_exception(error)

    def _says_why(self, rank: int) -> bool:
        """Whether the last answer of a rank that has ended is a failure of its own: then it was not the cause."""
        value, pipe = None, self._ranks[rank].pipe
        with contextlib.suppress(EOFError, OSError):
            while pipe.poll():
                _, value = pipe.recv()
        return isinstance(value, Failure)

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.end()

    def close(self) -> None:
        """End the processes, which first do what they have been sent."""
        self._closed = True
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.pipe.send(None)
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(_END_S)
        self._kill()
        self._listener.join()
        for rank in self._ranks:
            rank.pipe.close()
