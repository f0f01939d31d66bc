"""`nkisim COMMAND ...`; each command lists its arguments with --help."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence

from nkisim import command, coverage, lint, machine
from nkisim.cli import commands

COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "run": (commands.run, "run a kernel, check every law of the machine, say what comes out"),
    "time": (commands.time, "how long kernels would take on trn2, and the band"),
    "lint": (lint.main, "what the NKI compiler refuses"),
    "report": (commands.report, "a timeline as a page or a picture; a difference of latencies"),
    "trace": (commands.trace_, "a timeline for Perfetto"),
    "coverage": (coverage.main, "what of the public API exists here"),
    "version": (machine.main, "the version, and the processor, BLAS kernels and instruction sets"),
}


def usage() -> str:
    """The list of commands."""
    lines = [f"  {name:<9} {text}" for name, (_, text) in COMMANDS.items()]
    return "usage: nkisim COMMAND ...\n\n" + "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run one command.

    Raises:
        ValueError: there is no such command.
    """
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        raise ValueError(f"there is no command {name!r}; the commands are {', '.join(COMMANDS)}")
    return COMMANDS[name][0](rest)


def console() -> None:
    """The code of the command `nkisim`."""
    # without the simulator's file and line
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    command.run(lambda: main(sys.argv[1:]))


if __name__ == "__main__":
    console()
