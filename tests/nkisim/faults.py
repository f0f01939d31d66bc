"""The list of planted faults: kernels that break one law when asked to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nkisim import errors

Case = Callable[[bool], Any]
CASES: dict[str, tuple[type[errors.LawError], Case]] = {}


def case(law: type[errors.LawError]) -> Callable[[Case], Case]:
    """Register a kernel body: with True it breaks `law`, with False it does not."""

    def add(fn: Case) -> Case:
        CASES[fn.__name__] = (law, fn)
        return fn

    return add
