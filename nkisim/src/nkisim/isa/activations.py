"""Activation functions from their mathematical definitions, in fp64, rounded once to fp32.

The hardware uses undocumented table approximations; the difference to it is not modelled. The
exception is `sin` outside [-pi, pi], where the official simulator extrapolates a cubic.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nkisim.dtypes import Array
from nkisim.isa.functions import Wide, arctan, cos, erf, exp, log, log1p_exp, rounded, sigmoid, sin, tan, tanh
from nkisim.isa.operators import F32, Op, maximum

_SQRT2 = float(np.sqrt(2.0))
_INV_SQRT_2PI = float(1 / np.sqrt(2 * np.pi))
_TANH_C = float(np.sqrt(2 / np.pi))


def _phi(x: Wide) -> Wide:
    return 0.5 * (1.0 + erf(x / _SQRT2))


def _gelu(x: Wide) -> Wide:
    return _zero_at_minus_inf(x, x * _phi(x))


def _gelu_dx(x: Wide) -> Wide:
    return _phi(x) + np.where(np.isinf(x), 0.0, x * exp(-0.5 * x * x) * _INV_SQRT_2PI)


def _gelu_tanh(x: Wide) -> Wide:
    inner = tanh(_TANH_C * (x + 0.044715 * (x * x * x)))
    return _zero_at_minus_inf(x, 0.5 * x * (1 + inner))


def _silu(x: Wide) -> Wide:
    return _zero_at_minus_inf(x, x * sigmoid(x))


def _silu_dx(x: Wide) -> Wide:
    gate = sigmoid(x)
    return gate + np.where(np.isinf(x), 0.0, x * gate * (1 - gate))


def _gelu_sigmoid(x: Wide) -> Wide:
    return _zero_at_minus_inf(x, x * sigmoid(1.702 * x))


def _gelu_sigmoid_dx(x: Wide) -> Wide:
    gate = sigmoid(1.702 * x)
    return gate + np.where(np.isinf(x), 0.0, 1.702 * x * gate * (1 - gate))


def _mish(x: Wide) -> Wide:
    return _zero_at_minus_inf(x, x * tanh(log1p_exp(x)))


def _zero_at_minus_inf(x: Wide, values: Wide) -> Wide:
    """Replace the 0 * inf of a gate by its limit."""
    return np.where(np.isneginf(x), 0.0, values)


def _sin_engine(x: Wide) -> Wide:
    """Return sin, continued by the cubic around +-pi outside [-pi, pi]."""
    edge = x - np.copysign(np.pi, x)
    return np.where(np.abs(x) <= np.pi, sin(x), edge * edge * edge / 6 - edge)


_TABLE: tuple[tuple[str, Callable[[Array], Array]], ...] = (
    ("abs", np.abs),
    ("square", np.square),
    ("exp", rounded(exp)),
    ("log", rounded(log)),
    ("sqrt", np.sqrt),
    ("rsqrt", lambda x: F32(1) / np.sqrt(x)),
    ("tanh", rounded(tanh)),
    ("sigmoid", rounded(sigmoid)),
    ("relu", lambda x: maximum(x, F32(0))),
    ("gelu", rounded(_gelu)),
    ("gelu_apprx_sigmoid", rounded(_gelu_sigmoid)),
    ("gelu_apprx_tanh", rounded(_gelu_tanh)),
    ("gelu_dx", rounded(_gelu_dx)),
    ("gelu_apprx_sigmoid_dx", rounded(_gelu_sigmoid_dx)),
    ("silu", rounded(_silu)),
    ("silu_dx", rounded(_silu_dx)),
    ("softplus", rounded(log1p_exp)),
    ("mish", rounded(_mish)),
    ("erf", rounded(erf)),
    ("erf_dx", rounded(lambda x: 2 / np.sqrt(np.pi) * exp(-x * x))),
    ("reciprocal", lambda x: F32(1) / x),
    ("copy", lambda x: x),
    ("sin", rounded(_sin_engine)),
    ("cos", rounded(cos)),
    ("tan", rounded(tan)),
    ("arctan", rounded(arctan)),
    ("ceil", np.ceil),
    ("floor", np.floor),
    ("trunc", np.trunc),
    ("negative", np.negative),
    ("sign", np.sign),
    ("logical_not", lambda x: (np.asarray(x) == 0).astype(F32)),
)
UNARY: dict[str, Op] = {name: Op(name, "activation", 1, fn) for name, fn in _TABLE}

# table of supported activation functions (shared API page), without prelu, which is trn3
ON_SCALAR_ENGINE = frozenset({
    "copy", "square", "sigmoid", "relu", "gelu", "gelu_dx", "gelu_apprx_tanh", "gelu_apprx_sigmoid",
    "gelu_apprx_sigmoid_dx", "silu", "silu_dx", "tanh", "softplus", "mish", "erf", "erf_dx", "exp", "log", "sin",
    "arctan", "sqrt", "rsqrt", "reciprocal", "sign", "abs",
})  # fmt: skip
# inputs outside these magnitudes give invalid results on the Scalar Engine (shared API page)
VALID: dict[str, tuple[float, float]] = {
    "log": (2.0**-64, 2.0**64),
    "sin": (-float(np.pi), float(np.pi)),
    "arctan": (-float(np.pi) / 2, float(np.pi) / 2),
    "sqrt": (2.0**-116, 2.0**118),
    "rsqrt": (2.0**-87, 2.0**97),
}
