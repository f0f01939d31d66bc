"""Sums without an order: products are exact sums rounded once, reductions go by halves whatever the layout."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nkisim.isa as nisa
import nkisim.language as nl
from harness import on_device
from nkisim.isa import sums
from nkisim.isa.operators import BINARY, reduce_axis

Case = Callable[[Any, int, int, int], tuple[Any, Any]]


def exact(a: Any, b: Any) -> Any:
    """The law: sums of fractions, rounded to fp64 and then to fp32."""
    columns = [[[Fraction(float(x)) for x in column] for column in tile.T] for tile in (a, b)]
    rows = [[float(sum(x * y for x, y in zip(m, n, strict=True))) for n in columns[1]] for m in columns[0]]
    # a zero is +0
    return np.array(rows).astype(np.float32) + np.float32(0)


def normal(rng: Any, depth: int, rows: int, columns: int) -> tuple[Any, Any]:
    return rng.standard_normal((depth, rows)), rng.standard_normal((depth, columns))


def wide(rng: Any, depth: int, rows: int, columns: int) -> tuple[Any, Any]:
    """Exponents all over."""
    return tuple(x * 2.0 ** rng.integers(-60, 60, x.shape) for x in normal(rng, depth, rows, columns))  # type: ignore[return-value]


def cancelling(rng: Any, depth: int, rows: int, columns: int) -> tuple[Any, Any]:
    """Every product comes again with the other sign, and one of an odd depth stays."""
    a, b = wide(rng, depth, rows, columns)
    half = depth // 2
    a[half : 2 * half], b[half : 2 * half] = a[:half], -b[:half]
    return a, b


def ties(rng: Any, depth: int, rows: int, columns: int) -> tuple[Any, Any]:
    """Integers whose sums of 25 bits are often halfway between two fp32 numbers."""
    a, b = (rng.integers(-(2**11), 2**11, (depth, n)).astype(float) for n in (rows, columns))
    a[0], b[0] = 2.0**12, 2.0**12
    return a, b


def near_ties(rng: Any, depth: int, rows: int, columns: int) -> tuple[Any, Any]:
    """A tie and one product so small that fp64 just holds it next to the others, or does not."""
    a, b = ties(rng, depth, rows, columns)
    a[-1], b[-1] = rng.choice([-1, 1], rows), 2.0 ** -rng.integers(20, 60, columns)
    return a, b


def subnormal(rng: Any, depth: int, rows: int, columns: int) -> tuple[Any, Any]:
    a, b = normal(rng, depth, rows, columns)
    return a * 1e-38, b * 2.0 ** rng.integers(-30, 0, columns)


def overflowing(rng: Any, depth: int, rows: int, columns: int) -> tuple[Any, Any]:
    a, b = normal(rng, depth, rows, columns)
    return a * 1e19, b * 1e19


def halves(rng: Any, depth: int, rows: int, columns: int) -> tuple[Any, Any]:
    """bfloat16, whose products and sums are often exact."""
    return tuple(x.astype(ml_dtypes.bfloat16) for x in normal(rng, depth, rows, columns))  # type: ignore[return-value]


CASES = [normal, wide, cancelling, ties, near_ties, subnormal, overflowing, halves]


def tiles(case: Case, depth: int, rows: int, columns: int, seed: int = 0) -> tuple[Any, Any]:
    """fp32 operands of a case."""
    a, b = case(np.random.default_rng(seed), depth, rows, columns)
    return a.astype(np.float32), b.astype(np.float32)


@pytest.fixture(autouse=True)
def _as_in_a_launch() -> Any:
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 1), (2, 1, 33), (128, 9, 13), (256, 4, 6), (127, 20, 20)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_products_are_exact_sums(case: Case, shape: tuple[int, int, int]) -> None:
    a, b = tiles(case, *shape)
    assert sums.products(a, b).tobytes() == exact(a, b).tobytes()


def one_by_one(a: Any, b: Any, out: Any) -> Any:
    """A BLAS that adds the last product first."""
    out[...] = 0
    for k in range(a.shape[1] - 1, -1, -1):
        out += np.outer(a[:, k], b[k])
    return out


@pytest.mark.parametrize("case", CASES)
def test_the_order_of_a_blas_cannot_be_seen(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = tiles(case, 128, 40, 50)
    before = sums.products(a, b)
    monkeypatch.setattr(np, "matmul", one_by_one)
    assert sums.products(a, b).tobytes() == before.tobytes()


@pytest.mark.parametrize("ulps", [1, -1])
def test_an_error_within_the_bound_cannot_be_seen_and_one_beyond_it_can(
    ulps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: what a BLAS returns is used, and is not believed further than its bound."""
    a, b = tiles(normal, 128, 100, 300)
    before, right = sums.products(a, b), np.matmul

    def wrong(by: float) -> Any:
        def blas(a: Any, b: Any, out: Any) -> Any:
            right(a, b, out=out)
            out += by * np.spacing(out)
            return out

        return blas

    monkeypatch.setattr(np, "matmul", wrong(ulps))
    assert sums.products(a, b).tobytes() == before.tobytes()
    monkeypatch.setattr(np, "matmul", wrong(ulps * 2.0**20))
    assert sums.products(a, b).tobytes() != before.tobytes()


