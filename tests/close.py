"""How close is close: at most twice as far from the law in fp64 as the textbook computed in the same dtype."""

from __future__ import annotations

from typing import Any

import numpy as np


def error(out: Any, exact: Any) -> float:
    """Root of the mean square error."""
    return float(np.sqrt(np.mean((np.asarray(out).astype(np.float64) - exact) ** 2)))


def is_close(out: Any, naive: Any, exact: Any, ulps: int = 0) -> bool:
    """Whether error(out) <= 2 error(naive), and fp32 ulps of the largest number; zeros must break the rule."""
    bound = 2 * error(naive, exact) + ulps * float(np.finfo(np.float32).eps * np.abs(exact).max())
    assert error(np.zeros_like(exact), exact) > bound, "the textbook is as far off as zeros: nothing is compared"
    return error(out, exact) <= bound
