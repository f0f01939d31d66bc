"""Verification attention: N new rows per sequence attend a paged KV cache and themselves, in one pass.

out[r] = sum_s exp(q[r].k[s] - m) v[s] / sum_s exp(q[r].k[s] - m),  s <= limit of r

B sequences, H query and G kv heads, N new rows, D 64, 128 or 256, S positions; q has the factor 1 / sqrt(D). Row n of
sequence b is at positions[b, n] and is written there first. Its limit is its own position; with `limit` (block drafts)
it is limit[b, 0] for every row of the sequence. The order of sums is decode_attention's (kv_stationary_attention.py):
m is updated every 4096 keys (fp32: 2048), aligned to absolute position; between updates key tiles of 128 accumulate in
ascending order. A masked key adds exact zeros, so a row's bits depend only on its query, its limit and the cache up to
it: not on N, its index, other rows, the order of pages, the number of cores, or the calls that wrote the prefix.

Layouts: q (B, H, N, D), new keys and values (B, G, N, D), pools (pages, G, 128, D), positions (B, N), block_table
(B, S / 128) and limit (B, 1) int32; out (B, H, N, D).
Cost: keys and values once (roofline.verify_attention). Design: docs/kernels.md. Launched by the graphs of block drafts
(DFlash), of head dims other than 128, and of steps of more than 128 rows.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.append_rows import append
from nki_kernels.attention.kv_chunks import KVChunks, Plan
from nki_kernels.attention.kv_stationary_attention import attend, begin
from nki_kernels.attention.paged_kv import PAGE
from nki_kernels.attention.tiling import groups_of_core, packs_of, tiling
from nki_kernels.checks import INT32, check, check_floats, check_paged, check_rank, launcher, refuse
from nki_kernels.limits import CANDIDATES
from nki_kernels.tiles import P, dma_static, preload_act_table


def load_queries(q, t, groups):
    """The queries of groups[0] to groups[1], transposed: per group, a tile (128, (H / G) N) per tile of D."""
    part, tiles, queries = min(t.dim, P), max(1, t.dim // P), []
    for _ in range(groups[0], groups[1]):
        queries.append([])
    # groups whose rows are transposed together
    each = P // t.queries
    for first in range(groups[0], groups[1], each):
        count = min(each, groups[1] - first)
        rows = count * t.queries
        rows_RD = nl.ndarray((rows, t.dim), dtype=q.dtype)
        dma_static(rows_RD, q.ap([[t.dim, rows], [1, t.dim]], offset=first * t.queries * t.dim))
        for d in range(tiles):
            psum_DR = nl.ndarray((part, rows), dtype=q.dtype, buffer=nl.psum)
            q_DR = nl.ndarray((part, rows), dtype=q.dtype)
            nisa.nc_transpose(dst=psum_DR, data=rows_RD[:, d * P : d * P + part])
            nisa.tensor_copy(dst=q_DR, src=psum_DR)
            for i in range(count):
                queries[first + i - groups[0]].append(q_DR[:, i * t.queries : (i + 1) * t.queries])
    return queries


class RowsOut(nl.NKIObject):
    """Where attention stores the output of each pack: (B, H, N, D) in HBM."""

    def __init__(self, out, t):
        self.out = out
        self.t = t

    def store(self, pack, values_DR, inverse_PR):
        """Normalize the output of a pack's rows, transpose it and store it."""
        rows, dim, dtype = inverse_PR.shape[1], self.t.dim, self.out.dtype
        rows_RD = nl.ndarray((rows, dim), dtype=dtype)
        for d in range(len(values_DR)):
            part = values_DR[d].shape[0]
            result_DR = nl.ndarray((part, rows), dtype=dtype)
            nisa.tensor_tensor(dst=result_DR, data1=values_DR[d], data2=inverse_PR[0:part, :], op=nl.multiply)
            psum_RD = nl.ndarray((rows, part), dtype=dtype, buffer=nl.psum)
            nisa.nc_transpose(dst=psum_RD, data=result_DR)
            nisa.tensor_copy(dst=rows_RD[:, d * P : d * P + part], src=psum_RD)
        offset = pack.group * self.t.queries * dim
        dma_static(self.out.ap([[dim, rows], [1, dim]], offset=offset), rows_RD)


@nki.jit
def verify_attention_kernel(q, k_new, v_new, k_pages, v_pages, positions, block_table, limit=None):
    """Return out in q's dtype; the pools change in place, and rows without a page go to a spare page."""
    t = tiling(q.shape, k_pages.shape[1], block_table.shape[1] * PAGE)
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    groups = groups_of_core(t)
    if groups[0] < groups[1]:
        # the cores split the kv heads of a single sequence
        sequences, heads = (groups[0] // t.kv_heads, -(-groups[1] // t.kv_heads)), (0, t.kv_heads)
        if t.groups == t.kv_heads:
            heads = groups
        preload_act_table(nl.exp)
        rows = (sequences[0] * t.candidates, sequences[1] * t.candidates)
        append((k_new, v_new), (k_pages, v_pages), (positions, block_table), rows, heads)
        plan = Plan(t, packs_of(t, groups, positions, limit), block_table, sequences, q.dtype)
        kv, queries = KVChunks((k_pages, v_pages), plan, 0), load_queries(q, t, groups)
        kv.prefetch_keys(1)
        begin(kv.chunks[0])
        kv.transpose_keys(1)
        attend(kv, queries, None, RowsOut(out, t))
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
