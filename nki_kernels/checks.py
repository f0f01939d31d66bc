"""The host's refusals before a launch, one sentence each: what was given, what is supported, what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nki_kernels.limits import CHUNK, attention_misfit
from nki_kernels.tiles import BANK, P

# makes a launched kernel callable: nki.simulate on a CPU, the identity on a Trainium machine
Run = Callable[[Any], Any]
FLOATS = ("float32", "bfloat16")
HEAD_DIMS = (64, 128)
# the transposed rows of 128 x 8192 elements and their squares leave room in SBUF for the weight stream
MAX_HIDDEN = 8192


def refuse(condition: bool, sentence: str) -> None:
    """Raise ValueError with the sentence if the condition holds."""
    if condition:
        raise ValueError(sentence)


def dtype_of(array: Any) -> str:
    """The name of a dtype, of numpy or torch."""
    return str(array.dtype).removeprefix("torch.")


def cores(lnc: int) -> int:
    """The number of cores of a launch."""
    refuse(lnc not in (1, 2), f"lnc is {lnc}, 1 or 2 cores share a launch on trn2: pass one of them")
    return lnc


def check(
    name: str, array: Any, shape: tuple[int, ...], kinds: tuple[str, ...] = FLOATS, remedy: str = "reshape or convert it"
) -> None:
    """Refuse an operand of another shape or dtype."""
    if tuple(array.shape) != tuple(shape) or dtype_of(array) not in kinds:
        raise ValueError(
            f"{name} is {dtype_of(array)} {tuple(array.shape)}, {' or '.join(kinds)} {tuple(shape)} is needed: {remedy}"
        )


def check_rank(name: str, array: Any, axes: str) -> tuple[int, ...]:
    """The shape of an operand whose axes are named."""
    shape = tuple(array.shape)
    refuse(len(shape) != len(axes.split(", ")), f"{name} is {shape}, ({axes}) is needed: add or flatten axes")
    return shape


def check_floats(*arrays: Any) -> None:
    """All float32 or all bfloat16."""
    names = {dtype_of(a) for a in arrays}
    refuse(
        len(names) > 1 or not names <= set(FLOATS),
        f"dtypes are {', '.join(sorted(names))}, all float32 or all bfloat16 is needed: convert the operands",
    )


def check_paged(
    pools: tuple[Any, Any], dim: int, rows: tuple[int, int, int], block_table: Any, unit: int = CHUNK
) -> int:
    """The kv heads of pools and a block table that serve B sequences of H heads and N rows, `rows`."""
    batch, heads, count = rows
    refuse(dim not in HEAD_DIMS, f"head dim D is {dim}, 64 and 128 are served: use the reference for this model")
    pages, kv_heads, page, _ = shape = check_rank("pool of keys", pools[0], "pages, G, 128, D")
    if tuple(pools[1].shape) != shape or shape[2:] != (P, dim) or heads % kv_heads:
        raise ValueError(
            f"pools are {shape} and {tuple(pools[1].shape)}, both (pages, G, {P}, {dim}) with H = {heads} a multiple "
            "of G are needed: keys are not transposed in pages"
        )
    table = np.asarray(block_table)
    if table.ndim != 2 or table.shape[0] != batch or table.dtype != np.int32 or table.shape[1] * P % unit or not table.size:
        raise ValueError(
            f"block_table is {table.dtype} {table.shape}, int32 ({batch}, S / {P}) with S a multiple of {unit} is "
            "needed: fill it with page 0"
        )
    refuse(
        table.min() < 0 or table.max() >= pages,
        f"block_table names pages {table.min()} to {table.max()}, 0 to {pages - 1} exist: fill unused entries with page 0",
    )
    misfit = attention_misfit(batch, heads // kv_heads * count, table.shape[1] * P, pages * kv_heads * P)
    refuse(bool(misfit), misfit)
    return kv_heads


def check_rows(x: Any, gamma: Any) -> None:
    """x is (..., E) with 1 to 128 rows, gamma (E,), E a multiple of 128."""
    shape = tuple(x.shape)
    rows, hidden = math.prod(shape[:-1]), shape[-1] if shape else 0
    refuse(
        len(shape) < 2 or not 1 <= rows <= P, f"x is {shape}, (..., E) with 1 to {P} rows is needed: split the batch"
    )
    refuse(
        hidden % P > 0 or not P <= hidden <= MAX_HIDDEN,
        f"E is {hidden}, a multiple of {P} up to {MAX_HIDDEN} is needed: use the reference for this model",
    )
    check("gamma", gamma, (hidden,), remedy="pass the norm of this layer")


def check_packed(name: str, tensor: Any, depth: int, features: int | None, packed_by: str) -> None:
    """A packed weight (blocks, K, C) of K = depth and blocks * C = features."""
    shape = tuple(tensor.shape)
    good = len(shape) == 3 and shape[1] == depth and shape[2] <= BANK and features in (None, shape[0] * shape[2])
    refuse(
        not good,
        f"{name} is {shape}, blocks (K, C) = ({depth}, at most {BANK}) of {features or 'all'} columns are needed: make "
        f"it with {packed_by}",
    )


def check_mlp(x: Any, gamma: Any, weights: tuple[Any, Any]) -> None:
    """gate_up is (blocks, E, 2 C) with an even number of blocks, down (blocks, I, C); all of one dtype."""
    (gate_up, down), hidden = weights, x.shape[-1]
    check("gamma", gamma, (hidden,), remedy="pass the norm of this layer")
    check_packed("gate_up", gate_up, hidden, None, "pack_gate_up")
    blocks, _, columns = gate_up.shape
    refuse(blocks % 2 + columns % 2 > 0, f"gate_up is {tuple(gate_up.shape)}, blocks and columns are even: use pack_gate_up")
    check_packed("down", down, blocks * columns // 2, hidden, "pack")
    check_floats(x, gamma, *weights)
