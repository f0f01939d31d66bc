"""Calling the fused attention half from the host: the tables of angles, checks, then one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import nki
import numpy as np

from nki_kernels.attention.host import Candidates
from nki_kernels.attention.host import check as check_attention
from nki_kernels.layer.attention import decode_attention_kernel
from nki_kernels.layer.checks import check_dtypes, check_lnc, check_rows
from nki_kernels.tiles import BANK, P


@dataclass(frozen=True)
class AttentionWeights:
    """gamma (E,) of the layer's norm, k_norm and q_norm (D,), pack_qkv(q, k, v, D) and pack_out(out, D)."""

    gamma: Any
    k_norm: Any
    q_norm: Any
    qkv: Any
    out: Any


@dataclass(frozen=True)
class Place:
    """Where the rows are: positions (B, N) and block_table (B, S / 128), int32; cos and sin (B, N, D / 2), fp32."""

    positions: Any
    block_table: Any
    cos: Any
    sin: Any


@dataclass(frozen=True)
class _Like:
    shape: tuple[int, ...]
    dtype: Any


def place(positions: Any, block_table: Any, dim: int, theta: float = 1e6) -> Place:
    """The rows' place with Qwen3's angles, position / theta^(2i / D), computed in fp32 as the model does."""
    inverse = np.array([theta ** (-2 * i / dim) for i in range(dim // 2)], np.float32)
    angles = np.asarray(positions)[..., None].astype(np.float32) * inverse
    return Place(positions, block_table, np.cos(angles), np.sin(angles))


def decode_attention(
    x: Any,
    weights: AttentionWeights,
    pools: tuple[Any, Any],
    rows: Place,
    *,
    eps: float = 1e-6,
    lnc: int = 1,
    run: Callable[[Any], Any] = nki.simulate,
) -> Any:
    """A rank's part of attention for x (B, N, E): the partial sum, same shape and dtype.

    The pools of keys and values (blocks, G, 128, D) change in place. `run` makes a launched kernel
    callable: nki.simulate here, the identity on a Trainium machine.

    Raises:
        ValueError: an operand does not fit; nothing was run or written.
    """
    check(x, weights, pools, rows)
    check_lnc(lnc)
    norms, packed = (weights.gamma, weights.k_norm, weights.q_norm), (weights.qkv, weights.out)
    flat, kernel = x.reshape(-1, x.shape[-1]), decode_attention_kernel[lnc]
    rest = (rows.cos, rows.sin, *pools, rows.positions, rows.block_table, eps)
    return run(kernel)(flat, *norms, *packed, *rest).reshape(x.shape)


def check(x: Any, weights: AttentionWeights, pools: tuple[Any, Any], rows: Place) -> None:
    """Refuse operands that the kernel cannot serve, in one sentence each."""
    if len(x.shape) != 3:
        raise ValueError(f"x is {tuple(x.shape)}, (B, N, E) is needed: keep the rows of a sequence together")
    check_rows(x, weights.gamma)
    batch, count, hidden = x.shape
    if len(pools[0].shape) != 4:
        raise ValueError(f"keys are {tuple(pools[0].shape)}, (blocks, G, 128, D) are needed: pass a pool of blocks")
    kv, dim = pools[0].shape[1], pools[0].shape[3]
    if dim != P:
        raise ValueError(f"head dim D is {dim}, the fused kernel serves {P}: use verify_attention for this model")
    heads = _heads(weights, hidden, kv, dim)
    new = _Like((batch, kv, count, dim), x.dtype)
    candidates = Candidates(rows.positions, block_table=rows.block_table)
    check_attention(_Like((batch, heads, count, dim), x.dtype), (new, new), pools, candidates)
    check_dtypes(x, weights.gamma, weights.k_norm, weights.q_norm, weights.qkv, weights.out)
    for name, table in (("cos", rows.cos), ("sin", rows.sin)):
        if tuple(table.shape) != (batch, count, dim // 2) or "float32" not in str(table.dtype):
            raise ValueError(
                f"{name} is {table.dtype} {tuple(table.shape)}, float32 {(batch, count, dim // 2)} is needed: "
                "make it with place"
            )


def _heads(weights: AttentionWeights, hidden: int, kv: int, dim: int) -> int:
    """The query heads that the weights hold."""
    for name, norm in (("k_norm", weights.k_norm), ("q_norm", weights.q_norm)):
        if tuple(norm.shape) != (dim,):
            raise ValueError(f"{name} is {tuple(norm.shape)}, ({dim},) is needed: one number per head dimension")
    qkv, out = tuple(weights.qkv.shape), tuple(weights.out.shape)
    heads = qkv[0] * qkv[2] // dim - 2 * kv if len(qkv) == 3 else 0
    if heads < 1 or heads % kv or qkv[1] != hidden or qkv[2] % dim or qkv[2] > BANK:
        raise ValueError(
            f"qkv is {qkv} for {kv} kv heads of {dim}, blocks ({hidden}, heads * {dim}) are needed: "
            "make it with pack_qkv from the checkpoint's (out, in)"
        )
    if len(out) != 3 or out[1] != heads * dim or out[0] * out[2] != hidden or out[2] > BANK:
        raise ValueError(
            f"out is {out} for {heads} heads of {dim}, blocks ({heads * dim}, C) of {hidden} columns are needed: "
            "make it with pack_out from the checkpoint's (out, in)"
        )
    return heads
