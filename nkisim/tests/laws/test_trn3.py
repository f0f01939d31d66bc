"""What NeuronCore-v4 adds: its instructions against fp64, its sizes, and no times."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nkisim
import nkisim.isa as nisa
import nkisim.language as nl
from harness import out
from nkisim import errors
from refusals.trn3 import on_trn3

RNG = np.random.default_rng(7)
COMMAND = nisa.reduce_cmd


def tensor(shape: tuple[int, int], dtype: str = "float32", buffer: Any = nl.sbuf) -> Any:
    return nl.ndarray(shape, dtype, buffer)


@pytest.mark.parametrize(("kind", "largest"), [("float8_e4m3fn", 8), ("float8_e5m2", 15)])
@pytest.mark.parametrize("rows", [32, 128])
def test_a_product_of_quantized_tiles(kind: str, largest: int, rows: int) -> None:
    """The scale of 8 x 4 elements is 2^(floor(log2(largest magnitude)) - largest exponent + 1)."""
    a, b = (RNG.standard_normal((rows, 4 * n)).astype(ml_dtypes.bfloat16) for n in (6, 10))
    a[0:8, 0:4] = 0

    def kernel(x: Any, y: Any) -> Any:
        sides = []
        for source in (x, y):
            packed = tensor((rows, source.shape[1] // 4), f"{kind}_x4")
            scale = tensor((4 if rows == 32 else rows, packed.shape[1]), "uint8")
            nisa.quantize_mx(packed, nl.load(source), scale)
            sides.append((packed, scale))
        (left, left_scale), (right, right_scale) = sides
        product, result = tensor((6, 10), buffer=nl.psum), tensor((6, 10))
        nisa.nc_matmul_mx(product, left, right, left_scale, right_scale)
        nisa.nc_matmul_mx(product, left, right, left_scale, right_scale, accumulate=True)
        nisa.tensor_copy(result, product)
        return out(result), out(left.view("uint8")), out(left_scale[0:4])

    def quantized(x: Any) -> tuple[Any, Any]:
        groups = x.astype(np.float64).reshape(rows // 8, 8, -1, 4)
        with np.errstate(divide="ignore"):
            power = np.floor(np.log2(np.abs(groups).max(axis=(1, 3), keepdims=True)))
        exponent = np.maximum(power - largest + 1, -127)
        elements = (groups / 2.0**exponent).astype(np.float32).astype(getattr(ml_dtypes, kind))
        return elements.reshape(rows, -1), (elements.astype(np.float64) * 2.0**exponent).reshape(rows, -1, 4)

    result, bits, scales = on_trn3(kernel, a, b)
    elements, left = quantized(a)
    assert bits.tobytes() == elements.tobytes()
    assert scales[0, 0] == 0
    expected = 2 * np.einsum("pmi,pni->mn", left, quantized(b)[1])
    assert np.allclose(result, expected, rtol=1e-6, atol=1e-6)


def test_packed_fours() -> None:
    """Four e2m1 numbers of a 16-bit element, the lowest bits first, times 2^(127 - 127)."""
    numbers = np.array([0.5, -6.0, 1.5, 2.0], ml_dtypes.float4_e2m1fn)
    word = sum(int(v) << 4 * i for i, v in enumerate(numbers.view(np.uint8)))

    def kernel(x: Any, s: Any) -> Any:
        packed, scale, result = nl.load(x).view("float4_e2m1fn_x4"), nl.load(s), tensor((2, 2))
        product = tensor((2, 2), buffer=nl.psum)
        nisa.nc_matmul_mx(product, packed, packed, scale, scale)
        nisa.tensor_copy(result, product)
        return out(result)

    result = on_trn3(kernel, np.full((32, 2), word, np.uint16), np.full((4, 2), 127, np.uint8))
    assert (result == 32 * (0.25 + 36 + 2.25 + 4)).all()


def test_exponential_and_activate2() -> None:
    x = RNG.standard_normal((16, 40)).astype(np.float32)

    def kernel(a: Any) -> Any:
        data, power, total = nl.load(a), tensor((16, 40)), tensor((16, 1))
        nisa.exponential(power, data, max_value=1.0, reduce_cmd=COMMAND.reset_reduce)
        nisa.exponential(power, data, max_value=1.0, reduce_res=total, reduce_cmd=COMMAND.reduce)
        line, slope, largest_magnitude = tensor((16, 40)), tensor((16, 40)), tensor((16, 1))
        nisa.activate2(line, nl.copy, data, 2.0, 3.0, nl.multiply, nl.subtract, reverse1=True,
                       reduce_op=nl.abs_max, reduce_res=largest_magnitude, reduce_cmd=COMMAND.reset_reduce)  # fmt: skip
        nisa.activate2(slope, nl.prelu, data, 0.0, 0.0, nl.bypass, nl.bypass, relu_param=0.25)
        return tuple(map(out, (power, total, line, largest_magnitude, slope)))

    power, total, line, largest_magnitude, slope = on_trn3(kernel, x)
    exact = np.exp(x.astype(np.float64) - 1)
    assert np.allclose(power, exact, rtol=1e-6)
    assert np.allclose(total, 2 * exact.sum(axis=1, keepdims=True), rtol=1e-5)
    assert np.array_equal(line, 3 - 2 * x)
    assert np.array_equal(largest_magnitude, np.abs(line).max(axis=1, keepdims=True))
    assert np.array_equal(slope, np.where(x > 0, x, x / 4))


def test_operators_numbers_and_types_of_trn3() -> None:
    x = np.array([[-3, 1], [2, -5]], np.float32)

    def kernel(a: Any) -> Any:
        data, square, numbers = nl.load(a), tensor((2, 2)), tensor((2, 500))
        nisa.tensor_scalar(square, data, nl.square, None)
        nisa.rand2(numbers, -1.0, 3.0)
        eight, again = tensor((2, 2), "float8_e4m3fn"), tensor((2, 2))
        nisa.tensor_copy(eight, data)
        nisa.tensor_copy(again, eight)
        nisa.dma_copy(dst=data, src=a, priority=2)
        return out(nl.abs_max(data, 2.0)), out(square), out(numbers), out(again)

    largest_magnitude, square, numbers, again = on_trn3(kernel, x)
    assert np.array_equal(largest_magnitude, np.maximum(np.abs(x), 2))
    assert np.array_equal(square, x * x)
    assert -1 <= numbers.min() < -0.9
    assert 2.9 < numbers.max() < 3
    assert np.array_equal(again, x)


def test_the_target_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names it; memory is larger, and times are refused in a sentence."""
    seen = []

    def kernel() -> Any:
        seen.append((nisa.get_nc_version(), nl.tile_size.sbuf_fmax_bytes))
        x = nl.zeros((1, 250 * 1024), "uint8")
        return out(x)

    with pytest.raises(errors.SbufFull):
        nkisim.simulate(kernel)()
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    nkisim.simulate(kernel)()
    assert seen == [(nisa.nc_version.gen3, 224 * 1024), (nisa.nc_version.gen4, 256 * 1024)]
    with pytest.raises(errors.NotSimulated, match="timeline: argument 'target=trn3' is not simulated; no figure"):
        nkisim.run(kernel, (), policy=nkisim.Policy(recording=True))
