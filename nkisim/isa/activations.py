"""Activation functions from their mathematical definitions, in fp32.

The hardware uses undocumented table approximations; the difference to it is not modelled. The
exception is `sin` outside [-pi, pi], where the official simulator extrapolates a cubic.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nkisim.dtypes import Array
from nkisim.isa.operators import F32, Op

_SQRT2 = float(np.sqrt(2.0))
_INV_SQRT_2PI = float(1 / np.sqrt(2 * np.pi))
_TANH_C = float(np.sqrt(2 / np.pi))


def erf(x: Array) -> Array:
    """Return the error function with about 1e-10 absolute error, in fp64.

    Taylor series up to 2.5, continued fraction of erfc beyond it.
    """
    wide = np.asarray(x, np.float64)
    size = np.abs(wide)
    small = np.minimum(size, 2.5)
    term, total = small.copy(), small.copy()
    square = small * small
    for n in range(1, 34):
        term = term * -square / n
        total = total + term / (2 * n + 1)
    series = total * 2 / np.sqrt(np.pi)
    large = np.maximum(size, 2.5)
    fraction = large
    for n in range(24, 0, -1):
        fraction = large + (n / 2) / fraction
    tail = 1 - np.exp(-(np.minimum(large, 30.0) ** 2)) / (fraction * np.sqrt(np.pi))
    result = np.copysign(np.where(size <= 2.5, series, tail), wide)
    return np.where(np.isnan(wide), np.nan, result)


def _sigmoid(x: Array) -> Array:
    return 0.5 * (np.tanh(0.5 * np.asarray(x, np.float64)) + 1.0)


def _softplus(x: Array) -> Array:
    return np.logaddexp(0.0, np.asarray(x, np.float64))


def _phi(x: Array) -> Array:
    return 0.5 * (1.0 + erf(np.asarray(x, np.float64) / _SQRT2))


def _gelu(x: Array) -> Array:
    return _zero_at_minus_inf(x, np.asarray(x, np.float64) * _phi(x))


def _gelu_dx(x: Array) -> Array:
    wide = np.asarray(x, np.float64)
    return _phi(wide) + np.where(np.isinf(wide), 0.0, wide * np.exp(-0.5 * wide**2) * _INV_SQRT_2PI)


def _gelu_tanh(x: Array) -> Array:
    wide = np.asarray(x, np.float64)
    inner = np.tanh(_TANH_C * (wide + 0.044715 * wide**3))
    return _zero_at_minus_inf(x, 0.5 * wide * (1 + inner))


def _silu(x: Array) -> Array:
    return _zero_at_minus_inf(x, np.asarray(x, np.float64) * _sigmoid(x))


def _silu_dx(x: Array) -> Array:
    wide, gate = np.asarray(x, np.float64), _sigmoid(x)
    return gate + np.where(np.isinf(wide), 0.0, wide * gate * (1 - gate))


def _gelu_sigmoid(x: Array) -> Array:
    wide = np.asarray(x, np.float64)
    return _zero_at_minus_inf(x, wide * _sigmoid(1.702 * wide))


def _gelu_sigmoid_dx(x: Array) -> Array:
    wide = np.asarray(x, np.float64)
    gate = _sigmoid(1.702 * wide)
    return gate + np.where(np.isinf(wide), 0.0, 1.702 * wide * gate * (1 - gate))


def _mish(x: Array) -> Array:
    return _zero_at_minus_inf(x, np.asarray(x, np.float64) * np.tanh(_softplus(x)))


def _zero_at_minus_inf(x: Array, values: Array) -> Array:
    """Replace the 0 * inf of a gate by its limit."""
    return np.where(np.isneginf(np.asarray(x)), 0.0, values)


def _sin_engine(x: Array) -> Array:
    """Return sin, continued by the cubic around +-pi outside [-pi, pi]."""
    wide = np.asarray(x, np.float64)
    edge = wide - np.copysign(np.pi, wide)
    return np.where(np.abs(wide) <= np.pi, np.sin(wide), edge**3 / 6 - edge)


def _fp32(fn: Callable[[Array], Array]) -> Callable[[Array], Array]:
    def apply(x: Array) -> Array:
        return np.asarray(fn(x)).astype(F32)

    return apply


_TABLE: tuple[tuple[str, Callable[[Array], Array]], ...] = (
    ("abs", np.abs),
    ("square", np.square),
    ("exp", np.exp),
    ("log", np.log),
    ("sqrt", np.sqrt),
    ("rsqrt", lambda x: F32(1) / np.sqrt(x)),
    ("tanh", np.tanh),
    ("sigmoid", _fp32(_sigmoid)),
    ("relu", lambda x: np.maximum(x, F32(0))),
    ("gelu", _fp32(_gelu)),
    ("gelu_apprx_sigmoid", _fp32(_gelu_sigmoid)),
    ("gelu_apprx_tanh", _fp32(_gelu_tanh)),
    ("gelu_dx", _fp32(_gelu_dx)),
    ("gelu_apprx_sigmoid_dx", _fp32(_gelu_sigmoid_dx)),
    ("silu", _fp32(_silu)),
    ("silu_dx", _fp32(_silu_dx)),
    ("softplus", _fp32(_softplus)),
    ("mish", _fp32(_mish)),
    ("erf", _fp32(erf)),
    ("erf_dx", _fp32(lambda x: 2 / np.sqrt(np.pi) * np.exp(-(np.asarray(x, np.float64) ** 2)))),
    ("reciprocal", lambda x: F32(1) / x),
    ("copy", lambda x: x),
    ("sin", _fp32(_sin_engine)),
    ("cos", np.cos),
    ("tan", np.tan),
    ("arctan", np.arctan),
    ("ceil", np.ceil),
    ("floor", np.floor),
    ("trunc", np.trunc),
    ("negative", np.negative),
    ("sign", np.sign),
    ("logical_not", lambda x: (np.asarray(x) == 0).astype(F32)),
)
UNARY: dict[str, Op] = {name: Op(name, "activation", 1, fn) for name, fn in _TABLE}

# table of supported activation functions (shared API page), without prelu, which is trn3
ON_SCALAR_ENGINE = frozenset(
    [
        "copy",
        "square",
        "sigmoid",
        "relu",
        "gelu",
        "gelu_dx",
        "gelu_apprx_tanh",
        "gelu_apprx_sigmoid",
        "gelu_apprx_sigmoid_dx",
        "silu",
        "silu_dx",
        "tanh",
        "softplus",
        "mish",
        "erf",
        "erf_dx",
        "exp",
        "log",
        "sin",
        "arctan",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "sign",
        "abs",
    ]
)
# inputs outside these magnitudes give invalid results on the Scalar Engine (shared API page)
VALID: dict[str, tuple[float, float]] = {
    "log": (2.0**-64, 2.0**64),
    "sin": (-float(np.pi), float(np.pi)),
    "arctan": (-float(np.pi) / 2, float(np.pi) / 2),
    "sqrt": (2.0**-116, 2.0**118),
    "rsqrt": (2.0**-87, 2.0**97),
}
