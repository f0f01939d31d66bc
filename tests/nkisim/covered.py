"""Which public instructions a property test covers: `@covers("tensor_scalar")` above `@given`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Test = TypeVar("Test", bound=Callable[..., Any])
COVERED: dict[str, list[str]] = {}


def covers(*names: str) -> Callable[[Test], Test]:
    """Note that a hypothesis test checks these instructions against an independent reading."""

    def add(test: Test) -> Test:
        assert getattr(test, "is_hypothesis_test", False), f"{test.__name__} draws nothing"
        for name in names:
            COVERED.setdefault(name, []).append(test.__name__)
        return test

    return add
