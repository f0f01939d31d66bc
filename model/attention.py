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
from model.ops import Ops, iota

KEY_TILE = 128
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
    out_BGRD, total_BGR, _ = weighted(q_BHND, cache, placement)
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


def weighted(q_BHND: Tensor, cache: Cache, placement: Placement) -> tuple[Tensor, Tensor, Tensor]:
    """The values' weighted sum (B, G, R, D) of the rows, the weights' sum and the largest score (B, G, R), all fp32.

    R are the (H / G) x N rows of a kv head. A row that sees no key has sums of 0 and the largest score -inf.
    """
    k_BGTKD, v_BGTKD = (_tiles(c, placement) for c in cache)
    group = q_BHND.shape[1] // k_BGTKD.shape[1]
    q_BGRD = q_BHND.reshape(q_BHND.shape[0], -1, group * q_BHND.shape[2], q_BHND.shape[3])
    position_BR = placement.positions_BN[:, None].expand(-1, group, -1).flatten(1)
    keys_TK = placement.keys_S.unflatten(0, (-1, KEY_TILE))
    return _weighted(q_BGRD, k_BGTKD, v_BGTKD, keys_TK[:, None] <= position_BR[:, None, None, :, None])


def in_order(pool_PGSD: Tensor, table_BL: Tensor) -> Tensor:
    """(B, G, 128 L, D) the blocks of each sequence, side by side."""
    return pool_PGSD[table_BL].transpose(1, 2).flatten(2, 3)


def _tiles(cache_BGSD: Tensor, placement: Placement) -> Tensor:
    """(B, G, T, 128, D) the tiles of each sequence's bucket."""
    if placement.table_BL is not None:
        return cache_BGSD[placement.table_BL].transpose(1, 2)
    if placement.slots_B is not None:
        cache_BGSD = cache_BGSD[placement.slots_B]
    return cache_BGSD[:, :, : placement.keys_S.shape[0]].unflatten(2, (-1, KEY_TILE))


def _weighted(q_BGRD: Tensor, k_BGTKD: Tensor, v_BGTKD: Tensor, seen_BGTRK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q_BGTRD = q_BGRD.float().unsqueeze(2).expand(-1, -1, k_BGTKD.shape[2], -1, -1)
    # products of the cache's dtype, summed in fp32, as the matrix engine does
    scores = torch.einsum("bgtrd,bgtkd->bgtrk", q_BGTRD, k_BGTKD.float()) * q_BGRD.shape[-1] ** -0.5
    scores = torch.where(seen_BGTRK, scores, float("-inf"))
    best_BG1R1 = scores.amax(-1, keepdim=True).amax(2, keepdim=True)
    # without a visible key -inf - (-inf) would be NaN: a finite lowest score gives weights of 0
    weights = torch.exp(scores - best_BG1R1.clamp(min=_LOWEST))
    out_BGTRD = torch.einsum("bgtrk,bgtkd->bgtrd", weights.to(v_BGTKD.dtype).float(), v_BGTKD.float())
    sum_BGTR = weights.sum(-1)
    out, total = out_BGTRD[:, :, 0], sum_BGTR[:, :, 0]
    for t in range(1, sum_BGTR.shape[2]):
        out, total = out + out_BGTRD[:, :, t], total + sum_BGTR[:, :, t]
    return out, total, best_BG1R1[:, :, 0, :, 0]
