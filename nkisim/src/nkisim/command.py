"""How nkisim's commands end: a sentence on stderr instead of a traceback, or one JSON object on stdout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from nkisim.errors import LawError, NkiValidationError


class Parser(argparse.ArgumentParser):
    """Arguments that are refused in one sentence, without the page of usage."""

    def error(self, message: str) -> NoReturn:
        """Refuse.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{message}; see {self.prog} --help")


def read_json(path: Path, how: str) -> Any:
    """The content of a JSON file.

    Raises:
        ValueError: it is not JSON; `how` says what writes such a file.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be read; {how}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); {how}") from None


def described(error: BaseException) -> dict[str, Any]:
    """An error for programs: its class, its sentence, and for a law the wrong value, its place and the limit."""
    facts: dict[str, Any] = {"error": type(error).__name__, "message": sentence(error)}
    if isinstance(error, LawError):
        file, line = error.line or (None, None)
        facts |= {"op": error.op, "operand": error.operand, "found": error.actual, "allowed": error.allowed}
        facts |= {"file": file, "line": line}
    return facts


def sentence(error: BaseException) -> str:
    """An error for people."""
    if isinstance(error, OSError):
        return f"{error.filename} cannot be used ({error.strerror}); give a different path"
    return " ".join(str(error).split()).replace(f"{Path.cwd()}/", "")


def run(main: Callable[[], int | None]) -> None:
    """Run a command: a mistake of the user's ends with one sentence and code 2, Ctrl-C with 130."""
    try:
        raise SystemExit(main())
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(141) from None
    except (NkiValidationError, ValueError, SyntaxError, OSError) as error:
        if "--json" in sys.argv:
            print(json.dumps(described(error)))
        print(f"error: {sentence(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
