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
from nki_kernels.layer.pack_weights import BANK, pack, pack_gate_up
from tests.close import is_close
from tests.nki_kernels.attention.inputs import combine
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


def test_packing_of_numpy_and_torch_and_the_width_of_a_block() -> None:
    gate, up = torch.arange(48.0).reshape(2, 6, 4).unbind()
    assert np.array_equal(pack_gate_up(gate, up).numpy(), pack_gate_up(gate.numpy(), up.numpy()))
    # the width of a stored block is a separate constant: a PSUM bank must hold it
    assert BANK <= tiles.BANK
    with pytest.raises(ValueError, match="an even number is needed"):
        pack(np.zeros((3, 128), np.float32))
