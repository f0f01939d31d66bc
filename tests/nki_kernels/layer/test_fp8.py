"""The layer's kernels with FP8 weights against their law in fp64 on the same numbers; the bits of a row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from model.fp8 import FP8Linear, quantize
from nki_kernels.layer import core_split, law, mlp
from nki_kernels.layer.attention import decode_attention
from nki_kernels.layer.mlp import decode_mlp
from nki_kernels.layer.pack_weights import FP8_COLUMNS, pack_down, pack_gate_up, pack_out, pack_qkv
from nki_kernels.layer.prompt_matmul import prompt_mlp
from tests.close import is_close
from tests.nki_kernels.attention.inputs import as_torch, same
from tests.nki_kernels.layer.inputs import DIM, MLP, AttentionDims, as_fp64, draw_attention, draw_mlp, exact_attention

EPS = 1e-6
# rows, E, I: odd first; a rest of 32 inner rows; all partitions; rows split in four
SHAPES = [(3, 384, 250), (33, 640, 800), (128, 256, 512), (9, 4096, 64), (5, 256, 1024)]


@pytest.fixture(autouse=True)
def _two_cores_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as small as these are otherwise one core's work."""
    monkeypatch.setattr(mlp, "MIN_BYTES_TO_SPLIT", 0)
    monkeypatch.setattr(core_split, "MIN_BYTES_TO_SPLIT", 0)


def in_fp8(weight: Any) -> tuple[Any, Any]:
    """The numbers and scales of a weight (out, in)."""
    numbers, scale = quantize(torch.from_numpy(weight.astype(np.float32)))
    return numbers.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3), scale.numpy()


def exact(weight: tuple[Any, Any]) -> Any:
    """What numbers and scales stand for, in fp64."""
    return weight[0].astype(np.float64) * weight[1]


def mlp_operands(m: MLP) -> tuple[tuple[Any, ...], list[tuple[Any, Any]]]:
    """The operands of the MLP's kernels, and gate, up and down."""
    gate, up, down = weights = [in_fp8(w) for w in (m.gate, m.up, m.down)]
    packed = [(pack_gate_up(gate[i], up[i], FP8_COLUMNS), pack_down(down[i])) for i in (0, 1)]
    return (m.x, m.gamma, *packed[0], EPS, packed[1]), weights


def attention_operands(weights: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Packed q, k, v and out, and their scales."""
    packed = ((pack_qkv(*(w[i] for w in weights[:3]), DIM, FP8_COLUMNS), pack_out(weights[3][i], DIM, FP8_COLUMNS))
              for i in (0, 1))  # fmt: skip
    return next(packed), next(packed)


def textbook(x: Any, weight: tuple[Any, Any]) -> Any:
    """The reference's product, in bf16."""
    linear = FP8Linear(torch.nn.Linear(*weight[0].shape[::-1], bias=False))
    linear.weight.data = torch.from_numpy(weight[0].astype(np.float32))
    linear.weight_scale.data = torch.from_numpy(weight[1])
    return linear(as_torch(x)).detach()


def naive_mlp(m: MLP, weights: list[tuple[Any, Any]]) -> Any:
    """The model's norm and MLP in bf16 on the same numbers."""
    x = as_torch(m.x).float()
    normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)).bfloat16() * as_torch(m.gamma)
    gate, up = (textbook(normed.float().numpy().astype(ml_dtypes.bfloat16), w) for w in weights[:2])
    gated = (torch.nn.functional.silu(gate) * up).float().numpy().astype(ml_dtypes.bfloat16)
    return textbook(gated, weights[2]).float().numpy()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mlp(shape: tuple[int, int, int]) -> None:
    """Law, one core and two, and a prompt's kernel: the same bits."""
    m = draw_mlp(*shape, "bf16")
    operands, weights = mlp_operands(m)
    out = decode_mlp(*operands)
    right = law.decode_mlp(*as_fp64(m.x, m.gamma), tuple(map(exact, weights)))
    assert is_close(out, naive_mlp(m, weights), right)
    assert same(decode_mlp(*operands, lnc=2), out)
    assert same(prompt_mlp(*operands), out)
    for rows in (slice(1), slice(shape[0] - 1, None)):
        assert same(decode_mlp(m.x[rows].copy(), *operands[1:]), out[rows])
    # a fault: one channel's scale
    operands[-1][0][0, 0, 0] *= 1.5
    assert not same(decode_mlp(*operands), out)


def test_attention() -> None:
    """Law, and the bits of one core and of two, which split heads and columns."""
    a = draw_attention(AttentionDims(3, 5, 384, 4, 2, 301), "bf16")
    quantized = [in_fp8(w) for w in a.weights]
    weights, scales = attention_operands(quantized)

    def run(lnc: int) -> Any:
        operands = a.operands()
        return decode_attention(*operands[:4], *weights, *operands[6:], EPS, scales, lnc=lnc)

    out = run(1)
    right, _ = exact_attention(replace(a, weights=tuple(map(exact, quantized))))
    rounded = replace(a, weights=tuple(exact(w).astype(ml_dtypes.bfloat16) for w in quantized))
    # the textbook rounds the weights to bf16
    assert is_close(out.reshape(a.x.shape), rounded.run(), right)
    assert same(run(2), out)


def test_refusals() -> None:
    m = draw_mlp(3, 256, 192, "bf16")
    (x, gamma, gate_up, down, eps, scales), _ = mlp_operands(m)
    wide = [a.astype(np.float32) for a in (x, gamma)]
    for operands, sentence in (
        ((*wide, gate_up, down, eps, scales), "x is float32, FP8 weights multiply bfloat16 rows"),
        ((x, gamma, gate_up, down), "dtypes are bfloat16, float8_e4m3"),
        (
            (x, gamma, gate_up.astype(np.float32), down, eps, scales),
            "gate_up is float32 .* quantize it, or pass no scale",
        ),
        (
            (x, gamma, gate_up, down, eps, (scales[0], scales[1][:, 0])),
            "down's scale is float32 .* pack it as its weight",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            decode_mlp(*operands)
