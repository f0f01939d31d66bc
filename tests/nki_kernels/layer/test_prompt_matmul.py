"""A prompt's products: decode's bits for every number of rows, the law in fp64, refusals, the share of the bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nki
import numpy as np
import pytest

from nki_kernels import roofline
from nki_kernels.layer import law
from nki_kernels.layer.mlp import decode_mlp
from nki_kernels.layer.pack_weights import pack, pack_gate_up, pack_out, pack_qkv
from nki_kernels.layer.prompt_matmul import prompt_mlp, prompt_product, prompt_product_kernel
from nkisim.timeline.schedule import schedule
from nkisim.timeline.trn2 import TRN2
from tests.close import is_close
from tests.nki_kernels.attention.inputs import DTYPES
from tests.nki_kernels.layer.inputs import MLP, as_fp64, draw_mlp, linear, naive_mlp
from tests.nki_kernels.recorded import events_of


def packed(m: MLP) -> tuple[Any, Any]:
    return pack_gate_up(m.gate, m.up), pack(m.down)


# rows, E, I: odd first; two groups of tiles, a rest of 32 inner rows, rows cut in four, blocks used piece by piece
SHAPES = [(130, 384, 250), (1, 256, 96), (700, 256, 160), (257, 4096, 64), (257, 256, 5200)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mlp_has_decode_s_bits(shape: tuple[int, int, int], dtype: str) -> None:
    """Rows of one prompt on one core and on two, and as decode makes them, 50 at a time."""
    m = draw_mlp(*shape, dtype)
    weights = packed(m)
    out = prompt_mlp(m.x, m.gamma, weights)
    decoded = [decode_mlp(m.x[i : i + 50], m.gamma, weights) for i in range(0, shape[0], 50)]
    assert out.tobytes() == np.concatenate(decoded).tobytes()
    assert out.tobytes() == prompt_mlp(m.x, m.gamma, weights, lnc=2).tobytes()
    x, gamma, *wide = as_fp64(*m.all)
    assert is_close(out, naive_mlp(m), law.decode_mlp(x, gamma, tuple(wide)))  # type: ignore[arg-type]


def test_bits_can_differ() -> None:
    m = draw_mlp(130, 256, 160, "bf16")
    other = m.x.copy()
    other[129, 0] *= 2
    a, b = (prompt_mlp(x, m.gamma, packed(m)) for x in (m.x, other))
    assert a[:129].tobytes() == b[:129].tobytes()
    assert a[129:].tobytes() != b[129:].tobytes()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "depth"), [(1, 256), (300, 4096), (700, 384)])
def test_products_of_all_layouts(rows: int, depth: int, dtype: str) -> None:
    """Blocks as decode streams them; a row alone has the bits that it has among others."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, depth)).astype(DTYPES[dtype])
    q, k, v = ((rng.standard_normal((n * 128, depth)) * depth**-0.5).astype(x.dtype) for n in (2, 1, 1))
    joined = np.concatenate([v, k, q])
    out = (rng.standard_normal((256, depth)) * depth**-0.5).astype(x.dtype)
    by_dim = x.reshape(rows, depth // 128, 128).swapaxes(1, 2).reshape(rows, depth)
    for rows_x, weight, plain in ((x, pack_qkv(q, k, v, 128), joined), (by_dim, pack_out(out, 128), out)):
        y = prompt_product(rows_x, weight)
        assert is_close(y, linear(x, plain), x.astype(np.float64) @ plain.astype(np.float64).T)
        assert prompt_product(rows_x, weight, lnc=2).tobytes() == y.tobytes()
        assert prompt_product(rows_x[-1:].copy(), weight).tobytes() == y[-1:].tobytes()
        first = nki.simulate(prompt_product_kernel[1])(rows_x, weight, 1)
        assert first.tobytes() == y[:, : weight.shape[2]].tobytes()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": lambda x: x[:, :100]}, "K a multiple of 128"),
        ({"x": lambda x: x[None]}, "K a multiple of 128"),
        ({"x": lambda x: np.zeros((1, 5248), x.dtype)}, "up to 5120"),
        ({"x": lambda x: np.zeros((1, 4224), np.float32)}, "up to 4096"),
        ({"gamma": lambda g: g[:128]}, "pass the norm of this layer"),
        ({"weights": lambda w: (w[0][:1], w[1])}, "make them with pack_gate_up"),
        ({"weights": lambda w: (w[0], w[1][:, :64])}, "make it with pack"),
        ({"gamma": lambda g: g.astype(np.float32)}, "all float32 or all bfloat16"),
        ({"lnc": lambda lnc: 3}, "lnc is 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_operands(change: dict[str, Callable[[Any], Any]], sentence: str) -> None:
    m = draw_mlp(130, 256, 160, "bf16")
    operands: dict[str, Any] = {"x": m.x, "gamma": m.gamma, "weights": packed(m), "lnc": 1}
    operands.update({name: f(operands[name]) for name, f in change.items()})
    with pytest.raises(ValueError, match=sentence):
        prompt_mlp(operands.pop("x"), operands.pop("gamma"), operands.pop("weights"), **operands)


def test_an_inner_row_that_sbuf_cannot_hold() -> None:
    x, inner = np.zeros((3, 128), np.float32), 8448
    with pytest.raises(ValueError, match="8448 numbers of float32, up to 8192 are taken: raise tp"):
        prompt_mlp(x, x[0], (np.zeros((inner // 128, 128, 256), np.float32), np.zeros((1, inner, 128), np.float32)))


def test_a_wrong_weight_of_a_product() -> None:
    x = np.zeros((3, 256), np.float32)
    with pytest.raises(ValueError, match="make it with pack_weights"):
        prompt_product(x, pack(np.zeros((64, 128), np.float32)))


def share(kernel: Callable[..., Any], operands: tuple[Any, ...], cost: roofline.Cost) -> float:
    """Simulated share of the Tensor Engine's bound."""
    ns = schedule(events_of(kernel, *operands), band=False).latency_ns
    return cost.flops / (TRN2.tensor_bf16_tflops.value * 1e3) / ns


def test_a_whole_model_on_one_rank_fits() -> None:
    """Qwen3-8B at tp 1, three tiles of rows: the simulator refuses what SBUF cannot hold."""
    kind = DTYPES["bf16"]
    weights = np.zeros((48, 4096, 512), kind), np.zeros((8, 12288, 512), kind)
    operands = np.zeros((384, 4096), kind), np.zeros(4096, kind), weights
    assert 0 < share(prompt_mlp, operands, roofline.prompt_mlp(384, 4096, 12288, 2)) < 1


def test_share_of_the_tensor_engine() -> None:
    """Qwen3-32B at tp 32, 2048 rows: MLP, queries with keys and values, output projection."""
    kind = DTYPES["bf16"]
    x, heads = np.zeros((2048, 5120), kind), np.zeros((2048, 256), kind)
    weights = np.zeros((4, 5120, 400), kind), np.zeros((10, 800, 512), kind)
    mlp = share(prompt_mlp, (x, np.zeros(5120, kind), weights), roofline.prompt_mlp(2048, 5120, 800, 2))
    qkv = share(prompt_product, (x, np.zeros((2, 5120, 256), kind)), roofline.prompt_product(2048, 5120, 512, 2))
    out = share(prompt_product, (heads, np.zeros((10, 256, 512), kind)), roofline.prompt_product(2048, 256, 5120, 2))
    assert 0.72 < mlp < 1
    assert 0.66 < qkv < 1
    assert 0.68 < out < 1
