"""Elementary functions against fifty digits, and made of nothing that a processor may compute differently."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest

from nkisim.isa import functions
from nkisim.isa.activations import UNARY
from nkisim.isa.operators import BINARY

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534")
# those of numpy that IEEE 754 does not fix
LIBRARY = ["exp", "expm1", "exp2", "log", "log1p", "log2", "log10", "tanh", "sin", "cos", "tan", "arctan", "sinh",
           "cosh", "power", "float_power", "logaddexp", "cbrt", "hypot", "arctan2"]  # fmt: skip


@pytest.fixture(autouse=True)
def _digits() -> Iterator[None]:
    """Digits for the law, also of sines of 1e38 and of what is left when 1 is taken away."""
    with localcontext() as context, np.errstate(all="ignore"):
        context.prec = 90
        yield


def sine(x: Decimal) -> Decimal:
    x = x % (2 * PI)
    total, term, n = Decimal(0), x, 1
    while abs(term) > Decimal(10) ** -60:
        total, term, n = total + term, -term * x * x / ((n + 1) * (n + 2)), n + 2
    return total


def angle(x: Decimal) -> Decimal:
    """The arctangent."""
    doublings = 0
    while abs(x) > Decimal("0.1"):
        x, doublings = x / (1 + (1 + x * x).sqrt()), doublings + 1
    total, power, n = Decimal(0), x, 1
    while abs(power) > Decimal(10) ** -70:
        total, power, n = total + power / n, -power * x * x, n + 2
    return total * 2**doublings


def error_function(x: Decimal) -> Decimal:
    total, term, n = Decimal(0), x, 0
    while abs(term) > Decimal(10) ** -70:
        total, term, n = total + term / (2 * n + 1), -term * x * x / (n + 1), n + 1
    return total * 2 / PI.sqrt()


def hyperbolic(x: Decimal) -> Decimal:
    """The tangent."""
    power = (2 * x).exp()
    return (power - 1) / (power + 1)


# the function, its law, the decades of its arguments, whether they may be negative
LAWS: dict[str, tuple[Callable[[Any], Any], Callable[[Decimal], Decimal], tuple[float, float], bool]] = {
    "exp": (functions.exp, lambda x: x.exp(), (-8, 1.9), True),
    "log": (functions.log, lambda x: x.ln(), (-44, 38), False),
    "log near 1": (lambda x: functions.log(1 + x), lambda x: (1 + x).ln(), (-6, -1), True),
    "log1p_exp": (functions.log1p_exp, lambda x: (1 + x.exp()).ln(), (-8, 1.9), True),
    "sigmoid": (functions.sigmoid, lambda x: 1 / (1 + (-x).exp()), (-8, 1.9), True),
    "tanh": (functions.tanh, hyperbolic, (-20, 2), True),
    "sin": (functions.sin, sine, (-20, 38), True),
    "cos": (functions.cos, lambda x: sine(x + PI / 2), (-20, 38), True),
    "tan": (functions.tan, lambda x: sine(x) / sine(x + PI / 2), (-20, 38), True),
    "arctan": (functions.arctan, angle, (-20, 38), True),
    "erf": (functions.erf, error_function, (-8, 0.8), True),
    "power": (lambda x: functions.exp(2.5 * functions.log(x)), lambda x: (x.ln() * 5 / 2).exp(), (-15, 15), False),
}


def worst(name: str, function: Callable[[Any], Any]) -> float:
    """The largest relative error of a function on fp32 numbers of its decades."""
    _, law, decades, negative = LAWS[name]
    rng = np.random.default_rng(len(name))
    sizes = 10 ** rng.uniform(*decades, 300)
    if name == "log near 1":
        # so that 1 + x is an fp32 number
        sizes = np.ceil(sizes * 2**23) / 2**23
    x = (sizes * rng.choice([-1, 1] if negative else [1], 300)).astype(np.float32).astype(np.float64)
    pairs = zip(x.tolist(), np.asarray(function(x), np.float64).tolist(), strict=True)
    lawful = [(law(Decimal(value)), Decimal(result)) for value, result in pairs]
    return float(max(abs((result - right) / right) for right, result in lawful))


@pytest.mark.parametrize("name", LAWS)
def test_relative_errors(name: str) -> None:
    assert worst(name, LAWS[name][0]) < (2.0**-36 if name == "power" else 2.0**-40)


def test_an_error_of_fp32_is_seen() -> None:
    """The control: numpy's fp32 exponential is not as close."""
    assert worst("exp", lambda x: np.exp(x.astype(np.float32))) > 2.0**-30


