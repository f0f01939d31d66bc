"""The vendor's simulator as a witness: the same kernels on both, their outputs compared."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import nkisim.isa
import nkisim.language

ABSENT = "no importable package `nki` has nki.simulate, so nothing can be compared"
TESTS = Path(__file__).parent
# what the documents leave open in fp32 (docs/simulator.md, "How it computes"): the order of sums and the
# approximation of functions, as a share of the largest magnitude; narrower results may differ by one rounding
GAP = {4: 2.0**-16, 2: 2.0**-8, 1: 2.0**-3}


def is_real(package: ModuleType) -> bool:
    """Distinguish a vendor's nki from an empty look-alike and from nkisim, by what it can do."""
    parts = (getattr(package, "isa", None), getattr(package, "language", None))
    able = hasattr(parts[0], "nc_matmul") and hasattr(parts[1], "ndarray")
    return able and callable(getattr(package, "simulate", None)) and not hasattr(package, "__nkisim__")


def vendor() -> ModuleType | None:
    """Import the vendor's nki next to nkisim, which may answer to that name here; None where it is absent."""
    ours = {n: sys.modules.pop(n) for n in list(sys.modules) if getattr(sys.modules[n], "__nkisim__", False)}
    try:
        package = importlib.import_module("nki")
        for part in ("isa", "language"):
            importlib.import_module(f"nki.{part}")
    except ImportError:
        return None
    finally:
        # a process that simulates goes on with what it had
        sys.modules.update(ours)
    return package if is_real(package) else None


@dataclass
class Witness:
    """The other simulator, and how many outputs agreed in which way."""

    package: Any
    exact: int = 0
    within: int = 0
    largest: dict[str, float] = field(default_factory=dict)

    def check(self, kernel: Callable[..., Any], lnc: int, args: Sequence[Any], ours: Any) -> None:
        """Run the kernel there too and compare every output."""
        with _names_of(self.package, kernel):
            received = self.package.simulate(self.package.jit(kernel)[lnc])(*args)
        for mine, other in zip(_arrays(ours), _arrays(received), strict=True):
            self._compare(mine, np.asarray(other))

    def _compare(self, mine: Any, other: Any) -> None:
        assert (mine.shape, mine.dtype.itemsize) == (other.shape, other.dtype.itemsize)
        if np.ascontiguousarray(mine).tobytes() == np.ascontiguousarray(other).tobytes():
            self.exact += 1
            return
        assert mine.dtype.kind not in "iub", "integers differ"
        wide, seen = mine.astype(np.float64), other.astype(np.float64)
        assert np.array_equal(np.isfinite(wide), np.isfinite(seen)), "infinities or NaN differ"
        finite = np.isfinite(wide)
        scale = max(1e-30, float(np.abs(wide[finite]).max(initial=0)))
        gap = float(np.abs(wide[finite] - seen[finite]).max(initial=0)) / scale
        assert gap <= GAP[mine.dtype.itemsize], f"outputs differ by {gap:.2e} of the largest"
        self.within += 1
        self.largest[mine.dtype.name] = max(gap, self.largest.get(mine.dtype.name, 0))


def _arrays(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


@contextlib.contextmanager
def _names_of(package: Any, kernel: Callable[..., Any]) -> Iterator[None]:
    """Let the test modules that a kernel was written in mean the other package by `nisa` and `nl`."""
    swap = {id(nkisim.isa): package.isa, id(nkisim.language): package.language}
    files = ((m, getattr(m, "__file__", None)) for m in list(sys.modules.values()))
    tests = [module for module, file in files if file and Path(file).is_relative_to(TESTS)]
    before = [(vars(m), n, v) for m in tests for n, v in list(vars(m).items()) if id(v) in swap]
    for names, name, value in before:
        names[name] = swap[id(value)]
    try:
        yield
    finally:
        for names, name, value in before:
            names[name] = value


# the witness of this run, when it was requested and is there
ACTIVE: list[Witness] = []
