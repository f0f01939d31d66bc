"""Reference verification attention: append the rows' keys and values, then attend from the cache.

Keys are taken in tiles aligned to absolute position, in ascending order, with the sums rescaled where a tile raises the
largest score (online softmax: Milakov, Gimelshein, arXiv 1805.02867). A tile that a row cannot see multiplies its sums
by 1 and adds zeros, so a row's result depends on its own position and the cache alone: not on the number of rows beside
it, nor on the bucket.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model.cache import Cache, Placement
from model.ops import EAGER, Ops, State, iota

KEY_TILE = 128
# of finite scores: without a visible key -inf - (-inf) would be NaN, a finite lowest score gives weights of 0
LOWEST = torch.finfo(torch.float32).min


def verify_attention(
    ops: Ops, q_BHND: Tensor, new: tuple[Tensor, Tensor], cache: Cache, placement: Placement
) -> tuple[Tensor, Cache]:
    """Attention of N rows per sequence over the cache, with the rows themselves written first.

    q (B, H, N, D) after the rotation; new keys and values (B, G, N, D); cache (slots, G, S, D), or a
    pool (P, G, 128, D).
    Returns (B, H, N, D) in q's dtype and the updated cache. Softmax in fp32. H is a multiple of G;
    query head h reads kv head h // (H / G).
    """
    cache = append(ops, new, cache, placement)
    return attended(q_BHND, cache, placement, ops).reshape(q_BHND.shape).to(q_BHND.dtype), cache


def append(ops: Ops, new: tuple[Tensor, Tensor], cache: Cache, placement: Placement) -> Cache:
    """The cache with the rows' keys and values at their places: of their slots, or of their blocks."""
    slots_B, places_BN, table_BL = placement.slots_B, placement.positions_BN, placement.table_BL
    if table_BL is None:
        slots_BN = (iota(len(places_BN), places_BN) if slots_B is None else slots_B)[:, None]
    else:
        slots_BN, places_BN = _in_blocks(table_BL, places_BN)
    return Cache(*(ops.append(c, n, slots_BN, places_BN) for c, n in zip(cache, new, strict=True)))


def _in_blocks(table_BL: Tensor, positions_BN: Tensor) -> tuple[Tensor, Tensor]:
    """(B, N) each row's block and its place there, behind the block's end where there is none."""
    tiles_BN, count = positions_BN // KEY_TILE, table_BL.shape[1]
    blocks_BN = table_BL[iota(table_BL.shape[0], table_BL)[:, None], tiles_BN.clamp(0, count - 1)]
    held_BN = (tiles_BN >= 0) & (tiles_BN < count) & (blocks_BN > 0)
    return blocks_BN, torch.where(held_BN, positions_BN % KEY_TILE, KEY_TILE)


def attended(q_BHND: Tensor, cache: Cache, placement: Placement, ops: Ops = EAGER) -> Tensor:
    """(B, G, R, D) fp32: attention of the R = (H / G) x N rows of each kv head over the cache."""
    rows = _rows(q_BHND, cache, placement)
    if placement.table_BL is not None:
        return ops.shared(attend_blocks, *rows, *cache, placement.table_BL)

    def tile(tile_1: Tensor) -> list[Tensor]:
        of_slots = (c.index_select(2, tile_1 * KEY_TILE + iota(KEY_TILE, tile_1)) for c in cache)
        return [c if placement.slots_B is None else c[placement.slots_B] for c in of_slots]

    return _over_tiles(ops, *rows, tile)


def attend_blocks(
    ops: Ops, q_BGRD: Tensor, last_BR: Tensor, keys_TK: Tensor, k_PGKD: Tensor, v_PGKD: Tensor, table_BL: Tensor
) -> Tensor:
    """(B, G, R, D) fp32: attention of rows that see the keys up to `last_BR`, over pools of blocks.

    A graph has a function of this name, and so have those of bundles that were built before: what it computes may not
    change but in its rounding. On a CPU `trnspec/runtime/block_attention.py` takes its place.
    """

    def tile(tile_1: Tensor) -> list[Tensor]:
        return [c[table_BL.index_select(1, tile_1)[:, 0]] for c in (k_PGKD, v_PGKD)]

    return _over_tiles(ops, q_BGRD, last_BR, keys_TK, tile)


def _rows(q_BHND: Tensor, cache: Cache, placement: Placement) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of each kv head (B, G, R, D), the last position that each sees (B, R), and the tiles of keys."""
    batch, heads, count, dim = q_BHND.shape
    group = heads // cache.k.shape[1]
    last_BN = placement.positions_BN if placement.last_B1 is None else placement.last_B1.expand(-1, count)
    last_BR = last_BN[:, None].expand(-1, group, -1).flatten(1)
    return q_BHND.reshape(batch, -1, group * count, dim).float(), last_BR, placement.keys_S.unflatten(0, (-1, KEY_TILE))


def _over_tiles(
    ops: Ops, q_BGRD: Tensor, last_BR: Tensor, keys_TK: Tensor, tile: Callable[[Tensor], list[Tensor]]
) -> Tensor:
    """(B, G, R, D) fp32: attention; `tile` returns each sequence's keys and values (B, G, 128, D) of a tile."""
    q_BGRD = q_BGRD * q_BGRD.shape[-1] ** -0.5

    def add(state: State) -> State:
        tile_1, out_BGRD, total_BGR, best_BGR = state
        k_BGKD, v_BGKD = tile(tile_1)
        # summed in fp32, as the matrix engine does
        scores = torch.einsum("bgrd,bgkd->bgrk", q_BGRD, k_BGKD.float())
        visible = keys_TK.index_select(0, tile_1) <= last_BR[:, None, :, None]
        scores = torch.where(visible, scores, float("-inf"))
        higher_BGR = torch.maximum(best_BGR, scores.amax(-1))
        from_BGR1 = higher_BGR.clamp(min=LOWEST)[..., None]
        weights, kept_BGR1 = torch.exp(scores - from_BGR1), torch.exp(best_BGR[..., None] - from_BGR1)
        more_BGRD = torch.einsum("bgrk,bgkd->bgrd", weights.to(v_BGKD.dtype).float(), v_BGKD.float())
        total_BGR = total_BGR * kept_BGR1[..., 0] + weights.sum(-1)
        return tile_1 + 1, out_BGRD * kept_BGR1 + more_BGRD, total_BGR, higher_BGR

    nothing = torch.zeros_like(q_BGRD)
    begin = iota(1, q_BGRD), nothing, nothing[..., 0], torch.full_like(nothing[..., 0], float("-inf"))
    _, out_BGRD, total_BGR, _ = ops.repeat(len(keys_TK), add, begin)
    return out_BGRD / total_BGR[..., None]
