"""The manual's example kernels, written again from their description, give the stated results."""

from __future__ import annotations

from typing import Any

import numpy as np

import nkisim.isa as nisa
import nkisim.language as nl
from harness import out, run

RNG = np.random.default_rng(3)


def random(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


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
