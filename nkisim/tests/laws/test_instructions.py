"""Laws of instructions that no property states: rounding on write, accumulation in PSUM, loops on the device."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import nkisim.isa as nisa
import nkisim.language as nl
from harness import STORED, on_device, out, run, tile
from nkisim import errors


def draw(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(STORED[dtype])


def product(dst: Any, stationary: Any, moving: Any, **options: Any) -> None:
    acc = nl.ndarray(dst.shape, nl.float32, nl.psum)
    nisa.nc_matmul(dst=acc, stationary=stationary, moving=moving, **options)
    nisa.tensor_copy(dst=dst, src=acc)


def test_tensor_tensor_of_words_is_exact_on_gpsimd_and_fp32_on_vector() -> None:
    x = np.full((4, 3), 2**24 + 1, np.int32)
    y = np.zeros_like(x)

    def add(dst: Any, p: Any, q: Any, engine: Any = nisa.engine.unknown) -> None:
        nisa.tensor_tensor(dst=dst, data1=p, data2=q, op=nl.add, engine=engine)

    assert (on_device(add, (x, y), [(x.shape, "int32")]) == 2**24 + 1).all()
    vector = on_device(lambda *t: add(*t, engine=nisa.engine.vector), (x, y), [(x.shape, "int32")])
    assert (vector == 2**24).all()


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
    result = on_device(lambda dst, p: nisa.tensor_copy(dst=dst, src=p), (x,), [(x.shape, dtype)])
    assert result.tolist() == [wanted]


def test_fp8_e4m3_ends_at_240() -> None:
    x = np.array([[240, 247, 249, 300, -500, np.inf, 0.001953125, 17]], np.float32)
    result = on_device(lambda dst, p: nisa.tensor_copy(dst=dst, src=p), (x,), [(x.shape, "float8_e4m3")]).astype(
        np.float32
    )
    assert result.tolist() == [[240, 240, np.inf, np.inf, -np.inf, np.inf, 0.001953125, 16]]


def test_tfloat32_has_ten_mantissa_bits() -> None:
    def body(dst: Any, p: Any) -> None:
        short = nl.ndarray(p.shape, dtype=nl.tfloat32)
        nisa.tensor_copy(dst=short, src=p)
        nisa.tensor_copy(dst=dst, src=short)

    x = np.array([[1 + 2.0**-10, 1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-12]], np.float32)
    result = on_device(body, (x,), [(x.shape, "float32")])
    assert result.tolist() == [[1 + 2.0**-10, 1.0, 1 + 2 * 2.0**-10, -1.0]]


@pytest.mark.filterwarnings("ignore::nkisim.errors.NkiSimWarning")
def test_sin_is_cubic_outside_its_range_and_reduced_in_the_language() -> None:
    x = np.array([[9.0, 1.0]], np.float32)
    result = on_device(lambda d, p: nisa.activation(dst=d, op=nl.sin, data=p), (x,), [(x.shape, "float32")])
    np.testing.assert_allclose(result, [[27.65, np.sin(1.0)]], rtol=1e-3)
    result = on_device(lambda d, p: nisa.tensor_copy(dst=d, src=nl.sin(p)), (x,), [(x.shape, "float32")])
    np.testing.assert_allclose(result, np.sin(x), rtol=1e-6)


@pytest.mark.parametrize("mode", [nisa.matmul_perf_mode.none, nisa.matmul_perf_mode.double_row])
def test_bits_of_an_output_do_not_depend_on_the_number_of_columns(mode: Any) -> None:
    """Row 0 and column 0 of a product, by themselves and among any others."""
    kind = "float32" if mode is nisa.matmul_perf_mode.none else "float8_e4m3"
    between = () if kind == "float32" else (2,)
    a, b = draw((128, *between, 128), kind, 1), draw((128, *between, 256), kind, 2)

    def result(m: int, n: int) -> Any:
        first = a[..., :m].copy(), b[..., :n].copy()
        return on_device(lambda d, p, q: product(d, p, q, perf_mode=mode), first, [((m, n), "float32")])

    full = result(128, 256)
    for m in (1, 2, 17, 128):
        for n in (1, 3, 64, 256):
            assert np.array_equal(result(m, n), full[:m, :n]), (m, n)


def test_accumulate_none_overwrites_first_then_adds() -> None:
    a, b = draw((128, 16), seed=1), draw((128, 24), seed=2)

    def body(dst: Any, p: Any, q: Any) -> None:
        acc = nl.ndarray((16, 24), nl.float32, nl.psum)
        for flag in (None, None, False, True):
            nisa.nc_matmul(dst=acc, stationary=p, moving=q, accumulate=flag)
        nisa.tensor_copy(dst=dst, src=acc)

    result = on_device(body, (a, b), [((16, 24), "float32")])
    np.testing.assert_allclose(result, 2 * (a.T.astype(np.float64) @ b), rtol=1e-4, atol=1e-4)


def test_overlapping_products_add_only_where_written() -> None:
    a, b = np.ones((4, 2), np.float32), np.ones((4, 4), np.float32)

    def body(dst: Any, p: Any, q: Any) -> None:
        acc = nl.ndarray((2, 6), nl.float32, nl.psum)
        nisa.nc_matmul(dst=acc[:, 0:4], stationary=p, moving=q)
        nisa.nc_matmul(dst=acc[:, 2:6], stationary=p, moving=q)
        nisa.tensor_copy(dst=dst, src=acc)

    result = on_device(body, (a, b), [((2, 6), "float32")])
    assert result.tolist() == [[4, 4, 8, 8, 4, 4]] * 2


def test_accumulating_on_zeros_warns() -> None:
    def kernel() -> Any:
        x, acc = tile(columns=8), nl.zeros((8, 8), nl.float32, nl.psum)
        nisa.nc_matmul(dst=acc, stationary=x, moving=x)
        y = nl.copy(acc)
        return out(y)

    with pytest.warns(errors.AmbiguousManual, match="zeros"):
        assert (run(kernel) == 128).all()


def test_while_loop_counts_down() -> None:
    def kernel(start: Any) -> Any:
        count, steps = nl.load(start), tile(1, 1, "int32", 0)
        register = nisa.register_alloc()
        nisa.register_load(register, count)

        def body(_: Any) -> Any:
            nisa.tensor_scalar(dst=count, data=count, op0=nl.subtract, operand0=1)
            nisa.tensor_scalar(dst=steps, data=steps, op0=nl.add, operand0=1)
            following = nisa.register_alloc()
            nisa.register_load(following, count)
            return following

        nl.while_loop(register, body)
        return out(steps)

    assert run(kernel, np.array([[5]], np.int32)).tolist() == [[5]]
    assert run(kernel, np.array([[0]], np.int32)).tolist() == [[0]]


def test_precise_fp_off_stores_fp32() -> None:
    x = np.array([[1.0 + 2.0**-12]], np.float32)

    def kernel(source: Any) -> Any:
        low = nl.ndarray((1, 1), dtype=nl.bfloat16)
        nisa.dma_copy(dst=low, src=source)
        high = nl.ndarray((1, 1), dtype=nl.float32)
        nisa.tensor_copy(dst=high, src=low)
        return out(high)

    assert run(kernel, x) == 1.0
    assert run(kernel, x, precise_fp=False) == x


def test_warnings_are_silent_on_clean_kernels() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_device(product, (draw((8, 8)), draw((8, 8))), [((8, 8), "float32")])


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "uint32"])
def test_bit_operators_keep_bits(dtype: str) -> None:
    info = np.iinfo(STORED[dtype])
    x = np.arange(64).reshape(8, 8).astype(STORED[dtype]) * 3
    x[0, 0] = info.max
    result = on_device(
        lambda dst, p: nisa.tensor_scalar(
            dst=dst, data=p, op0=nl.right_shift, operand0=1, op1=nl.bitwise_xor, operand1=5),
        (x,), [(x.shape, dtype)],
    )  # fmt: skip
    bits = np.dtype(f"u{x.dtype.itemsize}")
    assert np.array_equal(result, ((x.view(bits) >> 1) ^ bits.type(5)).view(x.dtype))


def test_cumulative_continues_over_tiles() -> None:
    x = np.abs(draw((8, 12), seed=4))

    def body(dst: Any, p: Any) -> None:
        for i, command in enumerate((nisa.reduce_cmd.reset_reduce, nisa.reduce_cmd.reduce)):
            part = slice(6 * i, 6 * i + 6)
            nisa.tensor_scalar_cumulative(
                dst=dst[:, part], src=p[:, part], op0=nl.multiply, op1=nl.add, imm0=2.0,
                reduce_cmd=command)  # fmt: skip

    result = on_device(body, (x,), [(x.shape, "float32")])
    np.testing.assert_allclose(result, np.cumsum(2 * x.astype(np.float64), axis=1), rtol=1e-5)
