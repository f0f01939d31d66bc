"""Append a prompt's new keys and values to a paged KV cache.

pool[block_table[p // 128], g, p % 128] = new[g, c],  p = positions[c];  rows without a page go to a spare page

C rows, G kv heads, D head dim, S positions of the block table.
Layouts: new keys and values (1, G, C, D), pools (pages, G, 128, D), positions (1, C) int32, block_table (1, S / 128)
int32. A row has no page if its position is negative or beyond the table, or if its entry is page 0. Each of two cores
writes half of the rows.
Cost: the rows in and out (4 C G D elements). Launched by every prefill graph, before prompt_attention.
"""

import nki
import nki.language as nl

from nki_kernels.attention.paged_kv import PAGE, scatter, scatter_indices, spare_rows
from nki_kernels.checks import INT32, check, check_floats, check_paged, check_rank, launcher
from nki_kernels.tiles import P, core_slice, dma_static


def append(new, pools, places, rows, heads):
    """Scatter rows[0] to rows[1] of (B, N), kv heads heads[0] to heads[1], of new keys and values (B, G, N, D).

    places is (positions (B, N), block_table (B, S / 128)). The rows are those of full sequences, or lie within one.
    """
    candidates, dim = new[0].shape[2], new[0].shape[3]
    # up to 128 rows per scatter, in full sequences if more than one fits
    each = P
    if candidates < P:
        each = P // candidates * candidates
    kv_heads, spare_R1 = pools[0].shape[1], spare_rows(pools[0], each)
    for first in range(rows[0], rows[1], each):
        count = min(each, rows[1] - first)
        index_R1 = scatter_indices(spare_R1[0:count, :], kv_heads, places[0], places[1], first)
        for i in range(2):
            for head in range(heads[0], heads[1]):
                rows_RD = nl.ndarray((count, dim), dtype=new[i].dtype)
                dma_static(rows_RD, rows_of_head(new[i], head, first, count))
                scatter(pools[i], head, rows_RD, index_R1)


def rows_of_head(new_BGND, head, first, rows):
    """Rows `first` to `first + rows` of (B, N) of a kv head in HBM: full sequences, or within one."""
    _, kv_heads, candidates, dim = new_BGND.shape
    sequence, inside = first // candidates, first % candidates
    offset = ((sequence * kv_heads + head) * candidates + inside) * dim
    if rows <= candidates - inside:
        return new_BGND.ap([[dim, rows], [1, dim]], offset=offset)
    return new_BGND.ap([[kv_heads * candidates * dim, rows // candidates], [dim, candidates], [1, dim]], offset=offset)


@nki.jit
def append_rows_kernel(k_new, v_new, k_pages, v_pages, positions, block_table):
    """Return the pools, which change in place."""
    rows = core_slice(k_new.shape[2], PAGE)
    append((k_new, v_new), (k_pages, v_pages), (positions, block_table), rows, (0, k_new.shape[1]))
    return k_pages, v_pages


def check_operands(k_new, v_new, k_pages, v_pages, positions, block_table):
    """Refuse operands that the kernel cannot serve."""
    _, kv_heads, count, dim = check_rank("k_new", k_new, "1, G, C, D")
    check_paged(k_pages, v_pages, block_table, dim, (1, kv_heads, 1), unit=PAGE)
    for name, rows in (("k_new", k_new), ("v_new", v_new)):
        check(name, rows, (1, k_pages.shape[1], count, dim), remedy="pass the rows of one prompt")
    check_floats(k_new, v_new, k_pages, v_pages)
    check("positions", positions, (1, count), INT32)


append_rows = launcher(append_rows_kernel, check_operands)
