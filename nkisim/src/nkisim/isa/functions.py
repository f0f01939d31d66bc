"""Elementary functions in fp64 from what IEEE 754 fixes: +, -, *, /, sqrt, rounding to integers, comparisons.

The last bits of a library's exp or tanh depend on the processor; these do not, so that nothing computed from them
does. Where argument and result are fp32 numbers the relative error is below 2**-40, that of `power` below 2**-36.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Context, Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

from nkisim.dtypes import Array

Wide = NDArray[np.float64]

_DIGITS = Context(prec=90)
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534")
_HALF_PI = _DIGITS.divide(_PI, Decimal(2))
_LN2 = 0.6931471805599453
# exp: a table of 2**(j / 64)
_STEPS = 64
# the sum with a small number has that number, rounded to an integer, in its last bits
_MAGIC = 1.5 * 2.0**52
# elements at a time, so that a function's intermediate values stay in the cache
_BLOCK = 8192


def rounded(function: Callable[[Wide], Array]) -> Callable[[Array], Array]:
    """Make a function of fp64 one of fp32 whose result is rounded once."""

    def apply(x: Array) -> Array:
        flat = np.asarray(x).reshape(-1)
        result = np.empty(flat.shape, np.float32)
        for start in range(0, flat.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            result[part] = function(flat[part].astype(np.float64))
        return result.reshape(np.shape(x))

    return apply


def _series(x: Wide, coefficients: list[float]) -> Wide:
    """The sum of c[n] * x**n, by Horner."""
    result = np.full(x.shape, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result *= x
        result += coefficient
    return result


def _powers_of_two() -> NDArray[np.int64]:
    """The bits of 2**(j / 64), less j at the place where `exp` adds it."""
    with localcontext(_DIGITS):
        values = [float((Decimal(2).ln() * j / _STEPS).exp()) for j in range(_STEPS)]
    return np.array(values).view(np.int64) - (np.arange(_STEPS) << 46)


_POWERS = _powers_of_two()


def exp(x: Wide) -> Wide:
    """e**x = 2**(k / 64) by table * e**rest by its series; beyond +-700, as fp32 infinite or 0, that of +-700."""
    x = np.clip(x, -700.0, 700.0)
    scaled = x * (_STEPS / _LN2)
    scaled += _MAGIC
    k = scaled.view(np.int64)
    power = _POWERS.take(k & (_STEPS - 1))
    power += k << 46
    scaled -= _MAGIC
    scaled *= _LN2 / _STEPS
    x -= scaled
    result = x * (1 / 24)
    for coefficient in (1 / 6, 1 / 2, 1.0):
        result += coefficient
        result *= x
    result += 1.0
    result *= power.view(np.float64)
    return result


def _log_of_ratio(s: Wide) -> Wide:
    """log((1 + s) / (1 - s)) for |s| <= 1/3."""
    return 2 * s * _series(s * s, [1 / n for n in range(1, 30, 2)])


def log(x: Wide) -> Wide:
    """The natural logarithm; of 0 minus infinity, of negative numbers NaN."""
    fraction, exponent = np.frexp(x)
    low = fraction < np.sqrt(0.5)
    fraction = np.where(low, 2 * fraction, fraction)
    result = (exponent - low) * _LN2 + _log_of_ratio((fraction - 1) / (fraction + 1))
    result = np.where(x > 0, result, np.where(x == 0, -np.inf, np.nan))
    return np.where(x == np.inf, x, result)


def log1p_exp(x: Wide) -> Wide:
    """log(1 + e**x), without cancellation."""
    small = exp(-np.abs(x))
    return np.maximum(x, 0.0) + _log_of_ratio(small / (2 + small))


def sigmoid(x: Wide) -> Wide:
    """1 / (1 + e**-x)."""
    return 1 / (1 + exp(-x))


def tanh(x: Wide) -> Wide:
    """Up to 1/2 by Lambert's continued fraction, beyond it from exp."""
    size = np.abs(x)
    square = np.minimum(size, 0.5) ** 2
    fraction = np.full(x.shape, 15.0)
    for n in range(13, 0, -2):
        fraction = n + square / fraction
    small = exp(-2 * size)
    return np.copysign(np.where(size < 0.5, size / fraction, (1 - small) / (1 + small)), x)


