"""A prompt's products: decode's bits for every number of rows, the law in fp64."""

from __future__ import annotations

import numpy as np
import pytest

from nki_kernels.layer import law
from nki_kernels.layer.mlp import decode_mlp
from nki_kernels.layer.pack_weights import pack_out, pack_qkv
from nki_kernels.layer.prompt_matmul import prompt_mlp, prompt_product
from tests.close import is_close
from tests.nki_kernels.attention.inputs import DTYPES
from tests.nki_kernels.layer.inputs import as_fp64, draw_mlp, linear, naive_mlp

# rows, E, I: odd first; two groups of tiles, a rest of 32 inner rows, rows split in four, blocks used tile by tile
SHAPES = [(130, 384, 250), (1, 256, 96), (700, 256, 160), (257, 4096, 64), (130, 256, 5200)]


DTYPE = ("fp32", "bf16")
WAYS = [
    *((shape, DTYPE[n % 2]) for n, shape in enumerate(SHAPES)),
    *(pytest.param(shape, DTYPE[1 - n % 2], marks=pytest.mark.slow) for n, shape in enumerate(SHAPES)),
]


@pytest.mark.parametrize(("shape", "dtype"), WAYS, ids=str)
def test_mlp_has_decode_s_bits(shape: tuple[int, int, int], dtype: str) -> None:
    """Rows of one prompt on one core and on two, and as decode computes them, 100 at a time."""
    m = draw_mlp(*shape, dtype)
    x, *weights = m.operands()
    out = prompt_mlp(x, *weights)
    decoded = [decode_mlp(x[i : i + 100], *weights) for i in range(0, shape[0], 100)]
    assert out.tobytes() == np.concatenate(decoded).tobytes()
    assert out.tobytes() == prompt_mlp(x, *weights, lnc=2).tobytes()
    x, gamma, *wide = as_fp64(*m.all)
    assert is_close(out, naive_mlp(m), law.decode_mlp(x, gamma, tuple(wide)))  # type: ignore[arg-type]


def test_bits_can_differ() -> None:
    m = draw_mlp(130, 256, 160, "bf16")
    other = m.x.copy()
    other[129, 0] *= 2
    a, b = (prompt_mlp(x, *m.operands()[1:]) for x in (m.x, other))
    assert a[:129].tobytes() == b[:129].tobytes()
    assert a[129:].tobytes() != b[129:].tobytes()


@pytest.mark.parametrize(
    ("rows", "depth", "dtype"),
    [(1, 256, "fp32"), (200, 4096, "bf16"), (300, 384, "fp32"), pytest.param(700, 384, "bf16", marks=pytest.mark.slow)],
)
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
        first = prompt_product(rows_x, weight, 1)
        assert first.tobytes() == y[:, : weight.shape[2]].tobytes()
