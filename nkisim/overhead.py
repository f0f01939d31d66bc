"""Simulation overhead per instruction and per scheduled event: `python -m nkisim.overhead`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from nkisim import command
from nkisim import isa as nisa
from nkisim import language as nl
from nkisim.isa.tokens import TOKENS
from nkisim.launch import run
from nkisim.policy import Policy
from nkisim.timeline.schedule import schedule

ROUNDS = 1500
MODES = {
    "tracking, no timeline": Policy(),
    "no tracking, no timeline": Policy(tracking=False),
    "tracking, timeline events": Policy(recording=True),
    "no tracking, timeline events": Policy(tracking=False, recording=True),
}


def whole_tiles(a: Any) -> Any:
    """Alternate two engines on tiles so small that only the overhead counts."""
    x = nl.load(a)
    y = nl.ndarray(a.shape, dtype=a.dtype)
    for _ in range(2 * ROUNDS):
        nisa.tensor_scalar(dst=y, data=x, op0=TOKENS["multiply"], operand0=2.0)
        nisa.activation(dst=y, data=x, op=TOKENS["copy"], scale=2.0)
    return _stored(y)


def slices(a: Any) -> Any:
    """Load, multiply, accumulate and copy out, every operand a view made for the instruction."""
    x, y = nl.ndarray(a.shape, dtype=a.dtype), nl.ndarray(a.shape, dtype=a.dtype)
    product = nl.ndarray((4, 4), dtype="float32", buffer=nl.psum)
    for i in range(ROUNDS):
        half = slice(4 * (i % 2), 4 * (i % 2) + 4)
        nisa.dma_copy(dst=x[:, half], src=a[:, half])
        nisa.nc_matmul(dst=product[:, 0:4], stationary=x[:, half], moving=x[:, half], accumulate=False)
        nisa.tensor_copy(dst=y[0:4, half], src=product[:, 0:4])
        nisa.activation(dst=y[:, half], data=x[:, half], op=TOKENS["copy"], scale=2.0)
    return _stored(y)


def _stored(tile: Any) -> Any:
    result = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=tile)
    return result


def best(timed: Callable[[], Any], count: int) -> float:
    """Return microseconds per instruction, the best of three runs."""
    fastest = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        timed()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest / count * 1e6


def main() -> None:
    """Print one line per kernel and mode."""
    tile = np.ones((128, 8), np.float32)
    for kernel in (whole_tiles, slices):
        for name, policy in MODES.items():
            took = best(lambda k=kernel, p=policy: run(k, (tile,), policy=p), 4 * ROUNDS)  # type: ignore[misc]
            print(f"{took:6.1f} us per instruction  ({kernel.__name__}: {name})")
        events = run(kernel, (tile,), policy=Policy(recording=True)).recording.events
        took = best(lambda e=events: schedule(e), len(events))  # type: ignore[misc]
        print(f"{took:6.1f} us per event  ({kernel.__name__}: scheduling, with its band)")


if __name__ == "__main__":
    command.run(main)
