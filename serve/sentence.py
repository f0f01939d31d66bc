"""A start that fails ends with one sentence, last on stderr, and status 2; TRNSPEC_DEBUG adds the traceback."""

from __future__ import annotations

import errno
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from model.errors import UserError, sentence_of
from serve.folder import METRICS_VARIABLE

DEBUG_VARIABLE = "TRNSPEC_DEBUG"


def end_in_a_sentence() -> None:
    """From here on, a mistake that ends the first process is a sentence; any other error keeps its traceback."""
    if multiprocessing.parent_process() is None:
        sys.excepthook = _end


def started() -> None:
    """The server is ready: an error that ends it is no mistake of the command."""
    sys.excepthook = sys.__excepthook__


@contextmanager
def passed_on() -> Iterator[None]:
    """In the engine's process: leave the sentence of a mistake to the first process, which ends after this one."""
    try:
        yield
    except (UserError, OSError) as error:
        _left().write_text(_sentence(error) or str(error), encoding="utf-8")
        if os.environ.get(DEBUG_VARIABLE):
            raise
        raise SystemExit(2) from error


def _left() -> Path:
    return Path(os.environ[METRICS_VARIABLE]) / "trnspec-start"


def _end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    sentence = _sentence(error)
    if not sentence and _left().is_file():
        sentence = _left().read_text(encoding="utf-8")
        _left().unlink()
    if not sentence or os.environ.get(DEBUG_VARIABLE):
        sys.__excepthook__(kind, error, traceback)
    if sentence:
        print(f"error: {sentence}", file=sys.stderr, flush=True)
        raise SystemExit(2)


def _sentence(error: BaseException) -> str:
    """A sentence for a mistake of ours, of the operating system or of vLLM's settings; "" for anything else."""
    cause: BaseException | None = error
    while cause:
        if isinstance(cause, UserError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, OSError):
        if error.errno == errno.EADDRINUSE:
            return "the port is in use; end the server that listens on it, or give a different --port"
        return sentence_of(error, "this command")
    if isinstance(error, ValueError):
        # pydantic's error is a list of errors
        first = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)
        return " ".join(first.removeprefix("Value error, ").split())
    return ""
