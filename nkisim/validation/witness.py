"""The vendor's simulator as a witness: the same kernels on both, their outputs compared."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import nkisim.isa
import nkisim.language

ABSENT = "no importable package `nki` has nki.simulate, so nothing can be compared"
TESTS = Path(__file__).parents[1] / "tests"
# what the documents leave open in fp32 (docs/coverage.md, "How it computes"): the order of sums and the
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


class Observed:
    """A module whose functions are remembered by name when they are read."""

    def __init__(self, module: Any, used: set[str]) -> None:
        self._module, self._used = module, used

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if inspect.isroutine(value):
            self._used.add(name)
        return value


@dataclass
class Witness:
    """The other simulator, and how many outputs agreed in which way; `tally` counts outcomes by instruction."""

    package: Any
    exact: int = 0
    within: int = 0
    largest: dict[str, float] = field(default_factory=dict)
    tally: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def check(self, kernel: Callable[..., Any], lnc: int, args: Sequence[Any], ours: Any) -> None:
        """Run the kernel there too and compare every output."""
        used: set[str] = set()
        before, outcome = (self.exact, self.within), "an error"
        try:
            with _names_of(self.package, used):
                received = self.package.simulate(self.package.jit(kernel)[lnc])(*args)
            outcome = "different"
            for mine, other in zip(_arrays(ours), _arrays(received), strict=True):
                self._compare(mine, np.asarray(other))
            outcome = ""
        finally:
            exact, within = self.exact - before[0], self.within - before[1]
            for name in used:
                self.tally[name] += Counter({"equal": exact, "within": within, **({outcome: 1} if outcome else {})})

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
def _names_of(package: Any, used: set[str]) -> Iterator[None]:
    """Let the test modules mean the other package by `nisa` and `nl`; `used` gets the names of its instructions."""
    swap = {id(nkisim.isa): Observed(package.isa, used), id(nkisim.language): package.language}
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


# the witness of this run, when the option is given and the package is installed
ACTIVE: list[Witness] = []
# those of the modules that are done
SEEN: list[Witness] = []
RESULT = "## Result\n"


def result(package: Any) -> str:
    """The last section of docs/witness.md, a row for each instruction; without a package: that it was not run."""
    tally: dict[str, Counter[str]] = defaultdict(Counter)
    for name, counts in (item for seen in SEEN for item in seen.tally.items()):
        tally[name] += counts
    heads = ("equal", "within", "different", "an error")
    if package is None:
        about = "**Not run yet**: no machine with AWS's packages was at hand. The instructions that a run compares:"
        rows = [f"| `{name}` |" + " not run |" * len(heads) for name in sorted(tally)]
    else:
        about = f"Run with nki {getattr(package, '__version__', 'of unknown version')} by nkisim {nkisim.__version__}:"
        rows = [f"| `{name}` |" + "".join(f" {tally[name][h]} |" for h in heads) for name in sorted(tally)]
    head = "| instruction | outputs with equal bits | within the gap | kernels that differ | that the other refuses |"
    return "\n".join([RESULT, about, "", head, "|---|---|---|---|---|", *rows, ""])
