"""A series of hostile attempts: their number, and the failures."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field

from model.errors import UserError


@dataclass
class Series:
    """The number of attempts, and a line for each failed one."""

    name: str
    tried: int = 0
    failures: list[str] = field(default_factory=list)

    def count(self, what: str, fault: str) -> None:
        """Count an attempt; `fault` is empty or describes the failure."""
        self.tried += 1
        self.failures += [f"{what}: {fault}"] * bool(fault)

    def __str__(self) -> str:
        first = f"{self.name:<44} {self.tried - len(self.failures)} of {self.tried}"
        return "\n".join([first, *(f"  FAILED  {s[:300]}" for s in self.failures)])


def refusal(work: Callable[[], object]) -> str:
    """Empty if `work` is refused in one sentence, otherwise what happened."""
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            work()
    except UserError as error:
        return "" if str(error).isprintable() and 10 < len(str(error)) < 900 else f"not one sentence: {str(error)!r}"
    except SystemExit as end:
        # refusals of argparse and of the doctor
        return "" if end.code in (1, 2) else f"exit {end.code}"
    except OSError as error:
        # run_cli prints a sentence with the file's name
        return "" if error.filename else f"{type(error).__name__} without a file's name"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "was accepted"
