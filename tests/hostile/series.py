"""What every hostile series has: attempts, and what was said where one fell short."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field

from model.errors import UserError


@dataclass
class Series:
    """A row of the table: the number of attempts, and what those printed that did not end as they must."""

    name: str
    tried: int = 0
    short: list[str] = field(default_factory=list)

    def count(self, what: str, fault: str) -> None:
        """One attempt; `fault` says how it fell short, and is empty if it did not."""
        self.tried += 1
        self.short += [f"{what}: {fault}"] * bool(fault)

    def __str__(self) -> str:
        first = f"{self.name:<44} {self.tried - len(self.short)} of {self.tried}"
        return "\n".join([first, *(f"  FELL SHORT  {s[:300]}" for s in self.short)])


def refusal(work: Callable[[], object]) -> str:
    """Why an attempt that must be refused in one sentence was not; empty if it was."""
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            work()
    except UserError as error:
        return "" if str(error).isprintable() and 10 < len(str(error)) < 900 else f"not one sentence: {str(error)!r}"
    except SystemExit as end:
        # argparse's own refusals, and a doctor's
        return "" if end.code in (1, 2) else f"exit {end.code}"
    except OSError as error:
        # run_cli turns these into a sentence of the file's name
        return "" if error.filename else f"{type(error).__name__} without a file's name"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "was accepted"
