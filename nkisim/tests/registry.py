"""What the tests claim: which functions a property test covers, and every mistake with its refusal and its twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from nkisim import errors

Test = TypeVar("Test", bound=Callable[..., Any])
Body = Callable[[bool], Any]
# function -> names of its property tests
COVERED: dict[str, list[str]] = {}


@dataclass(frozen=True)
class Refusal:
    """One rule: `body(True)` breaks it and is refused by `law`, `body(False)` does not break it."""

    law: type[errors.LawError]
    body: Body
    # the instruction, or the group of functions, that refuses; the kernel's name where any may
    op: str
    # "call": the body calls the instruction; "kernel": it returns a kernel's output; "host": it launches by itself
    how: str = "call"
    # the version of the language
    nki: str = "0.6"


REFUSALS: list[Refusal] = []


def covers(*names: str) -> Callable[[Test], Test]:
    """Note that a hypothesis test checks these functions against an independent reading."""

    def add(test: Test) -> Test:
        assert getattr(test, "is_hypothesis_test", False), f"{test.__name__} generates nothing"
        for name in names:
            COVERED.setdefault(name, []).append(test.__name__)
        return test

    return add


def rules(op: str, *pairs: tuple[type[errors.LawError], Body], nki: str = "0.6") -> None:
    """List the rules of an instruction."""
    REFUSALS.extend(Refusal(law, body, op, nki=nki) for law, body in pairs)


def case(law: type[errors.LawError]) -> Callable[[Body], Body]:
    """Register a kernel body that breaks `law` on request."""
    return _register(law, "kernel")


def launch(law: type[errors.LawError]) -> Callable[[Body], Body]:
    """Register a function of the host that launches by itself and breaks `law` on request."""
    return _register(law, "host")


def _register(law: type[errors.LawError], how: str) -> Callable[[Body], Body]:
    def add(body: Body) -> Body:
        REFUSALS.append(Refusal(law, body, body.__name__, how))
        return body

    return add
