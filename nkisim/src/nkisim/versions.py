"""The versions of the language that nkisim answers as, and the names that the manual of each has."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

# the default first
VERSIONS = ("0.6", "0.7")
# chooses one for launches and the linter
VARIABLE = "NKISIM_NKI"
# names, parameters and defaults by the manual
SIGNATURES = {v: Path(__file__).parent / f"nki_{v.replace('.', '_')}_signatures.json" for v in VERSIONS}


@cache
def _modules(version: str) -> dict[str, Any]:
    modules: dict[str, Any] = json.loads(SIGNATURES[version].read_text())["modules"]
    return modules


@cache
def signatures(version: str) -> dict[str, list[list[str]]]:
    """Return the parameters of a version's functions by dotted name, each as [name] or [name, default]."""
    modules = _modules(version).items()
    return {f"{module}.{name}": listed for module, parts in modules for name, listed in parts["functions"].items()}


@cache
def names(version: str) -> frozenset[str]:
    """Return the dotted names of a version's functions, classes and constants."""
    modules = _modules(version)
    kinds = ("functions", "classes", "constants")
    return frozenset(f"{module}.{name}" for module, parts in modules.items() for kind in kinds for name in parts[kind])
