"""The error bound of kernels: twice the error of the textbook formula in the same dtype, both against fp64."""

from __future__ import annotations

from typing import Any

import numpy as np


def error(out: Any, exact: Any) -> float:
    """Root of the mean square error."""
    return float(np.sqrt(np.mean((np.asarray(out).astype(np.float64) - exact) ** 2)))


def is_close(out: Any, naive: Any, exact: Any, ulps: int = 0) -> bool:
    """Whether error(out) <= 2 error(naive) + fp32 ulps of the largest number; zeros must exceed the bound."""
    bound = 2 * error(naive, exact) + ulps * float(np.finfo(np.float32).eps * np.abs(exact).max())
    assert error(np.zeros_like(exact), exact) > bound, "the textbook is no better than zeros: nothing is compared"
    return error(out, exact) <= bound
