"""What every hostile series has: attempts, and what was said where one fell short."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field

from model.errors import UserError


@dataclass
class Series:
    """A row of the table: attempts tried, those that ended as they must, and what the others printed."""

    name: str
    held: int = 0
    tried: int = 0
    short: list[str] = field(default_factory=list)

    def count(self, what: str, fault: str) -> None:
        """One attempt; `fault` says how it fell short, and is empty if it held."""
        self.tried += 1
        self.held += not fault
        if fault:
            self.short.append(f"{what}: {fault}")

    def __str__(self) -> str:
        lines = [f"{self.name:<44} {self.held} of {self.tried}", *(f"  FELL SHORT  {s[:300]}" for s in self.short)]
        return "\n".join(lines)


def refusal(work: Callable[[], object]) -> str:
    """Why an attempt that must be refused in one sentence was not; empty if it was."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            work()
    except UserError as error:
        return _sentence(str(error))
    except SystemExit as end:
        # argparse's own refusals, and a doctor's
        return "" if end.code in (1, 2) else f"exit {end.code}"
    except OSError as error:
        # run_cli turns these into a sentence of the file's name
        return "" if error.filename else f"{type(error).__name__} without a file's name"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "was accepted"


def _sentence(text: str) -> str:
    if "\n" in text or not text.isprintable():
        return f"not one printable sentence: {text!r}"
    return "" if 10 < len(text) < 900 else f"a sentence of {len(text)} characters"
