"""Loops, slices and ordering."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nkisim.core.context import Core, current, register
from nkisim.errors import Deprecated, LoopMisuse, OtherVersion
from nkisim.memory.indexing import DynamicSlice
from nkisim.objects import NkiScalar, VirtualRegister

__all__ = [
    "affine_range", "ds", "dynamic_range", "fori_loop", "no_reorder", "sequential_range", "static_range", "while_loop",
]  # fmt: skip


def ds(start: Any, size: int) -> DynamicSlice:
    """Slice `size` elements from a start that may be known only at run time."""
    return DynamicSlice(start, int(size))


def static_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """Return a Python range (deprecated alias)."""
    return range(start) if stop is None else range(start, stop, step)


affine_range = sequential_range = static_range


def _bound(value: Any, op: str) -> int:
    if isinstance(value, NkiScalar):
        if value.dtype == "int64":
            raise LoopMisuse(op, "bound", "is an int64 scalar", "the loop's comparison has 32 bits; load an int32 one")
        return value.value(op)
    return value.value(op) if isinstance(value, VirtualRegister) else int(value)


def _enter(op: str, step: int) -> Core:
    core = current(op)
    if core.ordered_depth:
        raise LoopMisuse(op, None, "runs inside no_reorder", "keep dynamic loops outside of it")
    if isinstance(step, VirtualRegister) or int(step) < 1:
        raise LoopMisuse(op, "step", f"is {step}", "a positive compile-time integer is needed")
    core.loop_depth += 1
    return core


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Iterator[VirtualRegister]:
    """Loop at run time; the counter is a read-only register (0.6 only, deprecated; use fori_loop)."""
    if current("dynamic_range").policy.traced:
        raise OtherVersion("dynamic_range", None, "went with NKI 0.7", "use nl.fori_loop(lower, upper, body_fun)")
    if stop is None:
        start, stop = 0, start
    core = _enter("dynamic_range", step)
    core.warn("dynamic_range", "dynamic_range is deprecated, use fori_loop", Deprecated)
    try:
        for i in range(_bound(start, "dynamic_range"), _bound(stop, "dynamic_range"), step):
            yield register(core, i, frozen=True)
    finally:
        core.loop_depth -= 1


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[Any], None], step: int = 1) -> None:
    """Call body_fun(counter) for lower, lower + step, ... below upper, at run time.

    The counter is a register; in 0.7 it is an NkiScalar unless a bound is a register.

    Raises:
        LoopMisuse: the body returns something, the step is not a positive integer, or the loop
            is inside no_reorder.
    """
    core = _enter("fori_loop", step)
    scalar = core.policy.traced and not any(isinstance(bound, VirtualRegister) for bound in (lower, upper))
    try:
        for i in range(_bound(lower, "fori_loop"), _bound(upper, "fori_loop"), int(step)):
            counter = NkiScalar(i) if scalar else register(core, i, frozen=True)
            result: object = body_fun(counter)  # type: ignore[func-returns-value]
            if result is not None:
                raise LoopMisuse(
                    "fori_loop", "body_fun", f"returns {result!r:.60}", "it returns None, keep state in SBUF or HBM"
                )
    finally:
        core.loop_depth -= 1


def while_loop(init: Any, body_fun: Callable[[Any], Any]) -> None:
    """Call register = body_fun(register) while the register is not zero, at run time.

    Raises:
        LoopMisuse: the condition is not a register.
    """
    core = _enter("while_loop", 1)
    try:
        condition = init
        while True:
            if not isinstance(condition, VirtualRegister):
                allowed = "start from a register and return the next one from the body"
                raise LoopMisuse("while_loop", "condition", f"is {condition!r:.60}", allowed)
            if condition.value("while_loop") == 0:
                return
            condition = body_fun(condition)
    finally:
        core.loop_depth -= 1


@contextmanager
def no_reorder() -> Iterator[None]:
    """Keep the instructions inside in program order."""
    core = current("no_reorder")
    core.ordered_depth += 1
    core.previous = None
    try:
        yield
    finally:
        core.ordered_depth -= 1
        core.previous = None
