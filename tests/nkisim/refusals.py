"""Refusals one by one: a call that breaks one rule, and the same call without the mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import nkisim.isa as nisa
import nkisim.language as nl
from nkisim import errors
from tests.nkisim.harness import out, psum, tile

Body = Callable[[bool], Any]


@dataclass(frozen=True)
class Refusal:
    """One rule of one instruction: `body(True)` breaks it, `body(False)` does not."""

    op: str
    law: type[errors.LawError]
    body: Body


REFUSALS: list[Refusal] = []


def rules(op: str, *pairs: tuple[type[errors.LawError], Body]) -> None:
    """List the rules of an instruction."""
    REFUSALS.extend(Refusal(op, law, body) for law, body in pairs)


def words(*numbers: int, dtype: str = "uint32") -> Any:
    """Return a column of integers, one per partition (inside a kernel)."""
    made = nl.ndarray((len(numbers), 1), dtype=dtype)
    for row, number in enumerate(numbers):
        nisa.dma_copy(dst=made[row : row + 1], src=tile(1, 1, dtype, number))
    return made


def hbm(rows: int = 128, columns: int = 8, dtype: str = "float32", value: float = 1) -> Any:
    """Return a tensor in HBM that was written (inside a kernel)."""
    return out(tile(rows, columns, dtype, value))


def bank(rows: int = 128, columns: int = 128, dtype: str = "float32") -> Any:
    """Return a PSUM tile that nobody wrote (inside a kernel)."""
    return nl.ndarray((rows, columns), dtype=dtype, buffer=nl.psum)


__all__ = ["REFUSALS", "bank", "hbm", "psum", "rules", "tile", "words"]
