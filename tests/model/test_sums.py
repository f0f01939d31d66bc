"""Sums along rows on a CPU: one order, which numpy can follow, for any number of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir

from trnspec.runtime import sums
from trnspec.runtime.pjrt import SAME_BITS

pytestmark = pytest.mark.released_code
COLUMNS = 16


def _summed(x_RN: np.ndarray, in_order: bool = True) -> np.ndarray:
    """Sums of squares, as a norm has them, compiled as the runtime compiles graphs."""
    lowered = jax.jit(lambda x: jnp.square(x).sum(-1)).lower(x_RN)
    module = lowered.compiler_ir("stablehlo")
    if in_order:
        with module.context, ir.Location.unknown():
            sums.in_order(module)
            assert module.operation.verify()
    return np.asarray(lowered.compile(compiler_options=SAME_BITS)(x_RN))


def _by_numpy(x_RN: np.ndarray) -> np.ndarray:
    """Columns first, one row of them after the other, then halves."""
    squares = np.pad(np.square(x_RN), ((0, 0), (0, -x_RN.shape[1] % COLUMNS)))
    total = np.zeros((len(x_RN), COLUMNS), np.float32)
    for begin in range(0, squares.shape[1], COLUMNS):
        total += squares[:, begin : begin + COLUMNS]
    while total.shape[1] > 1:
        total = total[:, : total.shape[1] // 2] + total[:, total.shape[1] // 2 :]
    return total[:, 0]


@pytest.mark.parametrize("numbers", [100, 32, 192, 16])
def test_a_sum_has_one_order(numbers: int) -> None:
    # their squares are exact, alone or in a fused product and sum; sums of them are not
    rng = np.random.default_rng(0)
    x_RN = (rng.integers(-40, 40, (33, numbers)) * 2.0 ** rng.integers(0, 12, (33, numbers))).astype(np.float32)
    expected = _by_numpy(x_RN)
    for rows in (1, 2, 3, 8, 33):
        assert np.array_equal(_summed(x_RN[:rows]), expected[:rows])


def test_xla_s_own_order_is_another_one() -> None:
    x_RN = np.random.default_rng(0).normal(0, 1, (33, 192)).astype(np.float32)
    assert not np.array_equal(_summed(x_RN, in_order=False), _by_numpy(x_RN))
