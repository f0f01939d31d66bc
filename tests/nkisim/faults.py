"""The lists of planted faults: kernels and launches that break one law when asked to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nkisim import errors

Case = Callable[[bool], Any]
# bodies of kernels
CASES: dict[str, tuple[type[errors.LawError], Case]] = {}
# functions of the host that launch by themselves
LAUNCHES: dict[str, tuple[type[errors.LawError], Case]] = {}


def case(law: type[errors.LawError]) -> Callable[[Case], Case]:
    """Register a kernel body: with True it breaks `law`, with False it does not."""
    return _into(CASES, law)


def launch(law: type[errors.LawError]) -> Callable[[Case], Case]:
    """Register a whole launch: with True it breaks `law`, with False it does not."""
    return _into(LAUNCHES, law)


def _into(table: dict[str, tuple[type[errors.LawError], Case]], law: type[errors.LawError]) -> Callable[[Case], Case]:
    def add(fn: Case) -> Case:
        table[fn.__name__] = (law, fn)
        return fn

    return add
