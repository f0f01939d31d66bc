"""Activation functions, and rounding on write, property-tested against fp64."""

from __future__ import annotations

import math

import pytest

from nkisim.isa.activations import ON_SCALAR_ENGINE
from properties.tiles import *

erf = np.vectorize(math.erf)
FUNCTIONS: dict[str, Any] = {
    "copy": lambda x: x, "square": np.square, "relu": lambda x: np.maximum(x, 0), "abs": np.abs, "sign": np.sign,
    "exp": np.exp, "tanh": np.tanh, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "erf": erf,
    "silu": lambda x: x / (1 + np.exp(-x)), "softplus": lambda x: np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0),
    "mish": lambda x: x * np.tanh(np.logaddexp(0, x)), "gelu": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
    "gelu_apprx_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "gelu_apprx_sigmoid": lambda x: x / (1 + np.exp(-1.702 * x)), "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf_dx": lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x), "log": np.log, "reciprocal": lambda x: 1 / x,
    "silu_dx": lambda x: (1 + x * (1 - 1 / (1 + np.exp(-x)))) / (1 + np.exp(-x)), "sin": np.sin, "arctan": np.arctan,
    "gelu_dx": lambda x: (1 + erf(x / math.sqrt(2))) / 2 + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi),
    "gelu_apprx_sigmoid_dx":
        lambda x: (1 + 1.702 * x * (1 - 1 / (1 + np.exp(-1.702 * x)))) / (1 + np.exp(-1.702 * x)),
}  # fmt: skip
# functions whose inputs are brought into their documented range first
INTO = {**dict.fromkeys(["sqrt", "rsqrt", "log", "reciprocal"], lambda x: np.abs(x) + 1),
        "sin": lambda x: x / 8, "arctan": lambda x: x / 16}  # fmt: skip


def test_every_activation_function_is_listed() -> None:
    assert set(FUNCTIONS) == ON_SCALAR_ENGINE


@covers("activation", "activation_reduce")
@pytest.mark.parametrize("op", sorted(FUNCTIONS))
@EACH
@given(data=st.data(), shape=SHAPES, dtype=st.sampled_from(FLOATS[:3]), out=st.sampled_from(FLOATS))
def test_activation(data: Any, shape: Shape, op: str, dtype: str, out: str) -> None:
    raw, one = values(shape, dtype, 9), (shape[0], 1)
    x = (INTO.get(op, lambda v: v)(wide(raw)) / 2).astype(raw.dtype)
    scale = np.full(one, 2, np.float32)
    bias = np.zeros(one, np.float32) if op in INTO else values(one, "float32", 10) / 4
    reduced = data.draw(st.booleans())

    def body(dst: Any, total: Any, p: Any, s: Any, b: Any) -> None:
        fn = getattr(nl, op)
        if reduced:
            nisa.activation_reduce(dst=dst, op=fn, data=p, scale=s, bias=b, reduce_op=nl.add, reduce_res=total)
            return
        nisa.memset(dst=total, value=0.0)
        nisa.activation(dst=dst, op=fn, data=p, scale=2.0, bias=b)

    result, total = laid_out(body, [(x, data.draw(places(shape))), (scale, Place()), (bias, Place())],
                            [(shape, out, data.draw(places(shape))), (one, "float32", Place())])  # fmt: skip
    wanted = fp64(FUNCTIONS[op], wide((wide(x) * 2 + wide(bias)).astype(np.float32)))
    agree(result, wanted, out, 4, np.maximum(np.abs(wanted), 2.0**-10))
    if reduced:
        size = np.abs(wanted).sum(1, keepdims=True) + 1e-3
        agree(total, wanted.sum(1, keepdims=True), "float32", 4 + shape[1], size)


@PROPERTY
@given(st.sampled_from(["bfloat16", "float16", "float8_e4m3", "float8_e5m2"]), st.integers(0, 2**32 - 1))
def test_rounding_takes_the_nearest_value_and_the_even_one_of_two(dtype: str, seed: int) -> None:
    """Every finite value of the type is listed from its bits; the nearest is searched, not computed."""
    kind = values((1,), dtype, 0).dtype
    bits = np.arange(2 ** (8 * kind.itemsize), dtype=np.uint32).astype(f"u{kind.itemsize}")
    finite = np.isfinite(bits.view(kind).astype(np.float32))
    grid = np.unique(wide(bits.view(kind)[finite]))
    shape = (1, 40)
    spread = values(shape, "float32", seed) * np.float32(2.0 ** (seed % 12 - 6))
    x = np.clip(spread, grid[0], grid[-1]).astype(np.float32)
    # half of them are exactly between two neighbours
    at = np.searchsorted(grid, x[0, :20])
    x[0, :20] = (grid[at - 1] + grid[np.minimum(at, len(grid) - 1)]) / 2
    result = wide(laid_out(lambda dst, p: nisa.tensor_copy(dst=dst, src=p), [(x, Place())], [(shape, dtype, Place())]))
    for value, seen in zip(wide(x)[0], result[0], strict=True):
        distance = np.abs(grid - value)
        best = grid[distance == distance.min()]
        even = [b for b in best if int(np.array(b).astype(kind).view(f"u{kind.itemsize}")) % 2 == 0]
        assert seen == (best[0] if len(best) == 1 else even[0])


def test_the_comparison_can_fail() -> None:
    one = np.ones((1, 1), np.float32)
    agree(one, one, "float32")
    for wrong, slack in ((1 + 2.0**-23, 0), (1 + 2.0**-21, 4)):
        with pytest.raises(AssertionError):
            agree(one, one * np.float64(wrong), "float32", slack)
    assert rounded(np.array([2.5, 300.0]), "int8").tolist() == [2.0, 127.0]


def test_a_write_outside_of_the_view_is_noticed() -> None:
    x = values((4, 3), "float32", 1)
    with pytest.raises(AssertionError, match="outside of"):
        laid_out(lambda dst, p: nisa.tensor_copy(dst=dst.ap([[6, 4], [1, 3]], offset=None), src=p),
                 [(x, Place())], [((4, 3), "float32", Place(step=2, after=1))])  # fmt: skip
