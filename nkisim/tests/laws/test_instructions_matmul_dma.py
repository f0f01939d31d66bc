"""Tensor Engine and DMA: products, accumulation, transposes, gathers, scatters."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nkisim.isa as nisa
import nkisim.language as nl
from nkisim import errors
from nkisim.tests.harness import STORED, on_device, out, run, tile

COMMON = settings(max_examples=15, deadline=None)


def draw(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(STORED[dtype])


def product(dst: Any, stationary: Any, moving: Any, **options: Any) -> None:
    acc = nl.ndarray(dst.shape, nl.float32, nl.psum)
    nisa.nc_matmul(dst=acc, stationary=stationary, moving=moving, **options)
    nisa.tensor_copy(dst=dst, src=acc)


@COMMON
@given(
    st.integers(1, 128),
    st.integers(1, 128),
    st.integers(1, 512),
    st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3"]),
)
def test_matmul(k: int, m: int, n: int, dtype: str) -> None:
    a, b = draw((k, m), dtype, 1), draw((k, n), dtype, 2)
    found = on_device(product, (a, b), [((m, n), "float32")])
    wanted = a.astype(np.float64).T @ b.astype(np.float64)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-5 * np.sqrt(k) * 4)


@pytest.mark.parametrize("mode", [nisa.matmul_perf_mode.none, nisa.matmul_perf_mode.double_row])
def test_bits_of_an_output_do_not_depend_on_the_number_of_columns(mode: Any) -> None:
    """Row 0 and column 0 of a product, alone and among any others."""
    kind = "float32" if mode is nisa.matmul_perf_mode.none else "float8_e4m3"
    between = () if kind == "float32" else (2,)
    a, b = draw((128, *between, 128), kind, 1), draw((128, *between, 256), kind, 2)

    def found(m: int, n: int) -> Any:
        first = a[..., :m].copy(), b[..., :n].copy()
        return on_device(lambda d, p, q: product(d, p, q, perf_mode=mode), first, [((m, n), "float32")])

    whole = found(128, 256)
    for m in (1, 2, 3, 8, 17, 64, 127, 128):
        for n in (1, 2, 3, 8, 17, 64, 255, 256):
            assert np.array_equal(found(m, n), whole[:m, :n]), (m, n)


def test_double_row_contracts_over_both_rows() -> None:
    a, b = draw((64, 2, 32), "float8_e4m3", 1), draw((64, 2, 48), "float8_e5m2", 2)
    mode = nisa.matmul_perf_mode.double_row
    found = on_device(lambda d, p, q: product(d, p, q, perf_mode=mode), (a, b), [((32, 48), "float32")])
    wanted = np.einsum("kim,kin->mn", a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)


def test_accumulate_none_overwrites_first_then_adds() -> None:
    a, b = draw((128, 16), seed=1), draw((128, 24), seed=2)

    def body(dst: Any, p: Any, q: Any) -> None:
        acc = nl.ndarray((16, 24), nl.float32, nl.psum)
        for flag in (None, None, False, True):
            nisa.nc_matmul(dst=acc, stationary=p, moving=q, accumulate=flag)
        nisa.tensor_copy(dst=dst, src=acc)

    found = on_device(body, (a, b), [((16, 24), "float32")])
    np.testing.assert_allclose(found, 2 * (a.T.astype(np.float64) @ b), rtol=1e-4, atol=1e-4)


def test_overlapping_products_add_only_where_written() -> None:
    a, b = np.ones((4, 2), np.float32), np.ones((4, 4), np.float32)

    def body(dst: Any, p: Any, q: Any) -> None:
        acc = nl.ndarray((2, 6), nl.float32, nl.psum)
        nisa.nc_matmul(dst=acc[:, 0:4], stationary=p, moving=q)
        nisa.nc_matmul(dst=acc[:, 2:6], stationary=p, moving=q)
        nisa.tensor_copy(dst=dst, src=acc)

    found = on_device(body, (a, b), [((2, 6), "float32")])
    assert found.tolist() == [[4, 4, 8, 8, 4, 4]] * 2


def test_accumulating_on_zeros_warns() -> None:
    def kernel() -> Any:
        x, acc = tile(columns=8), nl.zeros((8, 8), nl.float32, nl.psum)
        nisa.nc_matmul(dst=acc, stationary=x, moving=x)
        y = nl.copy(acc)
        return out(y)

    with pytest.warns(errors.AmbiguousManual, match="zeros"):
        assert (run(kernel) == 128).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_transposes_move_bits(dtype: str) -> None:
    x = draw((96, 40), dtype, 3)
    x[0, 0], x[1, 1] = np.nan, np.inf

    def tensor(dst: Any, p: Any) -> None:
        acc = nl.ndarray(dst.shape, dtype, nl.psum)
        nisa.nc_transpose(dst=acc, data=p)
        nisa.tensor_copy(dst=dst, src=acc)

    found = on_device(tensor, (x,), [((40, 96), dtype)])
    assert found.tobytes() == np.ascontiguousarray(x.T).tobytes()
    part = x[:32, :32].copy()
    found = on_device(lambda d, p: nisa.nc_transpose(dst=d, data=p), (part,), [((32, 32), dtype)])
    assert found.tobytes() == np.ascontiguousarray(part.T).tobytes()


def test_dma_converts_through_fp32_and_keeps_equal_bits() -> None:
    x = np.array([[np.nan, 1.00390625, 300.0, -0.0]], np.float32)
    found = on_device(lambda d, p: nisa.dma_copy(dst=d, src=p), (x,), [((1, 4), "bfloat16")])
    assert found.tobytes() == x.astype(ml_dtypes.bfloat16).tobytes()
    found = on_device(lambda d, p: nisa.dma_copy(dst=d, src=p), (x,), [((1, 4), "float32")])
    assert found.tobytes() == x.tobytes()


def test_gather_and_scatter_with_skipped_rows() -> None:
    data, index = draw((10, 6), seed=4), np.array([[3], [9], [10], [0]], np.uint32)
    target = np.zeros((10, 6), np.float32)

    def kernel(source: Any, rows: Any, mutated: Any) -> Any:
        idx, got = nl.load(rows), tile(4, 6, value=-1.0)
        picked = source.ap([[6, 4], [1, 6]], vector_offset=idx, indirect_dim=0)
        nisa.dma_copy(dst=got, src=picked, oob_mode=nisa.oob_mode.skip)
        put = mutated.ap([[6, 4], [1, 6]], vector_offset=idx, indirect_dim=0)
        nisa.dma_copy(dst=put, src=got, oob_mode=nisa.oob_mode.skip)
        return out(got), mutated

    got, mutated = run(kernel, data, index, target)
    assert np.array_equal(got, np.stack([data[3], data[9], np.full(6, -1), data[0]]))
    wanted = np.zeros((10, 6))
    wanted[[3, 9, 0]] = data[[3, 9, 0]]
    assert np.array_equal(mutated, wanted)
    assert np.array_equal(target, wanted)


@pytest.mark.parametrize("columns", [1, 2])
def test_indirect_transpose_walks_the_indices_column_by_column(columns: int) -> None:
    count = 128 * columns
    data = draw((300, 64), "bfloat16", 5)
    index = np.random.default_rng(1).integers(0, 300, (128, columns)).astype(np.uint32)

    def kernel(source: Any, rows: Any) -> Any:
        idx, got = nl.load(rows), nl.ndarray((64, count), dtype=nl.bfloat16)
        picked = source.ap([[64, count], [1, 64]], vector_offset=idx, indirect_dim=0)
        nisa.dma_transpose(dst=got, src=picked, axes=(1, 0))
        return out(got)

    found = run(kernel, data, index)
    assert np.array_equal(found, data[index.T.flatten()].T)


def test_dma_transpose_of_three_and_four_dimensions() -> None:
    for shape, axes in (((4, 3, 5), (2, 1, 0)), ((4, 3, 2, 5), (3, 1, 2, 0))):
        x = draw(shape, "bfloat16", 6)

        def kernel(source: Any, shape: Any = shape, axes: Any = axes) -> Any:
            got = nl.ndarray(tuple(shape[a] for a in axes), dtype=nl.bfloat16)
            nisa.dma_transpose(dst=got, src=source)
            return out(got)

        assert np.array_equal(run(kernel, x), x.transpose(axes))


def test_dma_compute_adds_and_scatters() -> None:
    x, y = draw((4, 6), seed=7), draw((4, 6), seed=8)
    found = on_device(
        lambda d, p, q: nisa.dma_compute(dst=d, srcs=[p, q], reduce_op=nl.add),
        (x, y),
        [((4, 6), "float32")],
    )
    assert np.array_equal(found, x + y)
    base, index = np.ones((8, 6), np.float32), np.array([[6], [1], [0], [3]], np.int32)

    def kernel(total: Any, part: Any, rows: Any) -> Any:
        idx, add = nl.load(rows), nl.load(part)
        where = total.ap([[6, 4], [1, 6]], vector_offset=idx, indirect_dim=0)
        nisa.dma_compute(dst=where, srcs=[where, add], reduce_op=nl.add)
        return total

    wanted = np.ones((8, 6), np.float32)
    wanted[[6, 1, 0, 3]] += x
    assert np.array_equal(run(kernel, base, x, index), wanted)


def test_registers_address_memory() -> None:
    x = draw((16, 32), seed=9)

    def kernel(source: Any, start: Any) -> Any:
        where = nisa.register_alloc()
        nisa.register_load(where, nl.load(start))
        result = nl.ndarray((4, 16, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        got = nl.ndarray((16, 8), dtype=nl.float32)
        nisa.dma_copy(dst=got, src=source[:, nl.ds(where, 8)])

        def body(i: Any) -> None:
            nisa.dma_copy(dst=result.select(0, i), src=got)
            nisa.tensor_scalar(dst=got, data=got, op0=nl.add, operand0=1.0)

        nl.fori_loop(0, 4, body)
        return result

    found = run(kernel, x, np.array([[5]], np.int32))
    part = x[:, 5:13]
    np.testing.assert_allclose(found, np.stack([part + i for i in range(4)]), rtol=1e-6)


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


def test_precise_fp_off_keeps_fp32() -> None:
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
