"""Reference paged attention: append the rows' keys and values, then attend over the cache.

Blocks are visited in ascending order of position with an online softmax (Milakov, Gimelshein, arXiv 1805.02867). A
block beyond a row's causal bound rescales its sums by 1 and adds 0, so a row's result depends on its position and the
cache only, not on the number of rows or the bucket.
"""

import torch
from torch import Tensor

from model.cache import KEY_TILE, AttentionMetadata, Cache
from model.ops import Ops, State, iota, ordered_sum

# avoids NaN from -inf - -inf in rows that have no visible key yet
LOWEST = torch.finfo(torch.float32).min


def append(ops: Ops, k_BGND: Tensor, v_BGND: Tensor, cache: Cache, meta: AttentionMetadata) -> Cache:
    """Writes the rows' keys and values to their blocks; rows without a block go to the last block, a spare one."""
    table_BL, tiles_BN = meta.block_table_BL, meta.positions_BN // KEY_TILE
    blocks = table_BL.shape[1]
    inside_BN = (tiles_BN >= 0) & (tiles_BN < blocks)
    blocks_BN = table_BL[iota(len(table_BL), table_BL)[:, None], tiles_BN.clamp(0, blocks - 1)]
    blocks_BN = torch.where(inside_BN & (blocks_BN > 0), blocks_BN, len(cache.k) - 1)
    return Cache(
        *(
            ops.append(pool, new, blocks_BN, meta.positions_BN % KEY_TILE)
            for pool, new in ((cache.k, k_BGND), (cache.v, v_BGND))
        )
    )


def attend(ops: Ops, q_BHND: Tensor, cache: Cache, meta: AttentionMetadata) -> Tensor:
    """(B, H, N, D) in q's dtype: attention of queries (after RoPE) over the cache, softmax in fp32.

    Query head h attends kv head h // (H / G); the queries of one kv head are R = (H / G) * N rows.
    """
    count, group = q_BHND.shape[2], q_BHND.shape[1] // cache.k.shape[1]
    last_BN = meta.positions_BN if meta.attend_to_B1 is None else meta.attend_to_B1.expand(-1, count)
    last_BR = last_BN[:, None].expand(-1, group, -1).flatten(1)
    q_BGRD = q_BHND.unflatten(1, (-1, group)).flatten(2, 3).float()
    out_BGRD = ops.jit(attend_blocks, q_BGRD, last_BR, *cache, meta.block_table_BL)
    return out_BGRD.reshape(q_BHND.shape).to(q_BHND.dtype)


def attend_blocks(
    ops: Ops, q_BGRD: Tensor, last_BR: Tensor, k_PGKD: Tensor, v_PGKD: Tensor, table_BL: Tensor
) -> Tensor:
    """(B, G, R, D) fp32: attention over the positions up to and including `last_BR`."""
    q_BGRD = q_BGRD * q_BGRD.shape[-1] ** -0.5

    def block(state: State) -> State:
        t_1, acc_BGRD, l_BGR, m_BGR = state
        k_BGKD, v_BGKD = (pool[table_BL.index_select(1, t_1)[:, 0]] for pool in (k_PGKD, v_PGKD))
        # accumulated in fp32, as in PSUM
        s = torch.einsum("bgrd,bgkd->bgrk", q_BGRD, k_BGKD.float())
        visible = t_1 * KEY_TILE + iota(KEY_TILE, t_1) <= last_BR[:, None, :, None]
        s = torch.where(visible, s, float("-inf"))
        m_new_BGR = torch.maximum(m_BGR, s.amax(-1))
        safe_BGR = m_new_BGR.clamp(min=LOWEST)
        p, alpha_BGR = torch.exp(s - safe_BGR[..., None]), torch.exp(m_BGR - safe_BGR)
        pv_BGRD = torch.einsum("bgrk,bgkd->bgrd", p.to(v_BGKD.dtype).float(), v_BGKD.float())
        l_BGR = l_BGR * alpha_BGR + ordered_sum(p)
        return t_1 + 1, acc_BGRD * alpha_BGR[..., None] + pv_BGRD, l_BGR, m_new_BGR

    zeros = torch.zeros_like(q_BGRD)
    start = iota(1, q_BGRD), zeros, zeros[..., 0], torch.full_like(zeros[..., 0], float("-inf"))
    _, acc_BGRD, l_BGR, _ = ops.fori_loop(table_BL.shape[1], block, start)
    return acc_BGRD / l_BGR[..., None]
