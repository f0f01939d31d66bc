"""The fused MLP against its law in fp64, against the model, and its bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import nkisim
from model.config import Qwen3Config
from model.context import ONE_RANK
from model.layers import RMSNorm
from model.qwen3 import MLP as TorchMLP
from nki_kernels.layer import law, mlp
from nki_kernels.layer.mlp import decode_mlp, decode_mlp_kernel
from nki_kernels.layer.pack_weights import pack
from tests.close import is_close
from tests.nki_kernels.attention.inputs import as_torch
from tests.nki_kernels.layer.inputs import MLP, as_fp64, draw_mlp, naive_mlp

# rows, E, I: odd first; I with a rest of 32, 64 and 96 rows, less than one tile, and none; rows split in four
SHAPES = [(3, 384, 250), (33, 640, 800), (1, 1024, 96), (5, 256, 192), (128, 512, 256), (32, 256, 2080), (37, 4096, 64)]
DTYPES = ("fp32", "bf16")
# every shape, both dtypes and both numbers of cores in turn, then the other dtype; the largest rows in fp32
WAYS = [
    *((shape, DTYPES[n % 2], 1 + n // 2 % 2) for n, shape in enumerate(SHAPES)),
    *(pytest.param(shape, DTYPES[1 - n % 2], 2 - n // 2 % 2, marks=pytest.mark.slow) for n, shape in enumerate(SHAPES)),
    pytest.param((128, 8192, 512), "fp32", 1, marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def _two_cores_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as small as these are otherwise one core's work."""
    monkeypatch.setattr(mlp, "MIN_BYTES_TO_SPLIT", 0)


def run(m: MLP, **options: Any) -> Any:
    return decode_mlp(*m.operands(), **options)


def exact(m: MLP) -> Any:
    x, gamma, *weights = as_fp64(*m.all)
    return law.decode_mlp(x, gamma, tuple(weights))


@pytest.mark.parametrize(("shape", "dtype", "lnc"), WAYS, ids=str)
def test_law(shape: tuple[int, int, int], dtype: str, lnc: int) -> None:
    m = draw_mlp(*shape, dtype)
    assert is_close(run(m, lnc=lnc), naive_mlp(m), exact(m))


SIZES = Qwen3Config(
    hidden_size=256,
    intermediate_size=192,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=128,
    vocab_size=128,
    tie_word_embeddings=True,
)


def test_the_law_is_the_model_s() -> None:
    """model/qwen3.py's norm and MLP on the same bf16 numbers."""
    m = draw_mlp(6, 256, 192, "bf16")
    norm, half = RMSNorm(256, 1e-6), TorchMLP(SIZES, ONE_RANK)
    named = (norm.weight, half.gate_proj.weight, half.up_proj.weight, half.down_proj.weight)
    with torch.no_grad():
        for parameter, value in zip(named, m.all[1:], strict=True):
            parameter.data = as_torch(value)
        assert is_close(run(m), half(norm(as_torch(m.x))).float().numpy(), exact(m))


@pytest.mark.parametrize("counts", [(1, 2, 7, 16, 31), pytest.param(range(1, 33), marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize(("dtype", "lnc"), [("fp32", 1), ("bf16", 2)])
def test_a_row_s_bits(dtype: str, lnc: int, counts: Any) -> None:
    """Rows alone, in several counts, and in another order: the same bits, on one core and on two; a weight's differ."""
    m = draw_mlp(32, 256, 224, dtype)
    whole = run(m)
    for count in counts:
        assert run(m.rows(slice(count)), lnc=lnc).tobytes() == whole[:count].tobytes(), f"{count} rows"
        alone = run(m.rows(slice(count - 1, count)), lnc=lnc)
        assert alone.tobytes() == whole[count - 1 : count].tobytes(), f"row {count - 1} alone"
    assert run(m.rows(slice(None, None, -1)), lnc=lnc)[::-1].tobytes() == whole.tobytes()
    m.gate[0, 0] *= 2
    assert run(m).tobytes() != whole.tobytes()


def test_the_bits_of_long_rows() -> None:
    """Rows that are split in four, in one and in two tiles of them."""
    m = draw_mlp(35, 4096, 64, "bf16")
    whole = run(m)
    for count in (1, 2, 31, 33):
        assert run(m.rows(slice(count))).tobytes() == whole[:count].tobytes()
    assert run(m.rows(slice(34, 35)), lnc=2).tobytes() == whole[34:].tobytes()


def test_small_weights_are_core_0_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second core has no instruction, and the bits are the same."""
    m, busy, results = draw_mlp(3, 256, 224, "bf16"), [], []
    for worth in (0, 10**7):
        monkeypatch.setattr(mlp, "MIN_BYTES_TO_SPLIT", worth)
        ran = nkisim.run(decode_mlp_kernel[2], m.operands(), policy=nkisim.Policy(recording=True))
        busy.append({event.core for event in ran.recording.events})
        results.append(ran.outputs.tobytes())
    assert busy == [{0, 1}, {0}]
    assert results[0] == results[1]


def test_an_odd_number_of_features_is_refused() -> None:
    with pytest.raises(ValueError, match="even number"):
        pack(np.zeros((3, 128), np.float32))
