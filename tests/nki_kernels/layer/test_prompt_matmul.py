"""A prompt's products: decode's bits for every number of rows, the law in fp64; packing, which unpacking undoes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nki_kernels import tiles
from nki_kernels.layer import law
from nki_kernels.layer.mlp import decode_mlp
from nki_kernels.layer.pack_weights import BANK, pack, pack_gate_up, pack_out, pack_qkv
from nki_kernels.layer.prompt_matmul import prompt_mlp, prompt_product
from tests.close import is_close
from tests.nki_kernels.attention.inputs import normal
from tests.nki_kernels.layer.inputs import as_fp64, draw_mlp, naive_mlp

# rows, E, I: odd first; two groups of tiles, a rest of 32 inner rows, rows split in four, blocks used tile by tile
SHAPES = [((130, 384, 250), "fp32"), ((1, 256, 96), "bf16"), ((130, 384, 250), "bf16"), ((1, 256, 96), "fp32"),
          ((700, 256, 160), "bf16"), ((257, 4096, 64), "bf16"), ((130, 256, 5200), "fp32")]  # fmt: skip
WAYS = [*SHAPES[:2], *(pytest.param(*shape, marks=pytest.mark.slow) for shape in SHAPES[2:])]


@pytest.mark.parametrize(("shape", "dtype"), WAYS, ids=str)
def test_mlp_has_decode_s_bits(shape: tuple[int, int, int], dtype: str) -> None:
    """Rows of one prompt on one core and on two, and as decode computes them, 100 at a time."""
    m = draw_mlp(*shape, dtype)
    x, *weights = m.operands()
    out = prompt_mlp(x, *weights)
    decoded = [decode_mlp(x[i : i + 100], *weights) for i in range(0, shape[0], 100)]
    assert out.tobytes() == np.concatenate(decoded).tobytes()
    assert out.tobytes() == prompt_mlp(x, *weights, lnc=2).tobytes()
    x, gamma, *wide = as_fp64(*m)
    assert is_close(out, naive_mlp(m), law.decode_mlp(x, gamma, tuple(wide)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "depth", "dtype"), [(130, 384, "fp32"), pytest.param(300, 4096, "bf16", marks=pytest.mark.slow)]
)
def test_products_of_all_layouts(rows: int, depth: int, dtype: str) -> None:
    """Blocks as decode streams them; a row alone has the bits that it has among others."""
    rng = np.random.default_rng(0)
    x, out = normal(rng, dtype, rows, depth), normal(rng, dtype, 256, depth, size=depth**-0.5)
    q, k, v = (normal(rng, dtype, n * 128, depth, size=depth**-0.5) for n in (2, 1, 1))
    by_dim = x.reshape(rows, depth // 128, 128).swapaxes(1, 2).reshape(rows, depth)
    qkv = np.concatenate([v, k, q])
    for rows_x, weight, plain in ((x, pack_qkv(q, k, v, 128), qkv), (by_dim, pack_out(out, 128), out)):
        y, (wide, matrix) = prompt_product(rows_x, weight), as_fp64(x, plain)
        textbook = (x.astype(np.float32) @ plain.astype(np.float32).T).astype(x.dtype)
        assert is_close(y, textbook, wide @ matrix.T)
        assert prompt_product(rows_x, weight, lnc=2).tobytes() == y.tobytes()
        assert prompt_product(rows_x[-1:].copy(), weight).tobytes() == y[-1:].tobytes()
        assert prompt_product(rows_x, weight, 1).tobytes() == y[:, : weight.shape[2]].tobytes()


def _weight(out: int, inputs: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + out * inputs, dtype=torch.float32).reshape(out, inputs)


def unpack(packed: Any) -> Any:
    """The inverse of `pack`."""
    return packed.swapaxes(1, 2).reshape(-1, packed.shape[1])


@pytest.mark.parametrize(("out", "inputs"), [(6, 5), (96, 32), (1280, 3), (5120, 2)])
def test_rows_and_pairs(out: int, inputs: int) -> None:
    w, other = _weight(out, inputs), -_weight(out, inputs)
    assert torch.equal(unpack(pack(w)), w)
    packed = pack_gate_up(w, other)
    count, depth, both = packed.shape
    halves = packed.swapaxes(1, 2).reshape(count, 2, both // 2, depth)
    assert torch.equal(halves[:, 0].reshape(-1, depth), w)
    assert torch.equal(halves[:, 1].reshape(-1, depth), other)


@pytest.mark.parametrize(("heads", "kv", "dim"), [(2, 1, 4), (16, 8, 2), (5, 1, 128), (4, 2, 128)])
def test_heads(heads: int, kv: int, dim: int) -> None:
    q, k, v = _weight(heads * dim, 3), _weight(kv * dim, 3, 10**6), _weight(kv * dim, 3, 2 * 10**6)
    assert torch.equal(unpack(pack_qkv(q, k, v, dim)), torch.cat((v, k, q)))
    out = _weight(6, heads * dim)
    by_dim = unpack(pack_out(out, dim)).reshape(6, dim, heads)
    assert torch.equal(by_dim.swapaxes(1, 2).reshape(6, -1), out)


def test_numpy_and_torch_alike_and_a_block_fills_at_most_a_bank() -> None:
    gate, up = _weight(6, 4), -_weight(6, 4)
    assert np.array_equal(pack_gate_up(gate, up).numpy(), pack_gate_up(gate.numpy(), up.numpy()))
    # the stored layout has a constant of its own, which the kernels' products must hold
    assert BANK <= tiles.BANK
    with pytest.raises(ValueError, match="an even number is needed"):
        pack(np.zeros((3, 128), np.float32))
