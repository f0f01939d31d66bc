"""Calling verification attention from the host: checks first, then one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import nki
import numpy as np

from nki_kernels.attention.blocks import BLOCK
from nki_kernels.attention.paged import verify_attention_paged_kernel
from nki_kernels.attention.verify import verify_attention_kernel
from nki_kernels.limits import CANDIDATES, CHUNK, SEQUENCES
from nki_kernels.tiles import P

DIMS = (64, 128)
MAX_SLOTS = 1 << 17
# addresses are computed in fp32, which is exact up to here
MAX_ADDRESS = 1 << 24


@dataclass(frozen=True)
class Candidates:
    """Where a step's candidate rows are: positions (B, N) int32, whose first column is the slot of row 0.

    `ancestors` (B, N) int32 makes the rows a tree: bit j of ancestors[b, n] lets row n see candidate j.
    `block_table` (B, S / 128) int32, filled up to whole chunks of 1024 positions, makes the cache a pool of blocks;
    rows without a block are dropped.
    """

    positions: Any
    ancestors: Any = None
    block_table: Any = None


def verify_attention(
    q: Any,
    new: tuple[Any, Any],
    cache: tuple[Any, Any],
    candidates: Candidates,
    *,
    with_lse: bool = False,
    lnc: int = 1,
    run: Callable[[Any], Any] = nki.simulate,
) -> Any:
    """Append new keys and values (B, G, N, D) to the cache and attend q (B, H, N, D) from it.

    The cache is (keys (B, G, D, S), values (B, G, S, D)), or with a block table pools (blocks, G, 128, D) of both;
    it changes in place. Returns out (B, H, N, D) in q's dtype, and with `with_lse` also lse (B, H, N) fp32.
    `run` makes a launched kernel callable: nki.simulate here, the identity on a Trainium machine.

    Raises:
        ValueError: an operand does not fit; nothing was run or written.
    """
    check(q, new, cache, candidates)
    if lnc not in (1, 2):
        raise ValueError(f"lnc is {lnc}, 1 or 2 cores share a launch on trn2: pass one of them")
    if candidates.block_table is None:
        arguments = (q, *new, *cache, candidates.positions, candidates.ancestors, with_lse)
        return run(verify_attention_kernel[lnc])(*arguments)
    arguments = (q, *new, *cache, candidates.positions, candidates.block_table, candidates.ancestors, with_lse)
    return run(verify_attention_paged_kernel[lnc])(*arguments)


def check(q: Any, new: tuple[Any, Any], cache: tuple[Any, Any], candidates: Candidates) -> None:
    """Refuse operands that the kernels cannot serve, in one sentence each."""
    if len(q.shape) != 4:
        raise ValueError(f"q has shape {tuple(q.shape)}, (B, H, N, D) is needed: add the missing axes")
    batch, heads, count, dim = q.shape
    _check_dims(batch, count, dim)
    if len(new[0].shape) != 4 or tuple(new[0].shape) != tuple(new[1].shape):
        raise ValueError(
            f"new keys are {tuple(new[0].shape)} and values {tuple(new[1].shape)}, both are (B, G, N, D): "
            "pass them before any transpose"
        )
    kv_heads = new[0].shape[1]
    if (new[0].shape[0], *new[0].shape[2:]) != (batch, count, dim) or heads % kv_heads:
        raise ValueError(
            f"new keys are {tuple(new[0].shape)} for q {tuple(q.shape)}, (B, G, N, D) with H a multiple of G "
            "is needed: pass the rows of the same pass"
        )
    if heads // kv_heads * count > P:
        raise ValueError(
            f"a kv head has {heads // kv_heads} heads x {count} rows, {P} rows fit the partitions: "
            "split the heads over more ranks or lower k"
        )
    check_dtypes(q, (*new, *cache))
    if candidates.block_table is None:
        slots = _contiguous_slots(cache, new[0])
    else:
        slots = _paged_slots(cache, candidates, new[0])
    _check_candidates(candidates, (batch, count), slots)


def _check_dims(batch: int, count: int, dim: int) -> None:
    if dim not in DIMS:
        raise ValueError(f"head dim D is {dim}, the kernel serves 64 and 128: use the reference for this model")
    if not 1 <= count <= CANDIDATES:
        raise ValueError(f"N is {count} rows per sequence, 1 to {CANDIDATES} are served: lower k")
    if not 1 <= batch <= SEQUENCES:
        raise ValueError(f"B is {batch} sequences, 1 to {SEQUENCES} are served: split the batch")


def check_dtypes(q: Any, others: tuple[Any, ...]) -> None:
    """All float32 or all bfloat16."""
    names = {str(x.dtype).removeprefix("torch.") for x in (q, *others)}
    if len(names) > 1 or not names <= {"float32", "bfloat16"}:
        raise ValueError(
            f"dtypes are {', '.join(sorted(names))}, all float32 or all bfloat16 is needed: "
            "convert q, new rows and cache"
        )


def _contiguous_slots(cache: tuple[Any, Any], new: Any) -> int:
    batch, kv_heads, _, dim = new.shape
    keys, values = tuple(cache[0].shape), tuple(cache[1].shape)
    slots = values[2] if len(values) == 4 else 0
    if keys != (batch, kv_heads, dim, slots) or values != (batch, kv_heads, slots, dim):
        raise ValueError(
            f"the cache is keys {keys} and values {values}, keys (B, G, D, S) = {(batch, kv_heads, dim, 'S')} and "
            f"values (B, G, S, D) = {(batch, kv_heads, 'S', dim)} are needed: transpose the keys"
        )
    _check_slots(slots, batch * kv_heads * slots)
    return slots


def _paged_slots(cache: tuple[Any, Any], candidates: Candidates, new: Any) -> int:
    batch, kv_heads, _, dim = new.shape
    pool, table = tuple(cache[0].shape), np.asarray(candidates.block_table)
    if tuple(cache[1].shape) != pool or len(pool) != 4 or pool[1:] != (kv_heads, BLOCK, dim):
        raise ValueError(
            f"pools are {pool} and {tuple(cache[1].shape)}, both (blocks, {kv_heads}, {BLOCK}, {dim}) are needed: "
            "keys are not transposed in blocks"
        )
    slots = table.shape[-1] * BLOCK
    if table.ndim != 2 or table.shape[0] != batch or table.dtype != np.int32 or slots % CHUNK:
        raise ValueError(
            f"the block table is {table.dtype} {table.shape}, int32 ({batch}, S / {BLOCK}) with S a multiple of "
            f"{CHUNK} is needed: fill it with block 0"
        )
    if table.min() < 0 or table.max() >= pool[0]:
        raise ValueError(
            f"the block table names block {int(table.min() if table.min() < 0 else table.max())}, "
            f"0 to {pool[0] - 1} exist: fill unused entries with block 0"
        )
    _check_slots(slots, pool[0] * kv_heads * BLOCK)
    return int(slots)


def _check_slots(slots: int, addresses: int) -> None:
    if not 1 <= slots <= MAX_SLOTS:
        raise ValueError(f"S is {slots} slots per sequence, 1 to {MAX_SLOTS} are served: shorten the context")
    if addresses >= MAX_ADDRESS:
        raise ValueError(
            f"the cache has {addresses} rows, fewer than {MAX_ADDRESS} can be addressed: split the batch or the pages"
        )


def _check_candidates(candidates: Candidates, shape: tuple[int, int], slots: int) -> None:
    for name, table in (("positions", candidates.positions), ("ancestors", candidates.ancestors)):
        if table is not None and (tuple(table.shape) != shape or "int32" not in str(table.dtype)):
            raise ValueError(f"{name} are {table.dtype} {tuple(table.shape)}, int32 (B, N) = {shape} is needed")
    positions = np.asarray(candidates.positions)
    base, count = positions[:, 0], shape[1]
    # in blocks rows outside are dropped
    outside = ((base < 0) | (base + count > slots)) & (candidates.block_table is None)
    for b in np.flatnonzero(outside):
        raise ValueError(
            f"sequence {b} writes slots {base[b]} to {base[b] + count - 1}, its cache ends at {slots - 1}: "
            "allocate a longer cache or end the sequence"
        )
    if candidates.ancestors is None:
        if not np.array_equal(positions, base[:, None] + np.arange(count)):
            raise ValueError("positions of a chain are consecutive, these are not: pass ancestors for a tree")
        return
    own = np.asarray(candidates.ancestors) >> np.arange(count) & 1
    if not own.all():
        raise ValueError("a row of the tree does not see itself: set bit n of ancestors[b, n]")
