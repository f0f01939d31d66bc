"""Operands of kernels, the results, and those of nki_kernels/arithmetic.py on the same operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from nki_kernels.attention.prompt import prompt_attention
from nki_kernels.layer.attention import decode_attention
from nki_kernels.layer.law import rope_tables
from nki_kernels.layer.mlp import decode_mlp
from nki_kernels.layer.pack_weights import FP8_COLUMNS, pack, pack_head, pack_out, pack_qkv
from nki_kernels.layer.prompt_matmul import prompt_mlp, prompt_product
from nki_kernels.layer.prompt_qkv import prompt_qkv
from tests.nki_kernels.attention.inputs import Dims, Inputs, draw, normal, pooled, unpooled
from tests.nki_kernels.layer.inputs import DIM, Attention, AttentionDims, draw_attention, draw_mlp
from tests.nki_kernels.layer.test_fp8 import attention_operands, in_fp8, mlp_operands

EPS, NONE = 1e-6, (None, None)
# a kernel's results, and those of a module of the arithmetic
Case = tuple[list[Any], Callable[[Any], list[Any]]]


def product(rows: int, depth: int, features: int, dtype: str, lnc: int, first: int = 0) -> Case:
    """Of long bf16 rows the sums are zero: only errors are left, which show the order. Odd features are a head's."""
    rng, kind, scale = np.random.default_rng(depth + rows), dtype.replace("fp8", "bf16"), None
    x, weight = normal(rng, kind, rows, depth), normal(rng, kind, features, depth, size=depth**-0.5)
    if kind == "bf16" and depth > 256:
        half, order = depth // 2, rng.permutation(depth // 2)
        x[:, half:], weight[:, half:] = x[:, order], -weight[:, order]
    if dtype == "fp8":
        weight, scale = (pack(part, FP8_COLUMNS) for part in in_fp8(weight))
    else:
        weight = (pack_head if features % 2 else pack)(weight)
    part = slice(first or None)
    operands = weight[part], 1, scale if scale is None else scale[part]
    return [prompt_product(x, weight, first, scale, lnc=lnc)], lambda law: [law.product(x, *operands).astype(x.dtype)]


def mlp_operands_of(rows: int, hidden: int, inner: int, dtype: str) -> tuple[Any, ...]:
    m = draw_mlp(rows, hidden, inner, dtype.replace("fp8", "bf16"))
    return mlp_operands(m)[0] if dtype == "fp8" else (*m.operands(), EPS, None)


def mlp_case(kernel: Any, *dims: Any, lnc: int) -> Case:
    x, gamma, gate_up, down, eps, scales = operands = mlp_operands_of(*dims)
    return [kernel(*operands, lnc=lnc)], lambda law: [law.mlp_half(x, gamma, (gate_up, down), eps, scales or NONE)]