def test_products_with_infinities_and_nan() -> None:
    """NaN and infinities where any order has them, and the finite sums as without them."""
    a, b = tiles(normal, 20, 6, 6)
    clean = sums.products(a, b)
    a[3, 1], a[4, 2], a[5, 2], b[7, 3], a[8, 4] = np.inf, np.inf, -np.inf, np.nan, -np.inf
    b[3], b[4], b[5] = np.abs(b[3]), np.abs(b[4]), np.abs(b[5])
    b[8, 0] = 0
    clean = sums.products(np.where(np.isfinite(a), a, 0), np.where(np.isfinite(b), b, 0))
    result = sums.products(a, b)
    assert np.isnan(result[2]).all()
    assert np.isnan(result[:, 3]).all()
    assert (np.delete(result[1], 3) == np.inf).all()
    assert np.isnan(result[4, 0])
    assert np.array_equal(np.delete(result[4], [0, 3]), -np.inf * np.sign(np.delete(b[8], [0, 3])))
    rest = np.ix_([0, 3, 5], [0, 1, 2, 4, 5])
    assert result[rest].tobytes() == clean[rest].tobytes()
    assert set(result[np.isnan(result)].view(np.uint32)) == {np.float32(np.nan).view(np.uint32)}


def test_both_halves_of_a_double_row_are_one_sum() -> None:
    """2**40 and -2**40 in different halves leave what lies between them."""
    a, b = (np.zeros((32, 2, 32), ml_dtypes.float8_e5m2) for _ in range(2))
    a[0, 0], a[0, 1], a[1, 0] = 2.0**15, -(2.0**15), 2.0**-10
    b[0, :], b[1, 0] = 2.0**15, 1

    def body(dst: Any, stationary: Any, moving: Any) -> None:
        total = nl.ndarray(dst.shape, nl.float32, nl.psum)
        mode = nisa.matmul_perf_mode.double_row
        nisa.nc_matmul(dst=total, stationary=stationary, moving=moving, perf_mode=mode)
        nisa.tensor_copy(dst=dst, src=total)

    assert np.all(on_device(body, (a, b), [((32, 32), "float32")]) == 2.0**-10)


def halving(values: list[Any]) -> Any:
    """The law of reductions."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        pairs = [x + y for x, y in zip(values[: len(values) - half], values[half:], strict=True)]
        values = pairs + values[len(pairs) : half]
    return values[0]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 100, 127, 129, 513])
def test_reductions_go_by_halves(count: int) -> None:
    rows = np.random.default_rng(count).standard_normal((5, count)).astype(np.float32)
    before = rows.copy()
    law = np.array([[halving(list(row))] for row in rows])
    layouts = [rows, np.asfortranarray(rows), np.repeat(rows, 3, axis=1)[:, ::3], rows[::-1][::-1]]
    for layout in layouts:
        assert sums.total(layout).tobytes() == law.tobytes()
    assert sums.total(rows.T, axis=0).tobytes() == law.T.tobytes()
    assert sums.total(rows[2:3]).tobytes() == law[2:3].tobytes()
    assert rows.tobytes() == before.tobytes()


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_a_zero_that_is_the_largest_or_smallest_is_positive(name: str) -> None:
    """Which of -0 and +0 numpy takes depends on the processor and on the place."""
    zeros = np.array([[-0.0, 0.0], [0.0, -0.0], [-0.0, -0.0], [0.0, 0.0]], np.float32)
    op = BINARY[name]
    for values in (reduce_axis(op, zeros), op.fn(zeros[:, 0], zeros[:, 1])):
        assert not values.any()
        assert not np.signbit(values).any()
    assert np.array_equal(op.fn(np.array([3, -3], np.int32), 0), [3, 0] if name == "maximum" else [0, -3])
