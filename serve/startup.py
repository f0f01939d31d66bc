"""A start that fails ends with one sentence, last on stderr, and status 2; TRNSPEC_DEBUG adds the traceback."""

from __future__ import annotations

import errno
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import TracebackType

from model.errors import UserError, sentence_of
from serve.folder import METRICS_VARIABLE

DEBUG_VARIABLE = "TRNSPEC_DEBUG"
# a ValueError raised here is about the command's options; one from anywhere else is a bug and keeps its traceback
_OPTION_MODULES = ("vllm.config", "vllm.engine.arg_utils", "vllm.entrypoints", "vllm.utils.argparse_utils")


def install_excepthook() -> None:
    """In the API process, until `started`: a user's mistake is a sentence, any other error keeps its traceback."""
    if multiprocessing.parent_process() is None:
        sys.excepthook = _end


def started() -> None:
    """The server is ready: from here on an error is not a mistake of the command."""
    sys.excepthook = sys.__excepthook__


@contextmanager
def report_to_parent() -> Iterator[None]:
    """In the engine's process: leave the sentence of a mistake to the API process, which ends after this one."""
    try:
        yield
    except (UserError, OSError) as error:
        _error_file().write_text(_sentence(error) or str(error), encoding="utf-8")
        if os.environ.get(DEBUG_VARIABLE):
            raise
        raise SystemExit(2) from error


def _error_file() -> Path:
    return Path(os.environ[METRICS_VARIABLE]) / "trnspec-start"


def _end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    sentence = _sentence(error)
    if not sentence and _error_file().is_file():
        sentence = _error_file().read_text(encoding="utf-8")
        _error_file().unlink()
    if not sentence or os.environ.get(DEBUG_VARIABLE):
        sys.__excepthook__(kind, error, traceback)
    if sentence:
        print(f"error: {sentence}", file=sys.stderr, flush=True)
        raise SystemExit(2)


def _sentence(error: BaseException) -> str:
    """The sentence for a UserError, an OSError or an option that vLLM's configuration refuses; "" for anything else."""
    cause: BaseException | None = error
    while cause and not isinstance(cause, UserError):
        cause = cause.__cause__ or cause.__context__
    if cause:
        return str(cause)
    if isinstance(error, OSError):
        if error.errno == errno.EADDRINUSE:
            return "the port is in use; end the server that listens on it, or give a different --port"
        return sentence_of(error, "this command")
    *_, raised_in = ["", *(str(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__))]
    if isinstance(error, ValueError) and raised_in.startswith(_OPTION_MODULES):
        # pydantic's ValidationError is a list of errors
        message = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)
        return " ".join(message.removeprefix("Value error, ").split())
    return ""
