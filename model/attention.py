"""Reference verification attention: append the rows' keys and values, then attend from the cache.

Keys are taken in tiles aligned to absolute position and summed in ascending order; the maximum,
which is exact in any order, comes first. A tile that a row cannot see adds zeros, so a row's
result depends on its own position and the cache alone: not on how many rows stand beside it, nor
on the bucket.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.cache import Cache, Placement
from model.ops import Ops

KEY_TILE = 128
_LOWEST = torch.finfo(torch.float32).min


def verify_attention(
    ops: Ops, q_BHND: Tensor, new: tuple[Tensor, Tensor], cache: Cache, placement: Placement
) -> tuple[Tensor, Cache]:
    """Attention of N rows per sequence over the cache, with the rows themselves written first.

    q (B, H, N, D) after the rotation; new keys and values (B, G, N, D); cache (slots, G, S, D).
    Returns (B, H, N, D) in q's dtype and the updated cache. Softmax in fp32. H is a multiple of G;
    query head h reads kv head h // (H / G).
    """
    cache = append(ops, new, cache, placement, placement.positions_BN)
    out_BGRD, total_BGR, _ = weighted(q_BHND, cache, placement)
    o_BGRD = out_BGRD / total_BGR[..., None]
    return o_BGRD.reshape(q_BHND.shape).to(q_BHND.dtype), cache


def append(ops: Ops, new: tuple[Tensor, Tensor], cache: Cache, placement: Placement, places_BN: Tensor) -> Cache:
    """The cache with the rows' keys and values at these places of their slots."""
    slots = placement.slots_B
    if slots is None:
        slots = torch.arange(places_BN.shape[0], dtype=torch.int32, device=places_BN.device)
    return Cache(*(ops.append(c, n, slots, places_BN) for c, n in zip(cache, new, strict=True)))


def weighted(q_BHND: Tensor, cache: Cache, placement: Placement) -> tuple[Tensor, Tensor, Tensor]:
    """The values' weighted sum (B, G, R, D) of the rows, the weights' sum and the largest score (B, G, R), all fp32.

    R are the (H / G) x N rows of a kv head. A row that sees no key has sums of 0 and the largest score -inf.
    """
    k_BGSD, v_BGSD = (_seen(c, placement) for c in cache)
    batch, heads, count, dim = q_BHND.shape
    group = heads // k_BGSD.shape[1]
    q_BGRD = q_BHND.reshape(batch, -1, group * count, dim)
    position_BR = placement.positions_BN[:, None].expand(-1, group, -1).flatten(1)
    return _weighted(q_BGRD, k_BGSD, v_BGSD, placement.keys_S <= position_BR[:, None, :, None])


def _seen(cache_BGSD: Tensor, placement: Placement) -> Tensor:
    if placement.slots_B is not None:
        cache_BGSD = cache_BGSD[placement.slots_B]
    return cache_BGSD[:, :, : placement.keys_S.shape[0]]


def _weighted(q_BGRD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, visible_BGRS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scores = masked_scores(q_BGRD, k_BGSD, visible_BGRS)
    best_BGR1 = scores.amax(-1, keepdim=True)
    out, total = in_order(*tile_sums(scores, best_BGR1, v_BGSD))
    return out, total, best_BGR1[..., 0]


def masked_scores(q_BGRD: Tensor, k_BGSD: Tensor, visible_BGRS: Tensor) -> Tensor:
    """(B, G, R, S) fp32, -inf where a row does not see a key."""
    # products of the cache's dtype, summed in fp32, as the matrix engine does
    scores = torch.einsum("bgrd,bgsd->bgrs", q_BGRD.float(), k_BGSD.float()) * q_BGRD.shape[-1] ** -0.5
    return torch.where(visible_BGRS, scores, float("-inf"))


def tile_sums(scores_BGRS: Tensor, best_BGR1: Tensor, v_BGSD: Tensor) -> tuple[Tensor, Tensor]:
    """Of each tile of keys the values' weighted sum (B, G, T, R, D) and the weights' sum (B, G, R, T)."""
    # without a visible key -inf - (-inf) would be NaN: a finite lowest score gives weights of 0
    weights = torch.exp(scores_BGRS - best_BGR1.clamp(min=_LOWEST)).unflatten(-1, (-1, KEY_TILE))
    tiles_v = v_BGSD.unflatten(2, (-1, KEY_TILE)).float()
    rounded = weights.to(v_BGSD.dtype).float()
    return torch.einsum("bgrtk,bgtkd->bgtrd", rounded, tiles_v), weights.sum(-1)


def in_order(out_BGTRD: Tensor, sum_BGRT: Tensor, before: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """The tiles' sums added to what came `before`, in ascending order."""
    out, total = before or (out_BGTRD[:, :, 0], sum_BGRT[..., 0])
    for t in range(before is None, sum_BGRT.shape[-1]):
        out, total = out + out_BGTRD[:, :, t], total + sum_BGRT[..., t]
    return out, total
