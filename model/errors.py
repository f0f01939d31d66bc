"""The error that a user sees: a sentence, never a traceback."""

import argparse
import errno
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class UserError(Exception):
    """A user's mistake, in one sentence: what was given, what is supported, what to do."""


def guarded(work: Callable[[], T], place: str) -> T:
    """Run `work`; an OSError becomes a UserError that names the error's file, or `place`."""
    try:
        return work()
    except OSError as error:
        raise UserError(sentence_of(error, place)) from error


def sentence_of(error: OSError, place: str) -> str:
    """An OSError as a sentence, with its file or the place."""
    if error.errno == errno.ENOSPC:
        return f"the disk of {place} is full; free some space and run the command again"
    return f"{error.filename or place}: {error.strerror or error}; fix this and run the command again"


def command_line(module: str, does: str, example: str) -> argparse.ArgumentParser:
    """The parser of `python -m MODULE`, whose help is a sentence, the options and an example."""
    prog = f"python -m {module}"
    return argparse.ArgumentParser(prog=prog, description=does, epilog=f"example: {prog} {example}")


def run_cli(main: Callable[[], None]) -> None:
    """Run a command: a UserError or an OSError is a sentence on stderr and exit code 2; Ctrl-C is 130."""
    interrupts = list[int]()

    def interrupt(number: int, frame: Any) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        main()
    except (KeyboardInterrupt, Exception) as error:
        # a library may raise an error of its own for a Ctrl-C that it meets
        if interrupts or isinstance(error, KeyboardInterrupt):
            print("interrupted: run the command again to continue from the finished files", file=sys.stderr)
            raise SystemExit(130) from None
        if isinstance(error, BrokenPipeError):
            sys.stderr.close()
            raise SystemExit(141) from None
        if not isinstance(error, (UserError, OSError, RecursionError)):
            raise
        nested = "a JSON file is nested too deeply; it was not written by trnspec, correct it"
        sentence = sentence_of(error, "this command") if isinstance(error, OSError) else str(error)
        sentence = nested if isinstance(error, RecursionError) else sentence
        shortened = f"{sentence[:1000]} ... {sentence[-300:]}"
        print(f"error: {sentence if len(sentence) < len(shortened) else shortened}", file=sys.stderr)
        raise SystemExit(2) from None
