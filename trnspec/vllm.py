"""vLLM's entry point: the server's platform, if the packages that Python finds under our names are ours."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from trnspec import shadowed


def platform() -> str | None:
    """The path of the platform class. Commands that name no bundle are left alone if a package is shadowed."""
    if sentence := shadowed():
        if any((Path(argument.partition("=")[2] or argument) / "manifest.json").is_file() for argument in sys.argv[1:]):
            print(f"error: {sentence}", file=sys.stderr)
            raise SystemExit(2)
        return None
    path: str | None = importlib.import_module("serve.plugin").platform()
    return path
