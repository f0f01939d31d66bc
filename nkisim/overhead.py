"""Simulation overhead per instruction: `python -m nkisim.overhead`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from nkisim import isa as nisa
from nkisim import language as nl
from nkisim.launch import run
from nkisim.policy import Policy
from nkisim.tokens import TOKENS

PAIRS = 2500
MODES = {
    "tracking, no timeline": Policy(),
    "no tracking, no timeline": Policy(tracking=False),
    "tracking, timeline events": Policy(recording=True),
}


def _kernel(a: Any) -> Any:
    """Alternate two engines on a tile so small that only the overhead counts."""
    x = nl.load(a)
    y = nl.ndarray(a.shape, dtype=a.dtype)
    for _ in range(PAIRS):
        nisa.tensor_scalar(dst=y, data=x, op0=TOKENS["multiply"], operand0=2.0)
        nisa.activation(dst=y, data=x, op=TOKENS["copy"], scale=2.0)
    result = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=y)
    return result


def measure(policy: Policy) -> float:
    """Return microseconds per instruction, the best of three runs."""
    tile = np.ones((128, 8), np.float32)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        run(_kernel, (tile,), policy=policy)
        best = min(best, time.perf_counter() - start)
    return best / (2 * PAIRS) * 1e6


def main() -> None:
    """Print one line per mode."""
    for name, policy in MODES.items():
        print(f"{measure(policy):6.1f} us per instruction  ({name})")


if __name__ == "__main__":
    main()
