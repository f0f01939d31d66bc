"""Verification attention over a pool of blocks: the law of verify_attention, the same bits, different addresses.

Keys and values (blocks, G, 128, D). New rows are scattered to their blocks, then runs of eight keys are gathered by
index; keys are turned on the Tensor Engine, bit for bit.
"""

import nki
import nki.language as nl

from nki_kernels.attention.blocks import BLOCK, append, gather, run_index, turn
from nki_kernels.attention.pipeline import attend, outputs, plan
from nki_kernels.attention.rows import RUN, first_slots, groups_of_core, tiling
from nki_kernels.attention.state import Launch
from nki_kernels.limits import CHUNK
from nki_kernels.tiles import P


class Pages(nl.NKIObject):
    """Keys and values (blocks, G, 128, D) in HBM, and where those of the sequences own[0] to own[1] are."""

    def __init__(self, keys, values, table, t, own):
        self.keys = keys
        self.values = values
        self.t = t
        self.dtype = values.dtype
        self.first = own[0]
        # int32 (128, B, C)
        self.index_PBC = run_index(table, own, t.kv_heads, RUN)

    def load_keys(self, chunk):
        """Gather the keys of one chunk and turn them: (D, groups, W)."""
        chunk.keys_DGW = nl.ndarray((self.t.dim, chunk.pack.count, CHUNK), dtype=self.dtype)
        for i in range(chunk.pack.count):
            rows_PRD = nl.ndarray((P, RUN, self.t.dim), dtype=self.dtype)
            self.gather(rows_PRD, self.keys, chunk, i)
            turn(chunk.keys_DGW[:, i, :], rows_PRD)

    def load_values(self, chunk):
        """Gather the values of one chunk: (W / RUN, groups, RUN, D)."""
        chunk.values_TGRD = nl.ndarray((P, chunk.pack.count, RUN, self.t.dim), dtype=self.dtype)
        for i in range(chunk.pack.count):
            self.gather(chunk.values_TGRD[:, i, :, :], self.values, chunk, i)

    def append(self, pack):
        """Nothing: the new rows are in their blocks before the first gather."""

    def gather(self, dst_PRD, pool, chunk, i):
        """One group's runs of eight keys, one per partition."""
        group, kv_heads = chunk.pack.group + i, self.t.kv_heads
        sequence = group // kv_heads - self.first
        index_P1 = self.index_PBC[:, sequence, chunk.index : chunk.index + 1]
        gather(dst_PRD, pool, group % kv_heads, index_P1)


@nki.jit
def verify_attention_paged_kernel(
    q, k_new, v_new, k_pages, v_pages, positions, block_table, ancestors=None, with_lse=False
):
    """Append the new rows to their blocks, then attend; outputs as verify_attention_kernel's.

    k_pages and v_pages (blocks, G, 128, D), block_table (B, S / 128) int32, S a multiple of 1024. The pages change in
    place; rows without a block are dropped.
    """
    t = tiling(q.shape, k_pages.shape[1], block_table.shape[1] * BLOCK, gathered=True)
    out, lse = outputs(q, with_lse)
    first, last = groups_of_core(t)
    if first < last:
        # of one sequence two cores share the heads
        own, heads, count = (first // t.kv_heads, -(-last // t.kv_heads)), (0, t.kv_heads), t.candidates
        if t.groups == t.kv_heads:
            heads = (first, last)
        slots_1B = first_slots(positions)
        append((k_new, v_new), (k_pages, v_pages), (positions, block_table), (own[0] * count, own[1] * count), heads)
        cache = Pages(k_pages, v_pages, block_table, t, own)
        launch = Launch(t, cache, (positions, ancestors, slots_1B), (out, lse))
        attend(launch, plan(q, t, first, last))
    if with_lse:
        return out, lse
    return out
