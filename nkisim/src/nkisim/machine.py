"""The differences between machines: the processor, the BLAS's kernels, numpy's instruction sets; `nkisim version`."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nkisim.command import Parser

# variables that make a library use other instructions than the processor has
FORCING = ("OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "GLIBC_TUNABLES")
_CORE_NAMES = ("scipy_openblas_get_corename64_", "scipy_openblas_get_corename", "openblas_get_corename")


def processor() -> str:
    """The model of the processor, as the system names it."""
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        facts = ""
    models = [line.split(":", 1)[1].strip() for line in facts.splitlines() if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def blas_kernels() -> str:
    """The processor that numpy's OpenBLAS has taken its kernels for; of other libraries only the name is known."""
    # symbols of the libraries that the module is linked with are looked up through it
    library = ctypes.CDLL(importlib.import_module("numpy._core._multiarray_umath").__file__)
    for name in _CORE_NAMES:
        if hasattr(library, name):
            function = getattr(library, name)
            function.restype = ctypes.c_char_p
            return str(function().decode())
    return str(_built()["Build Dependencies"]["blas"]["name"])


def instruction_sets() -> list[str]:
    """The instruction sets of numpy's loops: its baseline and the sets that it detected."""
    sets = _built()["SIMD Extensions"]
    return [*sets["baseline"], *sets.get("found", [])]


def _built() -> Any:
    """How numpy was built, and the sets that it finds now."""
    return np.show_config(mode="dicts")


def facts() -> dict[str, str]:
    """The possible differences, in words, and the variables that force them."""
    known = {
        "processor": processor(),
        "BLAS kernels": blas_kernels(),
        "numpy": f"{np.__version__} with {' '.join(instruction_sets())}",
    }
    return known | {name: os.environ[name] for name in FORCING if os.environ.get(name)}


def main(arguments: Sequence[str]) -> int:
    """Print nkisim's version, and the processor, BLAS kernels and instruction sets that it runs on."""
    parser = Parser(prog="nkisim version", description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    listed = {"nkisim": importlib.import_module("nkisim").__version__} | facts()
    print(json.dumps(listed) if options.json else "\n".join(f"{name}: {fact}" for name, fact in listed.items()))
    return 0
