"""Verification attention: N new rows per sequence attend a paged KV cache and themselves, in one pass.

out[r] = sum_s exp(q[r].k[s] / sqrt(D) - m) v[s] / sum_s exp(q[r].k[s] / sqrt(D) - m),  s <= limit of r

B sequences, H query and G kv heads, N new rows, D 64 or 128, S positions. Row n of sequence b is at positions[b, n] and
is written there first. Its limit is its own position; with `limit` (block drafts) it is limit[b, 0] for every row of
the sequence. Keys are processed in chunks of 1024, aligned to absolute position; m is the row's running max, and chunks
are rescaled and added in ascending order. In a chunk partition p has keys 8p to 8p + 7, and its eight key tiles
accumulate in order. A masked key adds exact zeros, so a row's bits depend only on its limit and cache: not on N, its
index, other rows, the order of pages, the number of cores, or the calls that wrote the prefix.

Layouts: q (B, H, N, D), new keys and values (B, G, N, D), pools (pages, G, 128, D), positions (B, N), block_table
(B, S / 128) and limit (B, 1) int32; out (B, H, N, D).
Cost: keys and values once (roofline.verify_attention). Design: docs/kernels.md. Launched by the graphs of block drafts
(DFlash), of head dims other than 128, and of steps of more than 128 rows.
"""

import nki
import nki.language as nl

from nki_kernels.attention.append_rows import append
from nki_kernels.attention.paged_kv import PAGE, RUN, PagedKV, PageIndex
from nki_kernels.attention.pipeline import attend, plan
from nki_kernels.attention.state import Launch
from nki_kernels.attention.tiling import groups_of_core, tiling
from nki_kernels.checks import INT32, check, check_floats, check_paged, check_rank, launcher, refuse
from nki_kernels.limits import CANDIDATES


@nki.jit
def verify_attention_kernel(q, k_new, v_new, k_pages, v_pages, positions, block_table, limit=None):
    """Return out in q's dtype; the pools change in place, and rows without a page go to a spare page."""
    t = tiling(q.shape, k_pages.shape[1], block_table.shape[1] * PAGE)
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    first, last = groups_of_core(t)
    if first < last:
        # the cores split the kv heads of a single sequence
        sequences, heads, count = (first // t.kv_heads, -(-last // t.kv_heads)), (0, t.kv_heads), t.candidates
        if t.groups == t.kv_heads:
            heads = (first, last)
        rows = (sequences[0] * count, sequences[1] * count)
        append((k_new, v_new), (k_pages, v_pages), (positions, block_table), rows, heads)
        kv = PagedKV((k_pages, v_pages), PageIndex(block_table, sequences, t.kv_heads, RUN))
        attend(Launch(t, kv, positions, limit, out), plan(q, t, first, last))
    return out


def check_operands(q, k_new, v_new, k_pages, v_pages, positions, block_table, limit=None):
    """Refuse operands that the kernel cannot serve."""
    batch, heads, count, dim = check_rank("q", q, "B, H, N, D")
    refuse(not 1 <= count <= CANDIDATES, f"N is {count} rows per sequence, 1 to {CANDIDATES} are served: lower k")
    kv_heads = check_paged(k_pages, v_pages, block_table, dim, (batch, heads, count))
    for name, rows in (("k_new", k_new), ("v_new", v_new)):
        check(name, rows, (batch, kv_heads, count, dim), remedy="pass the rows of the same pass")
    check_floats(q, k_new, v_new, k_pages, v_pages)
    check("positions", positions, (batch, count), INT32)
    if limit is not None:
        check("limit", limit, (batch, 1), INT32)


verify_attention = launcher(verify_attention_kernel, check_operands)
