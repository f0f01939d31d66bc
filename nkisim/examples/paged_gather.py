"""Gather the pages of one sequence from a paged KV cache, by its block table."""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128


@nki.jit
def paged_gather(pages, block_table):
    """The rows (L, W) of pages (N, W) that block_table (L, 1), int32, names, L at most 128.

    An entry that is not an index of `pages` is refused (`DynamicOutOfRange`).
    """
    count, width = block_table.shape[0], pages.shape[1]
    out = nl.ndarray((count, width), dtype=pages.dtype, buffer=nl.shared_hbm)
    page_L1 = nl.ndarray((count, 1), dtype=nl.int32)
    rows_LW = nl.ndarray((count, width), dtype=pages.dtype)
    nisa.dma_copy(dst=page_L1, src=block_table)
    nisa.dma_copy(dst=rows_LW, src=pages.ap([[width, count], [1, width]], vector_offset=page_L1))
    nisa.dma_copy(dst=out, src=rows_LW)
    return out
