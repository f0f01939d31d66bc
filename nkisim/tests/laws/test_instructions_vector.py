"""Vector and Scalar instructions against an independent fp64 reading of the manual."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nkisim.isa as nisa
import nkisim.language as nl
from nkisim.tests.harness import STORED, draw, on_device

FLOATS = ("float32", "bfloat16", "float16")
# half a unit in the last place, relative, plus fp32 rounding inside
HALF_ULP = {"float32": 2.0**-22, "bfloat16": 2.0**-8, "float16": 2.0**-10}
COMMON = settings(max_examples=25, deadline=None)


def close(found: Any, wanted: Any, dtype: str) -> None:
    tiny = 1e-6 if dtype != "float16" else 1e-4
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=HALF_ULP[dtype], atol=tiny * np.abs(wanted).max())


BINARY = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum,
    "minimum": np.minimum, "less": np.less, "greater_equal": np.greater_equal,
    "equal": np.equal, "logical_and": np.logical_and, "logical_xor": np.logical_xor,
}  # fmt: skip


@COMMON
@given(
    st.sampled_from(sorted(BINARY)), st.sampled_from(FLOATS), st.sampled_from(FLOATS),
    st.integers(1, 128), st.integers(1, 70),
)  # fmt: skip
def test_tensor_tensor(op: str, a: str, b: str, rows: int, columns: int) -> None:
    x, y = draw((rows, columns), a, 1), draw((rows, columns), b, 2)
    found = on_device(
        lambda dst, p, q: nisa.tensor_tensor(dst=dst, data1=p, data2=q, op=getattr(nl, op)),
        (x, y), [((rows, columns), a)],
    )  # fmt: skip
    close(found, BINARY[op](x.astype(np.float64), y.astype(np.float64)).astype(np.float64), a)


def test_tensor_tensor_of_words_is_exact_on_gpsimd_and_fp32_on_vector() -> None:
    x = np.full((4, 3), 2**24 + 1, np.int32)
    y = np.zeros_like(x)

    def add(dst: Any, p: Any, q: Any, engine: Any = nisa.engine.unknown) -> None:
        nisa.tensor_tensor(dst=dst, data1=p, data2=q, op=nl.add, engine=engine)

    assert (on_device(add, (x, y), [(x.shape, "int32")]) == 2**24 + 1).all()
    vector = on_device(lambda *t: add(*t, engine=nisa.engine.vector), (x, y), [(x.shape, "int32")])
    assert (vector == 2**24).all()


@COMMON
@given(st.booleans(), st.booleans(), st.sampled_from(FLOATS), st.integers(1, 40))
def test_tensor_scalar(reverse0: bool, reverse1: bool, dtype: str, columns: int) -> None:
    x, column = draw((128, columns), dtype, 3), draw((128, 1), "float32", 4)
    found = on_device(
        lambda dst, p, c: nisa.tensor_scalar(
            dst=dst, data=p, op0=nl.subtract, operand0=c, reverse0=reverse0, op1=nl.subtract,
            operand1=1.5, reverse1=reverse1),
        (x, column), [((128, columns), "float32")],
    )  # fmt: skip
    wide, c = x.astype(np.float64), column.astype(np.float64)
    first = c - wide if reverse0 else wide - c
    close(found, 1.5 - first if reverse1 else first - 1.5, "float32")


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "uint32"])
def test_bit_operators_keep_bits(dtype: str) -> None:
    info = np.iinfo(STORED[dtype])
    x = np.arange(64).reshape(8, 8).astype(STORED[dtype]) * 3
    x[0, 0] = info.max
    found = on_device(
        lambda dst, p: nisa.tensor_scalar(
            dst=dst, data=p, op0=nl.right_shift, operand0=1, op1=nl.bitwise_xor, operand1=5),
        (x,), [(x.shape, dtype)],
    )  # fmt: skip
    bits = np.dtype(f"u{x.dtype.itemsize}")
    assert np.array_equal(found, ((x.view(bits) >> 1) ^ bits.type(5)).view(x.dtype))


@pytest.mark.parametrize(
    ("dtype", "values", "wanted"),
    [
        ("int8", [0.5, 1.5, 2.5, -0.5, 200, -200, np.inf, -np.inf],
         [0, 2, 2, 0, 127, -128, 127, -128]),
        ("uint8", [0.5, 1.5, 255.4, 255.6, -3, 1e9, np.inf, 2.5], [0, 2, 255, 255, 0, 255, 255, 2]),
        ("int32", [3e9, -3e9, 16777217, 0.5, 1.5, -2.5, 7, -7],
         [2**31 - 1, -(2**31), 16777216, 0, 2, -2, 7, -7]),
    ],
)  # fmt: skip
def test_integers_round_to_even_and_saturate(dtype: str, values: Any, wanted: Any) -> None:
    x = np.array([values], np.float32)
    found = on_device(lambda dst, p: nisa.tensor_copy(dst=dst, src=p), (x,), [(x.shape, dtype)])
    assert found.tolist() == [wanted]


def test_fp8_e4m3_ends_at_240() -> None:
    x = np.array([[240, 247, 249, 300, -500, np.inf, 0.001953125, 17]], np.float32)
    found = on_device(lambda dst, p: nisa.tensor_copy(dst=dst, src=p), (x,), [(x.shape, "float8_e4m3")]).astype(
        np.float32
    )
    assert found.tolist() == [[240, 240, np.inf, np.inf, -np.inf, np.inf, 0.001953125, 16]]


def test_tfloat32_keeps_ten_mantissa_bits() -> None:
    def body(dst: Any, p: Any) -> None:
        short = nl.ndarray(p.shape, dtype=nl.tfloat32)
        nisa.tensor_copy(dst=short, src=p)
        nisa.tensor_copy(dst=dst, src=short)

    x = np.array([[1 + 2.0**-10, 1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-12]], np.float32)
    found = on_device(body, (x,), [(x.shape, "float32")])
    assert found.tolist() == [[1 + 2.0**-10, 1.0, 1 + 2 * 2.0**-10, -1.0]]


@COMMON
@given(
    st.sampled_from(["add", "maximum", "minimum", "multiply"]), st.integers(1, 3),
    st.booleans(), st.sampled_from(FLOATS),
)  # fmt: skip
def test_tensor_reduce(op: str, first: int, negate: bool, dtype: str) -> None:
    x = draw((16, 3, 4, 5), dtype, 5)
    axes = tuple(range(first, 4))
    kept = (16, int(np.prod(x.shape[1:first], dtype=int)))
    found = on_device(
        lambda dst, p: nisa.tensor_reduce(
            dst=dst, op=getattr(nl, op), data=p, axis=axes, negate=negate),
        (x,), [(kept, "float32")],
    )  # fmt: skip
    fn = {"add": np.sum, "maximum": np.max, "minimum": np.min, "multiply": np.prod}[op]
    wanted = fn(x.astype(np.float64), axis=axes).reshape(kept)
    np.testing.assert_allclose(found, -wanted if negate else wanted, rtol=1e-4, atol=1e-4)


def test_scan_is_the_recurrence() -> None:
    a, b, start = draw((8, 20), seed=1) / 8, draw((8, 20), seed=2), draw((8, 1), seed=3)
    found = on_device(
        lambda dst, p, q, s: nisa.tensor_tensor_scan(
            dst=dst, data0=p, data1=q, initial=s, op0=nl.multiply, op1=nl.add),
        (a, b, start), [(a.shape, "float32")],
    )  # fmt: skip
    wanted, state = np.zeros(a.shape), start[:, 0].astype(np.float64)
    for i in range(20):
        state = a[:, i] * state + b[:, i]
        wanted[:, i] = state
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_cumulative_continues_over_tiles() -> None:
    x = np.abs(draw((8, 12), seed=4))

    def body(dst: Any, p: Any) -> None:
        for i, command in enumerate((nisa.reduce_cmd.reset_reduce, nisa.reduce_cmd.reduce)):
            part = slice(6 * i, 6 * i + 6)
            nisa.tensor_scalar_cumulative(
                dst=dst[:, part], src=p[:, part], op0=nl.multiply, op1=nl.add, imm0=2.0,
                reduce_cmd=command)  # fmt: skip

    found = on_device(body, (x,), [(x.shape, "float32")])
    np.testing.assert_allclose(found, np.cumsum(2 * x.astype(np.float64), axis=1), rtol=1e-5)


ACTIVATIONS = {
    "exp": np.exp, "tanh": np.tanh, "square": np.square, "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "silu": lambda x: x / (1 + np.exp(-x)),
    "softplus": lambda x: np.log1p(np.exp(x)), "copy": lambda x: x, "sign": np.sign,
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))), "abs": np.abs,
    "erf_dx": lambda x: 2 / np.sqrt(np.pi) * np.exp(-x * x),
    "gelu_apprx_sigmoid": lambda x: x / (1 + np.exp(-1.702 * x)),
}  # fmt: skip


@pytest.mark.parametrize("op", sorted(ACTIVATIONS))
def test_activation_with_scale_bias_and_sum(op: str) -> None:
    x, scale, bias = draw((32, 33), "bfloat16", 6), draw((32, 1), seed=7) / 4, draw((32, 1), seed=8)

    def body(dst: Any, total: Any, p: Any, s: Any, b: Any) -> None:
        nisa.activation_reduce(dst=dst, op=getattr(nl, op), data=p, scale=s, bias=b,
                               reduce_op=nl.add, reduce_res=total)  # fmt: skip

    found, total = on_device(body, (x, scale, bias), [((32, 33), "float32"), ((32, 1), "float32")])
    wanted = ACTIVATIONS[op](x.astype(np.float64) * scale + bias)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(total, wanted.sum(axis=1, keepdims=True), rtol=1e-4, atol=1e-4)


def test_erf_and_gelu_at_known_points() -> None:
    x = np.array([[-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.5]], np.float32)
    erf = [-0.9999779095, -0.8427007929, -0.5204998778, 0, 0.5204998778, 0.8427007929,
           0.9953222650, 0.9999992569]  # fmt: skip
    found = on_device(lambda d, p: nisa.activation(dst=d, op=nl.erf, data=p), (x,), [(x.shape, "float32")])
    np.testing.assert_allclose(found[0], erf, atol=1e-7)
    found = on_device(lambda d, p: nisa.activation(dst=d, op=nl.gelu, data=p), (x,), [(x.shape, "float32")])
    assert abs(found[0, 5] - 0.8413447461) < 1e-6


@pytest.mark.filterwarnings("ignore::nkisim.errors.NkiSimWarning")
def test_sin_is_cubic_outside_its_range_and_reduced_in_the_language() -> None:
    x = np.array([[9.0, 1.0]], np.float32)
    found = on_device(lambda d, p: nisa.activation(dst=d, op=nl.sin, data=p), (x,), [(x.shape, "float32")])
    np.testing.assert_allclose(found, [[27.65, np.sin(1.0)]], rtol=1e-3)
    found = on_device(lambda d, p: nisa.tensor_copy(dst=d, src=nl.sin(p)), (x,), [(x.shape, "float32")])
    np.testing.assert_allclose(found, np.sin(x), rtol=1e-6)


def test_bn_statistics_merge_to_mean_and_variance() -> None:
    x = draw((16, 700), seed=9)

    def body(dst: Any, p: Any) -> None:
        parts = nl.ndarray((16, 12), dtype=nl.float32)
        nisa.bn_stats(dst=parts[:, 0:6], data=p[:, 0:512])
        nisa.bn_stats(dst=parts[:, 6:12], data=p[:, 512:700])
        nisa.bn_aggr(dst=dst, data=parts)

    found = on_device(body, (x,), [((16, 2), "float32")])
    wide = x.astype(np.float64)
    np.testing.assert_allclose(found[:, 0], wide.mean(axis=1), atol=1e-5)
    np.testing.assert_allclose(found[:, 1], wide.var(axis=1), rtol=1e-4)


def test_max8_find_and_replace() -> None:
    data = np.array([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    vals = np.array([[3, 8, 8, 8, 8, 8, 8, 8]], np.float32)

    def body(*tiles: Any) -> None:
        top, where, replaced, order, d, v = tiles
        nisa.max8(dst=top, src=d)
        nisa.nc_find_index8(dst=where, data=d, vals=v)
        nisa.nc_match_replace8(dst=replaced, data=d, vals=v, imm=-1.0, dst_idx=order)

    top, where, replaced, order = on_device(
        body, (data, vals),
        [((1, 8), "float32"), ((1, 8), "uint32"), ((1, 11), "float32"), ((1, 8), "uint32")],
    )  # fmt: skip
    assert top.tolist() == [[8, 8, 8, 8, 8, 8, 8, 4]]
    assert where.tolist() == [[2, 4, 5, 6, 7, 8, 9, 10]]
    assert order.tolist() == [[2, 10, 9, 8, 7, 6, 5, 4]]
    assert replaced.tolist() == [[1, 2, -1, 4, -1, -1, -1, -1, -1, -1, -1]]


def test_find_index8_marks_missing_values() -> None:
    data = np.arange(8, dtype=np.float32)[None]
    vals = np.array([[0, 9, 2, 3, 4, 5, 6, 7]], np.float32)
    found = on_device(
        lambda d, p, v: nisa.nc_find_index8(dst=d, data=p, vals=v),
        (data, vals),
        [((1, 8), "uint16")],
    )
    assert found.tolist() == [[0, 65535, 2, 3, 4, 5, 6, 7]]


def test_range_select_and_its_maximum() -> None:
    x = draw((4, 10), seed=11)
    low, high = np.array([[2.0]] * 4, np.float32), np.array([[0], [3], [5], [10]], np.float32)

    def body(dst: Any, top: Any, p: Any, a: Any, b: Any) -> None:
        nisa.range_select(dst=dst, on_true_tile=p, comp_op0=nl.greater_equal, comp_op1=nl.less,
                          bound0=a, bound1=b, reduce_res=top)  # fmt: skip

    found, top = on_device(body, (x, low, high), [(x.shape, "float32"), ((4, 1), "float32")])
    index = np.arange(10)[None]
    wanted = np.where((index >= low) & (index < high), x, np.float32(-3.4028235e38))
    assert np.array_equal(found, wanted)
    assert np.array_equal(top, wanted.max(axis=1, keepdims=True))
