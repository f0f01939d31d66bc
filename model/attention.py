"""Reference paged attention: append the rows' keys and values, then attend from the cache.

Blocks of keys are taken in ascending order of position, with the sums rescaled where a block raises the largest score
(online softmax: Milakov, Gimelshein, arXiv 1805.02867). A block that a row cannot see multiplies its sums by 1 and adds
zeros, so a row's result depends on its position and the cache only: not on the number of rows, nor on the bucket.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.cache import AttentionMetadata, Cache
from model.ops import EAGER, Ops, State, iota, ordered_sum

KEY_TILE = 128
# -inf - -inf is NaN where a row has seen no key yet
LOWEST = torch.finfo(torch.float32).min


def verify_attention(
    ops: Ops, q_BHND: Tensor, new: tuple[Tensor, Tensor], cache: Cache, meta: AttentionMetadata
) -> tuple[Tensor, Cache]:
    """Attention of N rows per sequence over the cache, with the rows themselves written first.

    q (B, H, N, D) after the rotation; new keys and values (B, G, N, D); cache (P, G, 128, D).
    Returns (B, H, N, D) in q's dtype and the updated cache. Softmax in fp32. H is a multiple of G;
    query head h reads kv head h // (H / G).
    """
    cache = append(ops, new, cache, meta)
    return attended(q_BHND, cache, meta, ops).reshape(q_BHND.shape).to(q_BHND.dtype), cache


def append(ops: Ops, new: tuple[Tensor, Tensor], cache: Cache, meta: AttentionMetadata) -> Cache:
    """The cache with the rows' keys and values in their blocks."""
    table_BL, tiles_BN = meta.block_table_BL, meta.positions_BN // KEY_TILE
    count = table_BL.shape[1]
    blocks_BN = table_BL[iota(len(table_BL), table_BL)[:, None], tiles_BN.clamp(0, count - 1)]
    valid_BN = (tiles_BN >= 0) & (tiles_BN < count) & (blocks_BN > 0)
    places_BN = torch.where(valid_BN, meta.positions_BN % KEY_TILE, KEY_TILE)
    return Cache(*(ops.append(c, n, blocks_BN, places_BN) for c, n in zip(cache, new, strict=True)))


def attended(q_BHND: Tensor, cache: Cache, meta: AttentionMetadata, ops: Ops = EAGER) -> Tensor:
    """(B, G, R, D) fp32: attention of the R = (H / G) x N rows of each kv head over the cache."""
    batch, heads, count, dim = q_BHND.shape
    group = heads // cache.k.shape[1]
    last_BN = meta.positions_BN if meta.attend_to_B1 is None else meta.attend_to_B1.expand(-1, count)
    last_BR = last_BN[:, None].expand(-1, group, -1).flatten(1)
    q_BGRD = q_BHND.reshape(batch, -1, group * count, dim).float()
    return ops.shared(attend_blocks, q_BGRD, last_BR, *cache, meta.block_table_BL)


def attend_blocks(
    ops: Ops, q_BGRD: Tensor, last_BR: Tensor, k_PGKD: Tensor, v_PGKD: Tensor, table_BL: Tensor
) -> Tensor:
    """(B, G, R, D) fp32: attention of rows that see the keys up to `last_BR`, over pools of blocks."""
    q_BGRD = q_BGRD * q_BGRD.shape[-1] ** -0.5

    def block(state: State) -> State:
        t_1, acc_BGRD, l_BGR, m_BGR = state
        k_BGKD, v_BGKD = (pool[table_BL.index_select(1, t_1)[:, 0]] for pool in (k_PGKD, v_PGKD))
        # summed in fp32, as the matrix engine does
        scores = torch.einsum("bgrd,bgkd->bgrk", q_BGRD, k_BGKD.float())
        visible = t_1 * KEY_TILE + iota(KEY_TILE, t_1) <= last_BR[:, None, :, None]
        scores = torch.where(visible, scores, float("-inf"))
        m_new_BGR = torch.maximum(m_BGR, scores.amax(-1))
        safe_BGR = m_new_BGR.clamp(min=LOWEST)
        p, alpha_BGR = torch.exp(scores - safe_BGR[..., None]), torch.exp(m_BGR - safe_BGR)
        more_BGRD = torch.einsum("bgrk,bgkd->bgrd", p.to(v_BGKD.dtype).float(), v_BGKD.float())
        l_BGR = l_BGR * alpha_BGR + ordered_sum(p)
        return t_1 + 1, acc_BGRD * alpha_BGR[..., None] + more_BGRD, l_BGR, m_new_BGR

    zeros = torch.zeros_like(q_BGRD)
    start = iota(1, q_BGRD), zeros, zeros[..., 0], torch.full_like(zeros[..., 0], float("-inf"))
    _, acc_BGRD, l_BGR, _ = ops.repeat(table_BL.shape[1], block, start)
    return acc_BGRD / l_BGR[..., None]
