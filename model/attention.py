"""Reference verification attention: append the rows' keys and values, then attend from the cache.

Keys are taken in tiles aligned to absolute position and summed in ascending order; the maximum,
which is exact in any order, comes first. A tile that a row cannot see adds zeros, so a row's
result depends on its own position and the cache alone: not on the number of rows beside it, nor
on the bucket.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.cache import Cache, Placement
from model.ops import EAGER, Ops, State, iota

KEY_TILE = 128
# a graph adds so many tiles one by one, and more in a loop: 8192 positions
UNROLLED = 64
_LOWEST = torch.finfo(torch.float32).min


def verify_attention(
    ops: Ops, q_BHND: Tensor, new: tuple[Tensor, Tensor], cache: Cache, placement: Placement
) -> tuple[Tensor, Cache]:
    """Attention of N rows per sequence over the cache, with the rows themselves written first.

    q (B, H, N, D) after the rotation; new keys and values (B, G, N, D); cache (slots, G, S, D), or a
    pool (P, G, 128, D).
    Returns (B, H, N, D) in q's dtype and the updated cache. Softmax in fp32. H is a multiple of G;
    query head h reads kv head h // (H / G).
    """
    cache = append(ops, new, cache, placement, placement.positions_BN)
    out_BGRD, total_BGR, _ = weighted(q_BHND, cache, placement, ops)
    o_BGRD = out_BGRD / total_BGR[..., None]
    return o_BGRD.reshape(q_BHND.shape).to(q_BHND.dtype), cache


def append(ops: Ops, new: tuple[Tensor, Tensor], cache: Cache, placement: Placement, places_BN: Tensor) -> Cache:
    """The cache with the rows' keys and values at these places of their slots, or of their blocks."""
    if placement.table_BL is None:
        slots = iota(places_BN.shape[0], places_BN) if placement.slots_B is None else placement.slots_B
        slots_BN = slots[:, None]
    else:
        slots_BN, places_BN = _in_blocks(placement.table_BL, places_BN)
    return Cache(*(ops.append(c, n, slots_BN, places_BN) for c, n in zip(cache, new, strict=True)))


def _in_blocks(table_BL: Tensor, positions_BN: Tensor) -> tuple[Tensor, Tensor]:
    """(B, N) each row's block and its place there, behind the block's end where there is none."""
    tiles_BN, count = positions_BN // KEY_TILE, table_BL.shape[1]
    blocks_BN = table_BL[iota(table_BL.shape[0], table_BL)[:, None], tiles_BN.clamp(0, count - 1)]
    held_BN = (tiles_BN >= 0) & (tiles_BN < count) & (blocks_BN > 0)
    return blocks_BN, torch.where(held_BN, positions_BN % KEY_TILE, KEY_TILE)


def weighted(q_BHND: Tensor, cache: Cache, placement: Placement, ops: Ops = EAGER) -> tuple[Tensor, Tensor, Tensor]:
    """The values' weighted sum (B, G, R, D) of the rows, the weights' sum and the largest score (B, G, R), all fp32.

    R are the (H / G) x N rows of a kv head. A row that sees no key has sums of 0 and the largest score -inf.
    """
    k_BGSD, v_BGSD = (_seen(c, placement) for c in cache)
    batch, heads, count, dim = q_BHND.shape
    group = heads // k_BGSD.shape[1]
    q_BGRD = q_BHND.reshape(batch, -1, group * count, dim)
    last_BN = placement.positions_BN if placement.last_B1 is None else placement.last_B1.expand(-1, count)
    last_BR = last_BN[:, None].expand(-1, group, -1).flatten(1)
    return _weighted(ops, (q_BGRD, k_BGSD, v_BGSD), placement.keys_S <= last_BR[:, None, :, None])


def in_order(pool_PGSD: Tensor, table_BL: Tensor) -> Tensor:
    """(B, G, 128 L, D) the blocks of each sequence, side by side."""
    return pool_PGSD[table_BL].transpose(1, 2).flatten(2, 3)


def _seen(cache_BGSD: Tensor, placement: Placement) -> Tensor:
    if placement.table_BL is not None:
        return in_order(cache_BGSD, placement.table_BL)
    if placement.slots_B is not None:
        cache_BGSD = cache_BGSD[placement.slots_B]
    return cache_BGSD[:, :, : placement.keys_S.shape[0]]


def _weighted(ops: Ops, operands: tuple[Tensor, Tensor, Tensor], visible_BGRS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q_BGRD, k_BGSD, v_BGSD = operands
    # products of the cache's dtype, summed in fp32, as the matrix engine does
    scores = torch.einsum("bgrd,bgsd->bgrs", q_BGRD.float(), k_BGSD.float()) * q_BGRD.shape[-1] ** -0.5
    scores = torch.where(visible_BGRS, scores, float("-inf"))
    best_BGR1 = scores.amax(-1, keepdim=True)
    # without a visible key -inf - (-inf) would be NaN: a finite lowest score gives weights of 0
    weights = torch.exp(scores - best_BGR1.clamp(min=_LOWEST)).unflatten(-1, (-1, KEY_TILE))
    tiles_v = v_BGSD.unflatten(2, (-1, KEY_TILE)).float()
    rounded = weights.to(v_BGSD.dtype).float()
    out_BGTRD = torch.einsum("bgrtk,bgtkd->bgtrd", rounded, tiles_v)
    out_BGRD, total_BGR = _added(ops, out_BGTRD, weights.sum(-1))
    return out_BGRD, total_BGR, best_BGR1[..., 0]


def _added(ops: Ops, out_BGTRD: Tensor, sum_BGRT: Tensor) -> tuple[Tensor, Tensor]:
    """The sums over the tiles in ascending order: (B, G, R, D) and (B, G, R)."""
    out, total, tiles = out_BGTRD[:, :, 0], sum_BGRT[..., 0], sum_BGRT.shape[-1]
    if tiles <= UNROLLED:
        for t in range(1, tiles):
            out, total = out + out_BGTRD[:, :, t], total + sum_BGRT[..., t]
        return out, total

    def add(state: State) -> State:
        t_1, out, total = state
        part, more = out_BGTRD.index_select(2, t_1)[:, :, 0], sum_BGRT.index_select(3, t_1)[..., 0]
        return t_1 + 1, out + part, total + more

    _, out, total = ops.repeat(tiles - 1, add, (iota(1, out) + 1, out, total))
    return out, total
