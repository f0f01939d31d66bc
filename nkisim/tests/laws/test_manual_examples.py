"""The manual's example kernels, written again from their description, give the stated results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nkisim.isa as nisa
import nkisim.language as nl
from harness import out, run

RNG = np.random.default_rng(3)


def random(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def hbm(*shape: int) -> Any:
    return nl.ndarray(shape, dtype=nl.float32, buffer=nl.shared_hbm)


def add_rows(a: Any, b: Any) -> Any:
    """Tensor addition, each core a share of the row blocks."""
    result, cores = hbm(*a.shape), nl.num_programs()
    for block in range(nl.program_id(0), a.shape[0] // 128, cores):
        rows = slice(128 * block, 128 * block + 128)
        nl.store(result[rows], nl.add(nl.load(a[rows]), nl.load(b[rows])))
    return result


@pytest.mark.parametrize("lnc", [1, 2])
def test_tensor_addition(lnc: int) -> None:
    a, b = random(512, 96), random(512, 96)
    assert np.array_equal(run(add_rows, a, b, lnc=lnc), a + b)


def matmul_blocked(a_t: Any, b: Any) -> Any:
    """Partial products of blocks of the contraction, added up in SBUF."""
    (k, m), n = a_t.shape, b.shape[1]
    total = nl.zeros((128, m // 128, n), dtype=nl.float32)
    for p in range(k // 128):
        left, right = nl.load(a_t[p * 128 : p * 128 + 128]), nl.load(b[p * 128 : p * 128 + 128])
        for i in range(m // 128):
            for j in range(n // 512):
                acc = nl.ndarray((128, 512), nl.float32, nl.psum)
                nisa.nc_matmul(
                    dst=acc, stationary=left[:, i * 128 : i * 128 + 128], moving=right[:, j * 512 : j * 512 + 512]
                )
                part = total[:, i, j * 512 : j * 512 + 512]
                nisa.tensor_tensor(dst=part, data1=part, data2=acc, op=nl.add)
    result = hbm(m, n)
    for i in range(m // 128):
        nl.store(result[i * 128 : i * 128 + 128], total[:, i])
    return result


def test_matrix_multiplication() -> None:
    a, b = random(256, 256), random(256, 1024)
    np.testing.assert_allclose(run(matmul_blocked, a.T.copy(), b), a @ b, rtol=1e-4, atol=1e-3)


def test_transpose_of_the_two_free_dimensions() -> None:
    def kernel(a: Any) -> Any:
        x = nl.load(a)
        y = nl.ndarray((x.shape[0], 5 * 7), dtype=nl.float32)
        nisa.tensor_copy(dst=y.reshape_dim(1, (7, 5)), src=x.reshape_dim(1, (5, 7)).permute((0, 2, 1)))
        return out(y)

    a = random(16, 35)
    assert np.array_equal(run(kernel, a), a.reshape(16, 5, 7).transpose(0, 2, 1).reshape(16, 35))


def test_average_pooling_through_an_access_pattern() -> None:
    c, h, w, pool = 16, 6, 8, 2

    def kernel(a: Any) -> Any:
        x = nl.load(a)
        windows = x.ap([[h * w, c], [pool * w, h // pool], [pool, w // pool], [w, pool], [1, pool]])
        total = nl.ndarray((c, h // pool, w // pool), dtype=nl.float32)
        nisa.tensor_reduce(dst=total, op=nl.add, data=windows, axis=(3, 4))
        nisa.tensor_scalar(dst=total, data=total, op0=nl.multiply, operand0=1 / pool**2)
        return out(total)

    a = random(c, h, w)
    wanted = a.reshape(c, h // pool, pool, w // pool, pool).mean(axis=(2, 4))
    np.testing.assert_allclose(run(kernel, a), wanted, rtol=1e-5, atol=1e-6)


def test_mamba_is_a_scan_per_state() -> None:
    channels, length, states = 32, 40, 4

    def kernel(delta: Any, u: Any, a: Any, b: Any, c: Any) -> Any:
        d, du, rate = nl.load(delta), nl.load(u), nl.load(a)
        nisa.tensor_tensor(dst=du, data1=d, data2=du, op=nl.multiply)
        total = nl.zeros((channels, length), dtype=nl.float32)
        for s in range(states):
            decay = nl.ndarray((channels, length), dtype=nl.float32)
            nisa.activation(dst=decay, op=nl.exp, data=d, scale=rate[:, s : s + 1])
            rows = []
            for source in (b, c):
                row = nl.ndarray((channels, length), dtype=nl.float32)
                nisa.dma_copy(dst=row, src=source[s : s + 1].broadcast(0, channels))
                rows.append(row)
            nisa.tensor_tensor(dst=rows[0], data1=du, data2=rows[0], op=nl.multiply)
            nisa.tensor_tensor_scan(dst=decay, data0=decay, data1=rows[0], initial=0.0, op0=nl.multiply, op1=nl.add)
            nisa.tensor_tensor(dst=decay, data1=decay, data2=rows[1], op=nl.multiply)
            nisa.tensor_tensor(dst=total, data1=total, data2=decay, op=nl.add)
        return out(total)

    delta, u = np.abs(random(channels, length)), random(channels, length)
    a, b, c = -np.abs(random(channels, states)), random(states, length), random(states, length)
    result = run(kernel, delta, u, a, b, c)
    state, wanted = np.zeros((channels, states)), np.zeros((channels, length))
    for t in range(length):
        state = np.exp(delta[:, t, None] * a) * state + (delta * u)[:, t, None] * b[:, t]
        wanted[:, t] = state @ c[:, t]
    np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)
