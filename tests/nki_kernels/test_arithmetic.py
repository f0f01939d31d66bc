"""Kernels have the bits of nki_kernels/arithmetic.py; faults of either have other bits on the same operands."""

from __future__ import annotations

import types
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nki_kernels import arithmetic
from nki_kernels.attention import kv_chunks, kv_prefetch
from nki_kernels.attention.append_rows import append_rows
from nki_kernels.attention.prompt import prompt_attention
from nki_kernels.attention.verify import verify_attention
from nki_kernels.layer import core_split, mlp, rmsnorm_rows
from nki_kernels.layer.decode_layers import decode_layers
from nki_kernels.layer.law import rope_tables
from nki_kernels.layer.mlp import decode_mlp
from nki_kernels.layer.prompt_matmul import prompt_mlp, prompt_product
from nki_kernels.layer.prompt_qkv import prompt_qkv
from nkisim.isa.activations import UNARY
from tests.nki_kernels.attention.inputs import same, slices, unpooled
from tests.nki_kernels.cases import CASES, EPS, LARGE, NONE, case, mlp_operands_of, packed_attention, random_case
from tests.nki_kernels.layer.inputs import DIM, AttentionDims, draw_attention


@pytest.fixture(autouse=True)
def _two_cores_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores split these small weights, which core 0 would otherwise compute."""
    for module in (core_split, mlp):
        monkeypatch.setattr(module, "MIN_BYTES_TO_SPLIT", 0)


def check(results: list[Any], expected: list[Any]) -> None:
    assert all(result.any() for result in results)
    pairs = zip(results, expected, strict=True)
    assert [same(*map(np.ascontiguousarray, pair)) for pair in pairs] == [True] * len(results)


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)])
def test_bits(name: str, lnc: int) -> None:
    results, law = case(name, lnc)
    check(results, law(arithmetic))


def test_functions() -> None:
    """exp and silu are the simulator's; NumPy's exp may differ in the last bit."""
    rng = np.random.default_rng(0)
    x = np.concatenate([-rng.exponential(8, 10**5), 4 * rng.standard_normal(10**5), [0, -1e-30, -104, -3e38]])
    for name in ("exp", "silu"):
        check([UNARY[name].fn(x.astype(np.float32))], [getattr(arithmetic, name)(x.astype(np.float32))])


WEIGHTS = "product*, decode_mlp fp32*, prompt_mlp fp32, qkv fp32, decode fp32, decode fp32 long"
EPS_TEXT, QUERIES = "* np.float32(eps / hidden) + np.float32(eps**2)", "rows.head_eps_R1, dim**-0.5)"
ORDER, GROUPS = "decode fp32*, verify fp32*, prompt fp32*, * order", "* groups"
ROUNDED = "decode bf16*, verify bf16*, prompt bf16*"
# by fault: a text of the arithmetic, its replacement, and patterns of the cases that notice
FAULTS = {
    "K tiles descend": ("* (depth > full)]", "* (depth > full)][::-1]", WEIGHTS),
    "a K tile has adjacent inputs": (".reshape(sections, P, -1).swapaxes(1, 2)", "", WEIGHTS),
    "long rows have no sections": ("return SECTIONS if", "return 1 if", "*mlp* long, qkv* long, decode* long"),
    "tiles add in fp64": ("reduce(np.add, parts)", "sum(map(np.float64, parts)).astype(np.float32)", WEIGHTS),
    "a product is rounded": ("return total if", "return total.astype(x_RK.dtype) if", "*mlp bf16, qkv bf*, decode bf*"),
    "FP8's product is rounded": ("total * scale", "total.astype(x_RK.dtype) * scale", "*mlp fp8, qkv fp8, decode fp8"),
    "squares add in order": ("halved(np.stack(by_tile))", "in_order(by_tile)", "*mlp fp32, qkv fp32"),
    "1 / rms before the product": (
        "scaled_RE =", "wide, inv_rms_R1 = wide * inv_rms_R1, inv_rms_R1**0; scaled_RE =", "*mlp*, qkv*, decode*"),
    "a head's eps is the row's": (EPS_TEXT, "* 0 + np.float32(eps)", "qkv fp32, decode fp32*"),
    "queries are scaled after rounding": (
        QUERIES, "rows.head_eps_R1).astype(x_NE.dtype) * np.float32(dim**-0.5)", "qkv*, decode bf16*"),
    "silu is rounded": ("* silu(gate)", "* silu(gate).astype(x_RE.dtype)", "*mlp bf16"),
    "half groups": ("GROUP_BYTES = 8192", "GROUP_BYTES = 4096", GROUPS),
    "double groups": ("GROUP_BYTES = 8192", "GROUP_BYTES = 16384", GROUPS),
    "each group has its max": ("np.maximum(before_R1, ", "(", GROUPS),
    "a factor is rounded": ("exp(before_R1 - max_R1)", "exp(before_R1 - max_R1).astype(dtype)", "* bf16 groups"),
    "key tiles descend": (".reshape(-1, P))\n", ".reshape(-1, P))[::-1]\n", ORDER),
    "a key tile has adjacent keys": (".reshape(-1, P, RUN).swapaxes(1, 2)", "", ORDER),
    "runs of eight keys": ("RUN = 4", "RUN = 8", ORDER),
    "a key too far": ("<= limit_R[", "<= 1 + limit_R[", "decode fp32*, decode bf16*, verify*, prompt fp*, prompt bf*"),
    "the max of all keys": ("masked[:, group].max", "scores[:, group].max", ORDER),
    "weights add before rounding": (
        "total = total * exp",
        "part[:, -1] = exp(masked[:, group] - max_R1).sum(1); total = total * exp", ROUNDED),
    "weights are not rounded": ("max_R1).astype(dtype)\n", "max_R1)\n", ROUNDED),
    "a division": ("* (1 / total[:, -1:])", "/ total[:, -1:]", "decode fp32*, verify fp32*, prompt fp32*"),
}  # fmt: skip


def matching(patterns: str) -> list[str]:
    """The names of cases that match; each pattern has one."""
    matches = [[name for name in CASES if fnmatch(name, pattern)] for pattern in patterns.split(", ")]
    assert all(matches)
    return [name for names in matches for name in names]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_arithmetic_is_noticed(fault: str) -> None:
    text, other, patterns = FAULTS[fault]
    source, wrong = Path(arithmetic.__file__).read_text(encoding="utf-8"), types.ModuleType("wrong")
    assert source.count(text) == 1
    exec(source.replace(text, other), wrong.__dict__)
    for name in matching(patterns):
        results, law = case(name, 1)
        with np.errstate(over="ignore", invalid="ignore"):
            assert not all(map(same, law(wrong), results)), name


# constants of kernels: the place in HBM of a K tile's inputs, the keys of a group
@pytest.mark.parametrize(
    ("module", "constant", "value", "patterns"),
    [
        (rmsnorm_rows, "LONG_ROW", 512, "decode_mlp fp32, prompt_mlp fp32, qkv fp32, decode fp32"),
        (kv_chunks, "GROUP_BYTES", 4096, "decode * groups, verify * groups"),
        (kv_prefetch, "GROUP_BYTES", 4096, "prompt * groups"),
    ],
)
def test_a_fault_of_a_kernel_is_noticed(
    module: Any, constant: str, value: int, patterns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, constant, value)
    for name in matching(patterns):
        assert not all(map(same, CASES[name](lnc=1)[0], case(name, 1)[1](arithmetic))), name


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_shapes(seed: int) -> None:
    results, law = random_case(seed)
    check(results, law(arithmetic))


def added(x: Any, part: Any) -> Any:
    """The residual after a half-layer."""
    return (x.astype(np.float32) + part.astype(np.float32)).astype(x.dtype)


@pytest.mark.parametrize(("dtype", "lnc"), [("fp32", 2), ("bf16", 1), ("fp8", 1)])
def test_a_row_of_a_layer_has_the_same_bits_on_every_route(dtype: str, lnc: int) -> None:
    """128 positions on both sides of a group of keys, in one prompt or several passes; the law's of three rows."""
    first, length = (1990, 3072) if dtype == "fp32" else (4050, 5120)
    a = draw_attention(AttentionDims(1, 128, 256, 4, 2, length), dtype.replace("fp8", "bf16"), first=[first])
    (weights, scales), mlp_weights = packed_attention(a, dtype), mlp_operands_of(128, 256, 224, dtype)[1:]
    angles, table, mlp_scales = rope_tables(a.positions, DIM), a.pages()[1], mlp_weights[-1]

    def halves(rows: slice, pools: Any, attend: Any, mlp_kernel: Any) -> Any:
        """The kernels of prefill, whose attention and MLP are `attend` and `mlp_kernel`."""
        x, positions, at = a.x[0, rows], a.positions[:, rows].copy(), [t[:, rows].copy() for t in angles]
        q, k, v = prompt_qkv(x, *a.norms, weights[0], *at, 2, EPS, scales and scales[0], lnc=lnc)
        out = attend(q, k, v, pools, positions)
        # the packed weight's inputs are in the order D, H
        by_dim = np.ascontiguousarray(np.moveaxis(out[0], 0, 2)).reshape(len(x), -1)
        x = added(x, prompt_product(by_dim, weights[1], 0, scales and scales[1], lnc=lnc))
        return added(x, mlp_kernel(x, *mlp_weights, lnc=lnc))

    def prefill(q: Any, k: Any, v: Any, pools: Any, positions: Any) -> Any:
        append_rows(k, v, *pools, positions, table, lnc=lnc)
        return prompt_attention(q, *pools, positions[:, :1].copy(), table, lnc=lnc)

    def verified(q: Any, k: Any, v: Any, pools: Any, positions: Any) -> Any:
        return verify_attention(q, k, v, *pools, positions, table, lnc=lnc)

    def decoded(rows: slice, pools: Any) -> Any:
        tensors = (*a.norms, *weights, *mlp_weights[:3], *pools, *(scales or ()), *(mlp_scales or ()))
        places = (*(t[:, rows].copy() for t in angles), a.positions[:, rows].copy(), table)
        return decode_layers(a.x[0, rows], (tensors,), *places, None, lnc=lnc)

    routes, passes = [], slices([32, 1, 7, 24, 32, 32])
    for run in (
        lambda pools: [halves(slice(128), pools, prefill, prompt_mlp)],
        lambda pools: [decoded(rows, pools) for rows in passes],
        lambda pools: [halves(rows, pools, verified, decode_mlp) for rows in passes],
    ):
        pools = a.pages()[0]
        out = np.concatenate(run(pools))
        routes.append([out, *(unpooled(pool, table, length) for pool in pools)])
    for other in routes[1:]:
        check(other, routes[0])
    some = [0, 57, 127]
    cache = tuple(stored[0].copy() for stored in routes[0][1:])
    places = (a.norms, weights, [t[0, some] for t in angles], cache, a.positions[0, some], EPS, scales or NONE)
    mlp_places = (mlp_weights[0], mlp_weights[1:3], EPS, mlp_scales or NONE)
    expected = arithmetic.decoder_layer(a.x[0, some], places, mlp_places)
    check([routes[0][0][some], *routes[0][1:]], [expected, *(stored[None] for stored in cache)])
