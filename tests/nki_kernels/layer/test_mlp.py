"""The fused MLP and prefill's products against their law in fp64 and the model; the bits of a row; packing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import nkisim
from nki_kernels import tiles
from nki_kernels.layer import law, mlp
from nki_kernels.layer.mlp import decode_mlp, decode_mlp_kernel
from nki_kernels.layer.pack_weights import BANK, pack, pack_gate_up, pack_out, pack_qkv
from nki_kernels.layer.prompt_matmul import prompt_mlp, prompt_product
from tests.close import is_close
from tests.nki_kernels.attention.inputs import combine, normal, same
from tests.nki_kernels.layer.inputs import MLP, as_fp64, draw_mlp, naive_mlp

# rows, E, I: odd first; I with a remainder of 32, 64 and 96 rows, less than one tile, and none; rows split in four
SHAPES = [(3, 384, 250), (33, 640, 800), (1, 1024, 96), (5, 256, 192), (128, 512, 256), (32, 256, 2080), (37, 4096, 64)]
WAYS = [*combine(SHAPES), pytest.param((128, 8192, 512), "fp32", 1, marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _two_cores_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores split these small weights, which core 0 would otherwise compute."""
    monkeypatch.setattr(mlp, "MIN_BYTES_TO_SPLIT", 0)


def run(m: MLP, **options: Any) -> Any:
    return decode_mlp(*m.operands(), **options)


def exact(m: MLP) -> Any:
    x, gamma, *weights = as_fp64(*m)
    return law.decode_mlp(x, gamma, tuple(weights))


@pytest.mark.parametrize(("shape", "dtype", "lnc"), WAYS, ids=str)
def test_law(shape: tuple[int, int, int], dtype: str, lnc: int) -> None:
    m = draw_mlp(*shape, dtype)
    assert is_close(run(m, lnc=lnc), naive_mlp(m), exact(m))


ROWS = (32, 256, 224)
# and rows that are split in four, in one tile and in two
BITS = [
    (ROWS, "fp32", 1, (1, 2, 7, 16, 31)),
    (ROWS, "bf16", 2, (1, 2, 7, 16, 31)),
    ((35, 4096, 64), "bf16", 2, (1, 2, 31, 33, 35)),
    *(pytest.param(*bits[:3], range(1, 33), marks=pytest.mark.slow) for bits in ((ROWS, "fp32", 1), (ROWS, "bf16", 2))),
]


@pytest.mark.parametrize(("shape", "dtype", "lnc", "counts"), BITS, ids=str)
def test_a_row_s_bits(shape: tuple[int, int, int], dtype: str, lnc: int, counts: Any) -> None:
    """One row, several counts, another order, one core and two: the same bits; another weight: other bits."""
    m = draw_mlp(*shape, dtype)
    full = run(m)
    for count in counts:
        assert same(run(m.rows(slice(count)), lnc=lnc), full[:count]), f"{count} rows"
        assert same(run(m.rows(slice(count - 1, count)), lnc=lnc), full[count - 1 : count]), f"only row {count - 1}"
    assert same(run(m.rows(slice(None, None, -1)), lnc=lnc)[::-1], full)
    m.gate[0, 0] *= 2
    assert not same(run(m), full)


def test_core_0_computes_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second core has no instruction, and the bits are the same."""
    m, busy, results = draw_mlp(3, 256, 224, "bf16"), [], []
    for worth in (0, 10**7):
        monkeypatch.setattr(mlp, "MIN_BYTES_TO_SPLIT", worth)
        ran = nkisim.run(decode_mlp_kernel[2], m.operands(), policy=nkisim.Policy(recording=True))
        busy.append({event.core for event in ran.recording.events})
        results.append(ran.outputs.tobytes())
    assert busy == [{0, 1}, {0}]
    assert results[0] == results[1]


# rows, E, I: odd first; two groups of tiles, a remainder of 32, rows split in four, blocks used tile by tile
PROMPTS = [((130, 384, 250), "fp32"), ((1, 256, 96), "bf16"), ((130, 384, 250), "bf16"), ((1, 256, 96), "fp32"),
          ((700, 256, 160), "bf16"), ((257, 4096, 64), "bf16"), ((130, 256, 5200), "fp32")]  # fmt: skip
PROMPT_WAYS = [*PROMPTS[:2], *(pytest.param(*shape, marks=pytest.mark.slow) for shape in PROMPTS[2:])]


@pytest.mark.parametrize(("shape", "dtype"), PROMPT_WAYS, ids=str)
def test_prefill_mlp_has_decode_s_bits(shape: tuple[int, int, int], dtype: str) -> None:
    """Rows of one prompt on one core and on two, and as decode computes them, 100 at a time."""
    m = draw_mlp(*shape, dtype)
    x, *weights = m.operands()
    out = prompt_mlp(x, *weights)
    decoded = [decode_mlp(x[i : i + 100], *weights) for i in range(0, shape[0], 100)]
    assert out.tobytes() == np.concatenate(decoded).tobytes()
    assert out.tobytes() == prompt_mlp(x, *weights, lnc=2).tobytes()
    assert is_close(out, naive_mlp(m), exact(m))


@pytest.mark.parametrize(
    ("rows", "depth", "dtype"), [(130, 384, "fp32"), pytest.param(300, 4096, "bf16", marks=pytest.mark.slow)]
)
def test_products_of_all_layouts(rows: int, depth: int, dtype: str) -> None:
    """All packed layouts; a row has the same bits by itself and among others."""
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


def test_packing_of_numpy_and_torch_and_the_width_of_a_block() -> None:
    gate, up = torch.arange(48.0).reshape(2, 6, 4).unbind()
    assert np.array_equal(pack_gate_up(gate, up).numpy(), pack_gate_up(gate.numpy(), up.numpy()))
    # the width of a stored block is a separate constant: a PSUM bank must hold it
    assert BANK <= tiles.BANK
    with pytest.raises(ValueError, match="an even number is needed"):
        pack(np.zeros((3, 128), np.float32))
