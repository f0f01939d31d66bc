"""The host's refusals before a fused decode kernel runs: rows, dtypes and cores, one sentence each."""

from __future__ import annotations

from typing import Any

from nki_kernels.tiles import P

# the turned rows of 128 x 8192 numbers and their squares leave room for the stream of weights
MAX_HIDDEN = 8192


def check_rows(x: Any, gamma: Any) -> None:
    """x is (..., E) with 1 to 128 rows, gamma (E,), E a multiple of 128."""
    shape = tuple(x.shape)
    if len(shape) < 2 or not 1 <= _count(shape[:-1]) <= P:
        raise ValueError(f"x is {shape}, (..., E) with 1 to {P} rows is needed: split the batch or lower k")
    hidden = shape[-1]
    if hidden % P or not P <= hidden <= MAX_HIDDEN:
        raise ValueError(
            f"E is {hidden}, a multiple of {P} up to {MAX_HIDDEN} is needed: use the reference for this model"
        )
    if tuple(gamma.shape) != (hidden,):
        raise ValueError(f"gamma is {tuple(gamma.shape)}, ({hidden},) is needed: pass the norm of this layer")


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def check_dtypes(*arrays: Any) -> None:
    """All bfloat16 or all float32."""
    names = {str(a.dtype).removeprefix("torch.") for a in arrays}
    if len(names) > 1 or not names <= {"float32", "bfloat16"}:
        raise ValueError(
            f"dtypes are {', '.join(sorted(names))}, all float32 or all bfloat16 is needed: convert rows and weights"
        )


def check_lnc(lnc: int) -> None:
    """One or two cores."""
    if lnc not in (1, 2):
        raise ValueError(f"lnc is {lnc}, 1 or 2 cores share a launch on trn2: pass one of them")
