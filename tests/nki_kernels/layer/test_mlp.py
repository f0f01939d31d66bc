"""The fused MLP against its law in fp64 and the model, and its bits."""

from __future__ import annotations

from typing import Any

import pytest

import nkisim
from nki_kernels.layer import law, mlp
from nki_kernels.layer.mlp import decode_mlp, decode_mlp_kernel
from tests.close import is_close
from tests.nki_kernels.attention.inputs import in_turn, same
from tests.nki_kernels.layer.inputs import MLP, as_fp64, draw_mlp, naive_mlp

# rows, E, I: odd first; I with a rest of 32, 64 and 96 rows, less than one tile, and none; rows split in four
SHAPES = [(3, 384, 250), (33, 640, 800), (1, 1024, 96), (5, 256, 192), (128, 512, 256), (32, 256, 2080), (37, 4096, 64)]
WAYS = [*in_turn(SHAPES), pytest.param((128, 8192, 512), "fp32", 1, marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _two_cores_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as small as these are otherwise one core's work."""
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
# and rows that are split in four, in one and in two tiles of them
BITS = [
    (ROWS, "fp32", 1, (1, 2, 7, 16, 31)),
    (ROWS, "bf16", 2, (1, 2, 7, 16, 31)),
    ((35, 4096, 64), "bf16", 2, (1, 2, 31, 33, 35)),
    *(pytest.param(*bits[:3], range(1, 33), marks=pytest.mark.slow) for bits in ((ROWS, "fp32", 1), (ROWS, "bf16", 2))),
]


@pytest.mark.parametrize(("shape", "dtype", "lnc", "counts"), BITS, ids=str)
def test_a_row_s_bits(shape: tuple[int, int, int], dtype: str, lnc: int, counts: Any) -> None:
    """One row, several counts, and another order: the same bits, on one core and on two; a weight's differ."""
    m = draw_mlp(*shape, dtype)
    right = run(m)
    for count in counts:
        assert same(run(m.rows(slice(count)), lnc=lnc), right[:count]), f"{count} rows"
        assert same(run(m.rows(slice(count - 1, count)), lnc=lnc), right[count - 1 : count]), f"only row {count - 1}"
    assert same(run(m.rows(slice(None, None, -1)), lnc=lnc)[::-1], right)
    m.gate[0, 0] *= 2
    assert not same(run(m), right)


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