def _three_parts(number: Decimal) -> tuple[float, float, float]:
    """A number between 1 and 2 as a sum of three, the first two of 33 bits each."""
    with localcontext(_DIGITS):
        first = int(number * 2**32) / 2**32
        second = int((number - Decimal(first)) * 2**65) / 2**65
        return first, second, float(number - Decimal(first) - Decimal(second))


_PARTS = _three_parts(_HALF_PI)


def _quadrants(x: Wide) -> tuple[NDArray[np.int64], Wide]:
    """Return k and x - k * pi / 2, which is within +-pi / 4; the rest is NaN for values that are not finite."""
    near = np.abs(x) < 2.0**15
    k = np.rint(np.where(near, x, 0.0) * float(1 / _HALF_PI))
    rest = np.where(near, x, np.nan)
    # k times each of the first two parts of pi / 2 is exact
    for part in _PARTS:
        rest = rest - k * part
    quadrants = k.astype(np.int64)
    far = np.nonzero(~near & np.isfinite(x))
    with localcontext(_DIGITS):
        pairs = [divmod(Decimal(value) + _HALF_PI / 2, _HALF_PI) for value in np.abs(x[far]).tolist()]
        sign = np.sign(x[far])
        quadrants[far] = sign * np.array([int(quotient % 4) for quotient, _ in pairs])
        rest[far] = sign * np.array([float(remainder - _HALF_PI / 2) for _, remainder in pairs])
    return quadrants, rest


def _factorials(first: int) -> list[float]:
    """The coefficients of the series of sin (1) or cos (0) in x**2."""
    coefficient, result = 1.0, []
    for n in range(first, 20, 2):
        result.append(coefficient)
        coefficient = -coefficient / ((n + 1) * (n + 2))
    return result


def _sin_cos(x: Wide) -> tuple[Wide, Wide]:
    """Return sin and cos."""
    quadrants, rest = _quadrants(x)
    square = rest * rest
    sine, cosine = rest * _series(square, _factorials(1)), _series(square, _factorials(0))
    odd = (quadrants & 1).astype(bool)
    sines = np.where(odd, cosine, sine)
    cosines = np.where(odd, sine, cosine)
    return np.where(quadrants & 2, -sines, sines), np.where((quadrants + 1) & 2, -cosines, cosines)


def sin(x: Wide) -> Wide:
    """The sine of any fp32 number; of -0 it is -0."""
    return np.where(x == 0, x, _sin_cos(x)[0])


def cos(x: Wide) -> Wide:
    """The cosine of any fp32 number."""
    return _sin_cos(x)[1]


def tan(x: Wide) -> Wide:
    """The tangent of any fp32 number."""
    sine, cosine = _sin_cos(x)
    return np.where(x == 0, x, sine / cosine)


def arctan(x: Wide) -> Wide:
    """Eight times the series of an eighth of the angle."""
    part = np.clip(x, -1e30, 1e30)
    for _ in range(3):
        part = part / (1 + np.sqrt(1 + part * part))
    return 8 * part * _series(-part * part, [1 / n for n in range(1, 25, 2)])


def erf(x: Wide) -> Wide:
    """The error function with about 1e-10 absolute error: Taylor series up to 2.5, beyond it erfc's fraction."""
    size = np.abs(x)
    small = np.minimum(size, 2.5)
    term, series = small.copy(), small.copy()
    square = small * small
    for n in range(1, 34):
        term = term * -square / n
        series = series + term / (2 * n + 1)
    large = np.maximum(size, 2.5)
    fraction = large
    for n in range(24, 0, -1):
        fraction = large + (n / 2) / fraction
    tail = 1 - exp(-(np.minimum(large, 30.0) ** 2)) / (fraction * np.sqrt(np.pi))
    result = np.copysign(np.where(size <= 2.5, series * 2 / np.sqrt(np.pi), tail), x)
    return np.where(np.isnan(x), np.nan, result)


def power(x: Array, y: Array | float) -> Array:
    """x**y: integers exactly; floats as e**(y * log x), with IEEE's answers for zeros, infinities and NaN."""
    x, y = np.broadcast_arrays(x, y)
    if x.dtype.kind != "f":
        return np.power(x, y)
    # the library gives infinities, NaN, zeros and the sign everywhere
    known = np.power(x, y)
    size = np.abs(x).astype(np.float64)
    ordinary = (size > 0) & np.isfinite(size) & np.isfinite(y) & ~np.isnan(known)
    finite = exp(y.astype(np.float64) * log(np.where(ordinary, size, 1.0)))
    return np.where(ordinary, np.copysign(finite, known).astype(np.float32), known)
