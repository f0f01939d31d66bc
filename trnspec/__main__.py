"""`python -m trnspec COMMAND ...`: every command of the project behind one name."""

from __future__ import annotations

import runpy
import sys

from trnspec import shadowed

_COMMANDS = {
    "build": ("compile.build", "a bundle from a spec: plan, graphs, weights"),
    "generate": ("model.generate", "text from a bundle, and figures of speculation"),
    "doctor": ("compile.doctor", "a bundle's summary, and whether it is whole and can generate"),
    "store": ("compile.store", "push, pull, list and verify bundles in S3"),
    "serve-command": ("compile.serve_command", "the command by which a server loads a bundle"),
}


def main(arguments: list[str]) -> None:
    """Run a command as `python -m` would; without one, list the commands."""
    command, *rest = arguments or ["--help"]
    if command in ("-h", "--help"):
        print("python -m trnspec COMMAND ... (COMMAND --help says more)\n")
        print("\n".join(f"  {name:<15}{what}" for name, (_, what) in _COMMANDS.items()))
        return
    sentence = shadowed()
    if command not in _COMMANDS:
        sentence = f"there is no command {command!r}; the commands are {', '.join(_COMMANDS)}"
    if sentence:
        print(f"error: {sentence}", file=sys.stderr)
        raise SystemExit(2)
    sys.argv = [sys.argv[0], *rest]
    runpy.run_module(_COMMANDS[command][0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