def attended(law: Any, x: Inputs, limits: Any) -> Any:
    """The law's attention of queries (B, H, N, D) over the cache of `x`, up to limits (B, N)."""
    out, per = np.empty_like(x.q), x.q.shape[1] // x.keys.shape[1]
    for b, h in np.ndindex(x.q.shape[:2]):
        out[b, h] = law.attention(x.q[b, h], x.keys[b, h // per], x.values[b, h // per], limits[b])
    return out


def make_stale(keys: Any, values: Any, last: Any) -> None:
    """Overwrite the positions after `last` of each sequence."""
    for b, end in enumerate(last):
        keys[b, :, end + 1 :], values[b, :, end + 1 :] = 1e30, -1e30


def draw_rows(dims: Dims, first: Any, zero: bool) -> Inputs:
    """With `zero` the values up to position 1023 cancel and others are tiny: only errors of an order are left."""
    x = draw(dims, sum(dims[:6]), first)
    if zero:
        x.keys[:, :, 512:1024], x.values[:, :, 512:1024] = x.keys[:, :, :512], -x.values[:, :, :512]
        for values in (x.values[:, :, 1024:], x.new[1]):
            values *= values.dtype.type(2**-20)
    return x


def verify(*dims: Any, lnc: int, beyond: int | None = None, first: Any = None, zero: bool = False) -> Case:
    """With `beyond`, rows attend up to a limit, their block's last position plus this."""
    x = draw_rows(Dims(*dims), first, zero)
    limit = None if beyond is None else x.positions[:, -1:] + np.int32(beyond)
    make_stale(x.keys, x.values, x.positions[:, -1] + max(0, beyond or 0))
    out = x.run(x.pages(), limit, lnc=lnc)
    for stored, new in zip((x.keys, x.values), x.new, strict=True):
        for b, where in enumerate(x.positions):
            stored[b][:, where] = new[b]
    limits = x.positions if limit is None else np.broadcast_to(limit, x.positions.shape)
    return [out], lambda law: [attended(law, x, limits)]


def prompt(*dims: Any, start: int, count: int, lnc: int, slots: int = 0, zero: bool = False) -> Case:
    """Rows from `start` on of a prompt, with a table for `slots` positions; the law computes seven of them."""
    heads, kv_heads, length, dim, dtype = dims
    x, slots = draw_rows(Dims(1, heads, kv_heads, length, length, dim, dtype), [0], zero), slots or length
    make_stale(x.keys, x.values, [start + count - 1])
    (keys, values), table = pooled(x.keys[:, :, :slots], x.values[:, :, :slots])
    q = x.q[:, :, start : start + count].copy()
    out = prompt_attention(q, keys, values, np.array([[start]], np.int32), table, lnc=lnc)
    some = np.unique([0, count - 1, *np.random.default_rng(start).integers(0, count, 5)])
    few = replace(x, q=q[:, :, some])
    return [out[:, :, some]], lambda law: [attended(law, few, start + some[None])]


def packed_attention(a: Attention, dtype: str) -> tuple[Any, Any]:
    """Packed QKV and output weights, and their scales or None."""
    if dtype == "fp8":
        return attention_operands([in_fp8(w) for w in a.weights])
    return (pack_qkv(*a.weights[:3], DIM), pack_out(a.weights[3], DIM)), None


def qkv(*dims: int, dtype: str, lnc: int) -> Case:
    """Queries, keys and values of several sequences."""
    a = draw_attention(AttentionDims(*dims), dtype.replace("fp8", "bf16"))
    ((weight, _), scales), angles = packed_attention(a, dtype), rope_tables(a.positions, DIM)
    rows, scale = (a.x.reshape(-1, a.x.shape[2]), *a.norms, weight), scales and scales[0]
    out = prompt_qkv(*rows, *angles, dims[4], EPS, scale, lnc=lnc)

    def expected(law: Any) -> list[Any]:
        places = zip(a.x, *angles, strict=True)
        parts = [law.qkv(x, a.norms, weight, at, dims[4], EPS, scale) for x, *at in places]
        return [np.stack(part) for part in zip(*parts, strict=True)]

    return list(out), expected


def decode(*dims: int, dtype: str, lnc: int, first: Any = None) -> Case:
    """The output, and keys and values of all positions."""
    a = draw_attention(AttentionDims(*dims), dtype.replace("fp8", "bf16"), first)
    make_stale(a.keys, a.values, a.positions[:, -1])
    (weights, scales), (pools, table) = packed_attention(a, dtype), a.pages()
    places = (*(angles := rope_tables(a.positions, DIM)), *pools, a.positions, table)
    out = decode_attention(a.x.reshape(-1, dims[2]), *a.norms, *weights, *places, EPS, scales, lnc=lnc)

    def expected(law: Any) -> list[Any]:
        outs, keys, values = [], a.keys.copy(), a.values.copy()
        for b, at in enumerate(zip(*angles, strict=True)):
            places = (at, (keys[b], values[b]), a.positions[b])
            outs.append(law.attention_half(a.x[b], a.norms, weights, *places, EPS, scales or NONE))
        return [np.stack(outs), keys, values]

    return [out.reshape(a.x.shape), *(unpooled(pool, table, dims[5]) for pool in pools)], expected


CASES: dict[str, Callable[..., Case]] = {
    "product fp32": partial(product, 130, 512, 250, "fp32"),
    "product bf16": partial(product, 5, 4096, 250, "bf16"),
    "product fp32 long": partial(product, 300, 4096, 66, "fp32"),
    "product fp8": partial(product, 130, 384, 512, "fp8", first=1),
    "product bf16 head": partial(product, 3, 640, 1001, "bf16"),
    "decode_mlp fp32": partial(mlp_case, decode_mlp, 33, 512, 250, "fp32"),
    "decode_mlp bf16": partial(mlp_case, decode_mlp, 33, 640, 800, "bf16"),
    "decode_mlp fp32 long": partial(mlp_case, decode_mlp, 3, 4096, 64, "fp32"),
    "decode_mlp fp8": partial(mlp_case, decode_mlp, 3, 384, 250, "fp8"),
    "decode_mlp fp8 blocks": partial(mlp_case, decode_mlp, 2, 128, 17408, "fp8"),
    "prompt_mlp fp32": partial(mlp_case, prompt_mlp, 130, 512, 250, "fp32"),
    "prompt_mlp fp32 deep": partial(mlp_case, prompt_mlp, 130, 256, 5200, "fp32"),
    "prompt_mlp fp32 tiles": partial(mlp_case, prompt_mlp, 700, 256, 160, "fp32"),
    "prompt_mlp bf16": partial(mlp_case, prompt_mlp, 131, 256, 160, "bf16"),
    "prompt_mlp fp8": partial(mlp_case, prompt_mlp, 3, 256, 1024, "fp8"),
    "prompt_mlp fp32 long": partial(mlp_case, prompt_mlp, 3, 4096, 64, "fp32"),
    "qkv fp32 long": partial(qkv, 2, 3, 4096, 2, 1, 64, dtype="fp32"),
    "qkv fp32": partial(qkv, 3, 47, 512, 4, 2, 64, dtype="fp32"),
    "qkv bf16": partial(qkv, 1, 515, 256, 2, 1, 600, dtype="bf16"),
    "qkv bf16 blocks": partial(qkv, 1, 300, 256, 3, 3, 320, dtype="bf16"),
    "qkv fp8": partial(qkv, 1, 130, 384, 4, 2, 300, dtype="fp8"),
    "decode fp32": partial(decode, 3, 5, 512, 3, 1, 301, dtype="fp32"),
    "decode bf16": partial(decode, 2, 7, 256, 4, 2, 1100, dtype="bf16"),
    "decode fp32 long": partial(decode, 3, 1, 4096, 2, 1, 150, dtype="fp32"),
    "decode fp8": partial(decode, 3, 5, 384, 4, 2, 301, dtype="fp8"),
    "decode fp32 groups": partial(decode, 2, 3, 256, 2, 1, 3000, dtype="fp32", first=[2997, 2046]),
    "decode bf16 groups": partial(decode, 2, 3, 256, 2, 1, 5000, dtype="bf16", first=[4990, 4095]),
    "verify fp32": partial(verify, 3, 6, 3, 5, 515, 64, "fp32"),
    "verify bf16": partial(verify, 2, 4, 1, 7, 1100, 128, "bf16"),
    "verify bf16 order": partial(verify, 2, 2, 1, 3, 2000, 256, "bf16", first=[1024, 1090], zero=True),
    "verify bf16 block": partial(verify, 3, 4, 2, 6, 700, 64, "bf16", beyond=-2),
    "verify fp32 block": partial(verify, 2, 2, 2, 5, 1100, 128, "fp32", first=[1015, 9], beyond=40),
    "verify fp32 groups": partial(verify, 2, 2, 1, 3, 3000, 256, "fp32", first=[2990, 2046]),
    "verify bf16 groups": partial(verify, 1, 4, 1, 8, 5000, 128, "bf16"),
    "prompt fp32": partial(prompt, 6, 3, 1024, 64, "fp32", start=517, count=256),
    "prompt bf16": partial(prompt, 2, 1, 1024, 128, "bf16", start=300, count=128),
    "prompt bf16 order": partial(prompt, 1, 1, 2048, 256, "bf16", start=1024, count=128, zero=True),
    "prompt fp32 groups": partial(prompt, 1, 1, 3072, 256, "fp32", start=1990, count=128),
    "prompt bf16 groups": partial(prompt, 4, 1, 5120, 64, "bf16", start=4700, count=128),
}
# many row tiles and batches of them, weights that do not stay in SBUF, more than 64 rows of attention
LARGE: dict[str, Callable[..., Case]] = {
    "qkv bf16 rows": partial(qkv, 1, 700, 256, 16, 2, 720, dtype="bf16"),
    "qkv bf16 long": partial(qkv, 5, 100, 4096, 2, 1, 128, dtype="bf16"),
    "qkv fp8 long": partial(qkv, 1, 520, 4096, 6, 2, 540, dtype="fp8"),
    "qkv fp32 long": partial(qkv, 1, 300, 4096, 3, 1, 320, dtype="fp32"),
    "decode bf16 rows": partial(decode, 9, 14, 256, 18, 3, 60, dtype="bf16"),
    "verify bf16 rows": partial(verify, 2, 4, 1, 32, 5200, 256, "bf16"),
    "prompt bf16 rows": partial(prompt, 4, 2, 5120, 128, "bf16", start=3000, count=2048),
    "prompt fp32 rows": partial(prompt, 8, 1, 2048, 256, "fp32", start=900, count=1024),
}


@cache
def case(name: str, lnc: int) -> Case:
    return {**CASES, **LARGE}[name](lnc=lnc)


def random_case(seed: int) -> Case:
    """Any kernel with random dims, positions, dtype and cores."""
    rng = np.random.default_rng(seed)

    def to(last: int) -> int:
        return int(rng.integers(1, last + 1))

    def of(*options: Any) -> Any:
        return options[rng.integers(len(options))]

    kv_heads, per_kv, batch, lnc = to(3), of(1, 2, 5), to(3), to(2)
    heads, count, dtype, any_dtype = kv_heads * per_kv, to(25), of("fp32", "bf16"), of("fp32", "bf16", "fp8")
    hidden, dim, length = of(to(6) * 128, 4096), of(64, 128, 256), of(100, 1100, 2100, 4200) + to(900)
    full = -(-length // 1024) * 1024
    rows = (batch, count, hidden, heads, kv_heads, length)
    return of(
        lambda: verify(batch, heads, kv_heads, count, length, dim, dtype, lnc=lnc, beyond=of(None, 0, -1)),
        lambda: prompt(heads, kv_heads, full, dim, dtype, start=to(full - 256), count=of(128, 256), lnc=lnc),
        lambda: decode(*rows, dtype=any_dtype, lnc=lnc),
        lambda: qkv(*rows, dtype=any_dtype, lnc=lnc),
        lambda: mlp_case(of(decode_mlp, prompt_mlp), to(128), hidden, 32 * to(30), any_dtype, lnc=lnc),
        lambda: product(to(300), hidden, 2 * to(600), any_dtype, lnc=lnc),
    )()
