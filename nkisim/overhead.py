"""Simulation overhead per instruction and per scheduled event: `python -m nkisim.overhead`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
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
    "no numerics, timeline events": Policy(numerics=False, recording=True),
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


def matmul(a: Any, b: Any) -> Any:
    """Multiply a.T @ b tile by tile, the columns of `a` kept on chip."""
    (depth, rows), columns = a.shape, b.shape[1]
    result = nl.ndarray((rows, columns), dtype=a.dtype, buffer=nl.shared_hbm)
    for m in range(0, rows, 128):
        left = [nl.load(a[k : k + 128, m : m + 128]) for k in range(0, depth, 128)]
        for n in range(0, columns, 512):
            product = nl.ndarray((128, 512), dtype="float32", buffer=nl.psum)
            for k in range(0, depth, 128):
                nisa.nc_matmul(dst=product, stationary=left[k // 128], moving=nl.load(b[k : k + 128, n : n + 512]))
            tile = nl.ndarray((128, 512), dtype=a.dtype)
            nisa.tensor_copy(dst=tile, src=product)
            nisa.dma_copy(dst=result[m : m + 128, n : n + 512], src=tile)
    return result


def whole_kernel() -> None:
    """Print the cost of simulating and scheduling a large product, with its numbers and without."""
    arrays = tuple(np.ones(shape, ml_dtypes.bfloat16) for shape in ((256, 4096), (256, 6144)))
    for numerics in (True, False):
        start = time.process_time()
        policy = Policy(recording=True, numerics=numerics)
        latency = schedule(run(matmul, arrays, policy=policy).recording.events).latency_ns
        took = time.process_time() - start
        how = "with numerics" if numerics else "without numerics"
        print(f"{took:6.2f} s of CPU time  (4096 x 256 x 6144 in bf16, {how}: {latency / 1e3:.1f} us simulated)")


def _stored(tile: Any) -> Any:
    result = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=tile)
    return result


def best(timed: Callable[[], Any], count: int) -> float:
    """Return microseconds of CPU time per instruction, the best of three runs."""
    fastest = float("inf")
    for _ in range(3):
        start = time.process_time()
        timed()
        fastest = min(fastest, time.process_time() - start)
    return fastest / count * 1e6


def main() -> None:
    """Print one line per kernel and mode, in CPU time."""
    tile = np.ones((128, 8), np.float32)
    for kernel in (whole_tiles, slices):
        for name, policy in MODES.items():
            took = best(lambda k=kernel, p=policy: run(k, (tile,), policy=p), 4 * ROUNDS)  # type: ignore[misc]
            print(f"{took:6.1f} us per instruction  ({kernel.__name__}: {name})")
        events = run(kernel, (tile,), policy=Policy(recording=True)).recording.events
        took = best(lambda e=events: schedule(e), len(events))  # type: ignore[misc]
        print(f"{took:6.1f} us per event  ({kernel.__name__}: scheduling, with its band)")
    whole_kernel()


if __name__ == "__main__":
    command.run(main)
