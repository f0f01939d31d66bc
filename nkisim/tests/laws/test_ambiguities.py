"""What no document settles warns once, with the question for a device; the usual case is silent."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nkisim.isa as nisa
import nkisim.language as nl
from harness import out, run, tile
from nkisim.errors import AmbiguousManual

DATA = np.arange(512, dtype=np.float32).reshape(64, 8)
TWICE, ONCE = np.zeros((64, 1), np.uint32), np.arange(64, dtype=np.uint32).reshape(64, 1)


def steps_of_zero(_x: Any, _rows: Any, bad: bool) -> Any:
    stored = tile(4, 8)
    nisa.tensor_copy(stored.ap([[8, 4], [0 if bad else 1, 8]]), tile(4, 8))
    return out(stored)


def over_itself(_x: Any, _rows: Any, bad: bool) -> Any:
    stored = tile(4, 8)
    nisa.tensor_copy(stored[:, 1:5] if bad else stored[:, 4:8], stored[:, 0:4])
    return out(stored)


def rows_twice(x: Any, rows: Any, bad: bool) -> Any:
    shared = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    index = nl.load(rows)
    nisa.dma_copy(dst=shared, src=x)
    nisa.dma_copy(dst=shared.ap([[8, 64], [1, 8]], vector_offset=index), src=nl.load(x), dge_mode=nisa.dge_mode.swdge)
    return shared


def largest_of_nan(_x: Any, _rows: Any, bad: bool) -> Any:
    stored = tile(4, 8, value=float("nan") if bad else 1.0)
    result = nl.ndarray((4, 8), nl.float32)
    nisa.max8(result, stored)
    return out(result)


def two_starts(_x: Any, _rows: Any, bad: bool) -> Any:
    wide, result = tile(64, 8), nl.ndarray((32, 8), nl.float32)
    nisa.tensor_tensor(result, wide[0:32], wide[32:64] if bad else wide[0:32], nl.add)
    return out(result)


@pytest.mark.parametrize("kernel", [steps_of_zero, over_itself, rows_twice, largest_of_nan, two_starts])
def test_a_doubt_warns_once(kernel: Callable[..., Any]) -> None:
    for bad, count in ((True, 1), (False, 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(lambda x, rows, bad=bad: kernel(x, rows, bad), DATA, TWICE if bad else ONCE, races=False)
        requested = {
            str(w.message) for w in caught if w.category is AmbiguousManual and "ask a device" in str(w.message)
        }
        assert len(requested) == count, requested