@pytest.mark.parametrize("multiple", [1, 2, 3, 11, 33, 22 * 10**6])
def test_sines_close_to_a_multiple_of_pi(multiple: int) -> None:
    """The fp32 numbers around it, where all digits but the last cancel."""
    near = np.float32(float(PI) * multiple)
    x = np.array([np.nextafter(near, np.float32(-1)), near, np.nextafter(near, np.float32(1e30))], np.float64)
    right = np.array([float(sine(Decimal(value))) for value in x.tolist()])
    assert np.all(np.abs(functions.sin(x) / right - 1) < 2.0**-40)


def test_what_is_not_finite() -> None:
    x = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0])
    expected = {
        functions.exp: [np.inf, 0, np.nan, 1, 1],
        functions.log: [np.inf, np.nan, np.nan, -np.inf, -np.inf],
        functions.log1p_exp: [np.inf, 0, np.nan, math.log(2), math.log(2)],
        functions.sigmoid: [1, 0, np.nan, 0.5, 0.5],
        functions.tanh: [1, -1, np.nan, 0, -0.0],
        functions.sin: [np.nan, np.nan, np.nan, 0, -0.0],
        functions.cos: [np.nan, np.nan, np.nan, 1, 1],
        functions.tan: [np.nan, np.nan, np.nan, 0, -0.0],
        functions.arctan: [math.pi / 2, -math.pi / 2, np.nan, 0, -0.0],
        functions.erf: [1, -1, np.nan, 0, -0.0],
    }
    for function, values in expected.items():
        result, right = function(x).astype(np.float32), np.array(values, np.float32)
        assert np.array_equal(result, right, equal_nan=True), function.__name__
        known = ~np.isnan(right)
        assert np.array_equal(np.signbit(result[known]), np.signbit(right[known])), function.__name__


def test_powers_that_ieee_754_names() -> None:
    """Zeros, infinities, NaN, signs, and exact powers of integers."""
    values = np.array([0.0, -0.0, 1, -1, 2, -2, 3, 0.5, np.inf, -np.inf, np.nan], np.float32)
    x, y = (grid.reshape(-1) for grid in np.meshgrid(values, np.append(values, [-3, 10]).astype(np.float32)))
    result, right = functions.power(x, y), np.power(x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
    assert result.dtype == np.float32
    integers = np.isfinite(right) & (y == np.rint(y))
    assert np.array_equal(result[integers], right[integers])
    np.testing.assert_allclose(result, right, rtol=2e-7)
    assert np.array_equal(functions.power(np.array([3, -2]), np.array([4, 3])), [81, -8])


def test_blocks_and_layouts_do_not_affect_a_function() -> None:
    """An element by itself, in a row, in a tile of many blocks, and in any stride."""
    x = np.random.default_rng(0).standard_normal((130, 300)).astype(np.float32)
    for name in ("exp", "gelu", "tanh", "sin"):
        function = UNARY[name].fn
        full = function(x)
        assert function(x[7]).tobytes() == full[7].tobytes()
        assert function(x[7:8, 9:10]).tobytes() == full[7:8, 9:10].tobytes()
        assert function(x.T[::3]).tobytes() == np.ascontiguousarray(full.T[::3]).tobytes()


@pytest.mark.parametrize("name", [*UNARY, *(n for n, op in BINARY.items() if op.kind == "arith")])
def test_no_library_function_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator without numpy's functions whose last bits a processor decides."""
    x = np.random.default_rng(1).uniform(0.1, 90, (20, 30)).astype(np.float32)
    op = UNARY.get(name) or BINARY[name]
    arguments = (x, x[::-1])[: op.arity]
    before = op.fn(*arguments)

    def wrong(*operands: Any, **_: Any) -> Any:
        return np.full(np.shape(operands[0]), 3.0, np.float32)

    for function in LIBRARY:
        monkeypatch.setattr(np, function, wrong)
    assert op.fn(*arguments).tobytes() == before.tobytes()


def test_a_library_function_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    x = np.arange(5, dtype=np.float32)

    @functions.rounded
    def requests(x: Any) -> Any:
        return np.exp(x)

    before = requests(x)
    monkeypatch.setattr(np, "exp", np.square)
    assert requests(x).tobytes() != before.tobytes()
