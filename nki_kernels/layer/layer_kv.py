"""A layer's new rows in decode attention: overlaid on the prefetched keys, then appended to the pages.

New keys replace stale columns on chip, so the gather of keys does not wait for the projection. New values are scattered
before values are gathered. R rows of a pack, N new rows per sequence.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.kv_chunks import Plan
from nki_kernels.attention.paged_kv import scatter, scatter_indices, spare_rows
from nki_kernels.attention.tiling import packs_of, tiling
from nki_kernels.layer.qk_norm_rope import rows_of_heads
from nki_kernels.limits import CHUNK
from nki_kernels.tiles import P, dma_static


class AttentionPlan(nl.NKIObject):
    """What all layers of a launch share: page indices, packs and limits of the sequences that this core attends."""

    def __init__(self, shape, pool, positions_BN, block_table_BL, sequences):
        batch, candidates = positions_BN.shape
        kv_heads = pool.shape[1]
        t = tiling(shape, kv_heads, block_table_BL.shape[1] * P)
        first_1B = nl.ndarray((1, batch), dtype=nl.int32)
        dma_static(first_1B, positions_BN.ap([[0, 1], [candidates, batch]], offset=0))
        packs = packs_of(t, (sequences[0] * kv_heads, sequences[1] * kv_heads), positions_BN, None)
        self.paged = Plan(t, packs, block_table_BL, sequences, pool.dtype)
        # where the new keys begin in each chunk: int32 (1, C, B)
        self.columns_1CB = new_key_columns(first_1B, t)
        # where the new rows go: int32 (R, 1)
        spare_R1 = spare_rows(pool, (sequences[1] - sequences[0]) * candidates)
        self.rows_R1 = scatter_indices(spare_R1, kv_heads, positions_BN, block_table_BL, sequences[0] * candidates)


def new_key_columns(first_1B, t):
    """Where the new keys begin in each chunk with a margin of N columns on both sides: int32 (1, chunks, B)."""
    batch, n, chunks = first_1B.shape[1], t.candidates, t.length // CHUNK
    columns_1CB = nl.ndarray((1, chunks, batch), dtype=nl.int32)
    inside_1CB = nl.ndarray((1, chunks, batch), dtype=nl.float32)
    for i in range(chunks):
        inside, column = inside_1CB[:, i, :], columns_1CB[:, i, :]
        offset = float(n - i * CHUNK)
        nisa.tensor_scalar(dst=inside, data=first_1B, op0=nl.add, operand0=offset, op1=nl.maximum, operand1=0.0)
        nisa.tensor_scalar(dst=column, data=inside, op0=nl.minimum, operand0=float(CHUNK + n))
    return columns_1CB


class NewRows(nl.NKIObject):
    """New keys and values of a layer: keys transposed, (D, 1, N) per group of this core, and both as rows (R, G, D)."""

    def __init__(self, plan, keys, keys_DGBN, values_DGBN):
        self.plan = plan
        self.keys = keys
        # values first: their gather waits for their scatter
        self.values_RGD = rows_of_heads(values_DGBN)
        self.keys_RGD = rows_of_heads(keys_DGBN)

    def overlay_keys(self, chunk):
        """Put the new keys over the stale ones; those outside of this chunk fall into the margins."""
        t, pack, keys_DGW = self.plan.paged.t, chunk.key_group.pack, chunk.keys_DGW[0]
        width = keys_DGW.shape[2]
        for i in range(pack.count):
            sequence = (pack.group + i) // t.kv_heads
            column = self.plan.columns_1CB[0:1, chunk.index, sequence : sequence + 1]
            stale_DN = keys_DGW.ap(
                [[pack.count * width, t.dim], [1, t.candidates]], offset=i * width, scalar_offset=column, indirect_dim=2
            )
            new_DN = self.keys[pack.group + i - self.plan.paged.group]
            nisa.tensor_copy(dst=stale_DN, src=new_DN, engine=nisa.engine.vector)

    def append_keys(self, pool):
        """Scatter the new keys, after the last gather of stale ones."""
        self.append(pool, self.keys_RGD)

    def append_values(self, pool):
        """Scatter the new values, before values are gathered."""
        self.append(pool, self.values_RGD)

    def append(self, pool, new_RGD):
        """Scatter new rows (R, G, D)."""
        for head in range(new_RGD.shape[1]):
            scatter(pool, head, new_RGD[:, head, :], self.plan.rows_R1)
