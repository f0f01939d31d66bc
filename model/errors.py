"""The one error that a user may meet: a sentence, never a traceback."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class UserError(Exception):
    """A user's mistake, in one sentence: what came, what was expected, what to do."""


def guarded(work: Callable[[], T], place: str) -> T:
    """Run work on files; an operating-system error becomes a sentence that names the file, or the place."""
    try:
        return work()
    except OSError as error:
        raise UserError(sentence_of(error, place)) from error


def sentence_of(error: OSError, place: str) -> str:
    """A sentence for the operating system's error, with the file or the place."""
    if error.errno == errno.ENOSPC:
        return f"the disk of {place} is full; free some space and run the command again"
    return f"{error.filename or place}: {error.strerror or error}; fix this and run the command again"


def quiet_start() -> None:
    """Let Ctrl-C end a command that is still importing, without a traceback.

    While `python -m` looks for its module, and imports the packages above it, argv[0] is "-m".
    """
    if sys.argv[0] == "-m":
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _not_swallowed(raised: Any) -> None:
    """Raise Ctrl-C again, shortly after it met a callback that cannot pass it on (the garbage collector's)."""
    if issubclass(raised.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        sys.__unraisablehook__(raised)


def run_cli(main: Callable[[], None]) -> None:
    """Run a command: a UserError, or a file that refuses, is a sentence on stderr and exit code 2; Ctrl-C is 130."""
    interrupted = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGALRM, interrupt)
    sys.unraisablehook = _not_swallowed
    try:
        main()
    except (KeyboardInterrupt, Exception) as error:
        # a library may make an error of its own of a Ctrl-C that it meets
        if interrupted or isinstance(error, KeyboardInterrupt):
            print("interrupted: finished work is kept; run the command again to continue", file=sys.stderr)
            raise SystemExit(130) from None
        if isinstance(error, BrokenPipeError):
            sys.stderr.close()
            raise SystemExit(141) from None
        said = _sentence(error)
        if said is None:
            raise
        print(f"error: {said}", file=sys.stderr)
        raise SystemExit(2) from None


def _sentence(error: BaseException) -> str | None:
    """What a user reads of an error, or None if it is a fault of ours."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return sentence_of(error, "this command")
    if isinstance(error, RecursionError):
        return "a JSON file is nested too deeply; it was not written by trnspec, correct it"
    return None
