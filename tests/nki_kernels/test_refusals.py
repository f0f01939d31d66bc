"""Every kernel refuses wrong operands in one sentence, before anything runs or is written."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from model.nki.table import KERNELS
from tests.nki_kernels.test_recorded import TABLE

# dims for the builders of test_recorded: operands that a kernel accepts
DIMS: dict[str, tuple[Any, ...]] = {
    "accept_drafts": (2, 4, 3), "append_rows": (2, 5, 64, "fp32"), "coupled_sample": (4, 50, "fp32"),
    "decode_attention": (2, 3, 384, 2, 1, 300, "fp32"), "decode_layers": (1, 2, 3, 384, 2, 1, 300, "fp32"),
    "decode_mlp": (2, 256, 192, "fp32"), "gumbel_noise": (4, 50, 0),
    "prompt_attention": ((4, 2, 1024, 64, "fp32"), 896, 128), "prompt_mlp": (2, 256, 192, "fp32"),
    "prompt_product": (2, 256, 192, "fp32"), "prompt_qkv": (2, 3, 384, 2, 1, 300, "fp32"),
    "verify_attention": (2, 4, 2, 3, 96, 64, "fp32", True), "weights_above": (4, 50, 7, "fp32"),
}  # fmt: skip
GOOD = {name: TABLE[name][0](*dims) for name, dims in DIMS.items()}


def zeros(*shape: int, dtype: Any = np.float32) -> Callable[[Any], Any]:
    return lambda _: np.zeros(shape, dtype)


def half(x: Any) -> Any:
    return x.astype(ml_dtypes.bfloat16)


def swapped(x: Any) -> Any:
    return x.swapaxes(1, 2)


# (kernel, operand, its change, the sentence)
BAD: list[tuple[str, str, Callable[[Any], Any], str]] = [
    ("verify_attention", "q", lambda q: q[0], r"q is \(4, 3, 64\), \(B, H, N, D\) is needed"),
    ("verify_attention", "q", lambda q: q[..., :32], "head dim D is 32"),
    ("verify_attention", "q", zeros(2, 4, 33, 64), "N is 33 rows per sequence"),
    ("verify_attention", "q", zeros(2, 4, 0, 64), "N is 0 rows per sequence"),
    ("verify_attention", "q", zeros(2, 64, 5, 64), "a kv head has 160 rows, at most 128 fit"),
    ("verify_attention", "q", half, "dtypes are bfloat16, float32"),
    ("verify_attention", "q", zeros(2, 3, 3, 64), "H = 3 a multiple of G"),
    ("verify_attention", "k_new", lambda k: k[:, :, :2], "k_new is float32"),
    ("verify_attention", "v_new", lambda v: v.swapaxes(2, 3), "pass the rows of the same pass"),
    ("verify_attention", "k_pages", lambda p: p.swapaxes(2, 3), "keys are not transposed in pages"),
    ("verify_attention", "positions", lambda p: p.astype(np.int64), "positions is int64"),
    ("verify_attention", "block_table", lambda t: t + 95, "block_table names pages 95 to"),
    ("verify_attention", "block_table", lambda t: t * 0 + 7, "0 to 5 hold sequences and the last 2 of a pool are"),
    ("verify_attention", "block_table", lambda t: t * 0 - 1, "block_table names pages -1 to -1"),
    ("verify_attention", "block_table", lambda t: t.astype(np.int64), "block_table is int64"),
    ("verify_attention", "block_table", lambda t: t[:, :7], "S a multiple of 1024"),
    ("verify_attention", "block_table", zeros(2, 8 * 1025, dtype=np.int32), "lower the batch or max-len"),
    ("verify_attention", "limit", lambda b: b[:, 0], r"limit is int32 \(2,\)"),
    ("append_rows", "k_new", zeros(1, 4, 5, 64), "k_new is float32 .* pass the rows of one prompt"),
    ("append_rows", "v_new", half, "all float32 or all bfloat16"),
    ("append_rows", "positions", lambda p: p[:, :4], "positions is int32"),
    ("prompt_attention", "q", lambda q: q[:, :, :100], "C a multiple of 128"),
    ("prompt_attention", "q", half, "all float32 or all bfloat16"),
    ("prompt_attention", "block_table", lambda t: t[:, :7], "fill it with page 0"),
    ("prompt_attention", "start", lambda s: s + 1, "rows 897 to 1024 do not lie in 1024 positions"),
    ("prompt_attention", "start", lambda s: s[0], r"start is int32 \(1,\)"),
    ("decode_attention", "x", lambda x: x[None], r"x is \(1, 6, 384\), \(R, E\) is needed"),
    ("decode_attention", "x", zeros(130, 384), "there are 130 rows, 1 to 128 fit"),
    ("decode_attention", "x", lambda x: x[:4], "pass the position of each row of x"),
    ("decode_attention", "gamma", lambda w: w[:-1], "gamma is"),
    ("decode_attention", "q_norm", lambda w: w[:-1], "q_norm is"),
    ("decode_attention", "qkv", swapped, "make it with pack_qkv"),
    ("decode_attention", "qkv", lambda w: w[:1], "for 1 kv heads of 128: make it with pack_qkv"),
    ("decode_attention", "qkv", half, "all float32 or all bfloat16"),
    ("decode_attention", "out_weight", swapped, "make it with pack_out"),
    ("decode_attention", "k_pages", lambda p: p[..., :64], "head dim D is 64, the fused kernel serves 128"),
    ("decode_attention", "k_pages", lambda p: p[0], r"\(pages, G, 128, D\) is needed"),
    ("decode_attention", "block_table", lambda t: t[:, :3], "fill it with page 0"),
    ("decode_attention", "positions", lambda p: p * 0, "not consecutive"),
    ("decode_attention", "cos", lambda c: c.astype(np.float64), "cos is float64"),
    ("decode_attention", "sin", lambda c: c[..., :-1], "make it with law.rope_tables"),
    ("decode_layers", "positions", lambda p: p * 0, "not consecutive"),
    ("decode_layers", "layers", lambda ls: ((*ls[0][:5], ls[0][5][:-1], *ls[0][6:]),), "gamma is"),
    ("decode_layers", "layers", lambda ls: ((*ls[0][:6], swapped(ls[0][6]), *ls[0][7:]),), "pack_gate_up"),
    ("decode_mlp", "x", zeros(129, 256), "there are 129 rows, 1 to 128 fit"),
    ("decode_mlp", "x", zeros(2, 200), "E is 200, a multiple of 128"),
    ("decode_mlp", "x", half, "all float32 or all bfloat16"),
    ("decode_mlp", "gamma", lambda w: w[:-1], "gamma is"),
    ("decode_mlp", "gate_up", swapped, "make it with pack_gate_up"),
    ("decode_mlp", "gate_up", lambda w: w[:1], "gate_up has 1 blocks of 192 columns"),
    ("decode_mlp", "down", swapped, "make it with pack"),
    ("prompt_mlp", "x", lambda x: x[:, :100], "K a multiple of 128"),
    ("prompt_mlp", "x", lambda x: x[None], r"\(C, K\) is needed"),
    ("prompt_mlp", "x", lambda x: half(np.zeros((1, 5248))), "up to 5120"),
    ("prompt_mlp", "x", zeros(1, 4224), "up to 4096"),
    ("prompt_mlp", "down", half, "all float32 or all bfloat16"),
    ("prompt_product", "weight", lambda w: w[:, :128], "make it with pack_weights"),
    ("prompt_qkv", "cos", lambda c: c[..., :32], "head dim D is 64, the fused kernel serves 128"),
    ("prompt_qkv", "cos", lambda c: c[:, :1], r"cos is \(2, 1, 64\) for 6 rows"),
    ("prompt_qkv", "kv_heads", lambda _: 3, "for 3 kv heads of 128: make it with pack_qkv"),
    ("prompt_qkv", "q_norm", half, "all float32 or all bfloat16"),
    ("gumbel_noise", "seeds", zeros(129, 2, dtype=np.int32), "there are 129 rows"),
    ("gumbel_noise", "seeds", zeros(4, 2, dtype=np.int64), "seeds is int64"),
    ("gumbel_noise", "positions", lambda p: p[:, 0], r"positions is int32 \(4,\)"),
    ("gumbel_noise", "positions", lambda p: p * 0 + (1 << 24), "positions run from 16777216 to 16777216"),
    ("gumbel_noise", "columns", lambda _: 0, "the shard has 0 ids"),
    ("gumbel_noise", "start", zeros(1, 1), "start is float32"),
    ("gumbel_noise", "domain", lambda _: 64, "the domain is 64"),
    ("coupled_sample", "logits", lambda x: x * np.nan, "logits hold NaN"),
    ("coupled_sample", "logits", zeros(4, 2, 25), r"logits is \(4, 2, 25\), \(R, V\) is needed"),
    ("coupled_sample", "logits", zeros(4, 50, dtype=np.float16), "logits is float16"),
    ("coupled_sample", "noise", lambda x: x.T, r"noise is float32 \(50, 4\)"),
    ("coupled_sample", "temperature", lambda t: -t, "a temperature is negative or NaN"),
    ("weights_above", "logits", zeros(33, 50), "there are 33 rows, 1 to 32 fit"),
    ("weights_above", "thresholds", zeros(4, 0), "there are 0 thresholds"),
    ("weights_above", "scale", lambda s: s[:, 0], "scale is"),
    ("accept_drafts", "values", zeros(129, 4, 3), "there are 129 shards"),
    ("accept_drafts", "values", zeros(4, 3), r"values is \(4, 3\)"),
    ("accept_drafts", "ids", lambda i: i.astype(np.int64), "ids is int64"),
    ("accept_drafts", "drafts", zeros(4, 3, dtype=np.int32), r"drafts is int32 \(4, 3\)"),
    ("accept_drafts", "drafts", lambda _: None, "drafts are missing for N = 3"),
    ("accept_drafts", "limits", lambda m: m * 0 - 1, "a limit is negative"),
]  # fmt: skip


def refuse_to_run(kernel: Any) -> Any:
    raise AssertionError(f"{kernel.fn.__name__} was launched")


def host(name: str) -> Callable[..., Any]:
    """The host function of a kernel."""
    module = importlib.import_module(KERNELS[name].fn.__module__)
    return getattr(module, name)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "operand", "change", "sentence"), BAD, ids=[f"{b[0]}: {b[3]}" for b in BAD])
def test_refused(name: str, operand: str, change: Callable[[Any], Any], sentence: str) -> None:
    operands, names = list(GOOD[name]), list(inspect.signature(KERNELS[name].fn).parameters)
    at = names.index(operand)
    operands[at] = change(operands[at])
    with pytest.raises(ValueError, match=sentence) as caught:
        host(name)(*operands, run=refuse_to_run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", KERNELS)
def test_the_same_operands_unchanged_are_launched(name: str) -> None:
    with pytest.raises(AssertionError, match=f"{name}_kernel was launched"):
        host(name)(*GOOD[name], lnc=2, run=refuse_to_run)
    with pytest.raises(ValueError, match="lnc is 3, 1 or 2 cores"):
        host(name)(*GOOD[name], lnc=3, run=refuse_to_run)


def test_an_intermediate_row_that_sbuf_cannot_hold() -> None:
    x, inner = np.zeros((3, 128), np.float32), 8448
    weights = np.zeros((inner // 128, 128, 256), np.float32), np.zeros((1, inner, 128), np.float32)
    with pytest.raises(ValueError, match="8448 elements of float32, up to 8192 are served: raise tp"):
        host("prompt_mlp")(x, x[0], *weights, run=refuse_to_run)
