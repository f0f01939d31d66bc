"""A layer's paged keys and values as kv_stationary_attention reads them: prefetched, transposed, overlaid, appended.

New keys replace stale columns on chip, so the gather of keys does not wait for the projection. New values are scattered
before values are gathered. R rows of a pack, N new rows per sequence.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.paged_kv import RUN, PagedKV, PageIndex, scatter, scatter_indices, spare_rows, transpose_keys
from nki_kernels.attention.tiling import chunks_of, row_limits, tiling
from nki_kernels.layer.qk_norm_rope import rows_of_heads
from nki_kernels.limits import CHUNK
from nki_kernels.tiles import P, dma_static, itemsize

# halves of a chunk: key columns with a stride of 16 bytes or more load into the PE array at half rate
HALVES = 2
HALF_RUN = RUN // HALVES


class AttentionPlan(nl.NKIObject):
    """What all layers of a launch share: page indices, chunks and limits of the sequences that this core attends."""

    def __init__(self, shape, pool, positions_BN, block_table_BL, sequences):
        batch, candidates = positions_BN.shape
        kv_heads = pool.shape[1]
        t = tiling(shape, kv_heads, block_table_BL.shape[1] * P)
        first_1B = nl.ndarray((1, batch), dtype=nl.int32)
        dma_static(first_1B, positions_BN.ap([[0, 1], [candidates, batch]], offset=0))
        self.t = t
        self.sequence = sequences[0]
        self.group = sequences[0] * kv_heads
        self.key_index = PageIndex(block_table_BL, sequences, kv_heads, RUN)
        self.value_index = PageIndex(block_table_BL, sequences, kv_heads, HALF_RUN)
        # where the new keys begin in each chunk: int32 (1, C, B)
        self.columns_1CB = new_key_columns(first_1B, t)
        # where the new rows go: int32 (R, 1)
        spare_R1 = spare_rows(pool, (sequences[1] - sequences[0]) * candidates)
        self.rows_R1 = scatter_indices(spare_R1, kv_heads, positions_BN, block_table_BL, sequences[0] * candidates)
        self.chunks = chunks_of(t, self.group, sequences[1] * kv_heads)
        for chunk in self.chunks:
            if chunk.index == 0:
                chunk.pack.limit_R1 = row_limits(positions_BN, None, t, chunk.pack)


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


class ChunkInFlight(nl.NKIObject):
    """A chunk of a pack in one layer, from the prefetch of its keys to its weighted values."""

    def __init__(self, chunk):
        self.pack = chunk.pack
        self.index = chunk.index
        self.start = chunk.start
        self.last = chunk.last
        # prefetch_keys: gathered keys (128, RUN, D), one per group; transpose_keys: (D, groups, N + 1024 + N)
        self.key_rows = []
        self.keys_DGW = None
        # prefetch_values: (128, HALF_RUN, D), two per group
        self.values = []
        # begin: the pack's softmax, and the mask: uint8 (128, RUN, R)
        self.softmax = None
        self.visible_PJR = None
        # exponentials: weights (128, RUN, R), their sums by partition and the rescale factor, fp32 (128, R)
        self.weights_PJR = None
        self.sums_PR = None
        self.rescale_PR = None


class LayerKV(nl.NKIObject):
    """A layer's pools of keys and values (pages, G, 128, D), and the chunks that this core attends from them."""

    def __init__(self, pools, plan):
        self.plan = plan
        self.t = plan.t
        self.kv = PagedKV(pools, plan.key_index, plan.value_index)
        self.dtype = pools[0].dtype
        # set_new_keys: transposed new keys (D, 1, N), one per group, and as rows (R, G, D)
        self.new = []
        self.new_RGD = None
        self.chunks = []
        for chunk in plan.chunks:
            self.chunks.append(ChunkInFlight(chunk))
        # chunks whose keys are issued, and those whose keys are transposed
        self.issued = 0
        self.transposed = 0

    def prefetch_keys(self, stop, ahead=0):
        """Gather the keys of the chunks before number `stop`, and of more up to `ahead` bytes per partition."""
        size = 0
        while self.issued < len(self.chunks) and (self.issued < stop or size < ahead):
            chunk = self.chunks[self.issued]
            for group in range(chunk.pack.group, chunk.pack.group + chunk.pack.count):
                chunk.key_rows.append(self.kv.gather_keys(group, chunk.index))
                size = size + RUN * self.t.dim * itemsize(self.dtype)
            self.issued = self.issued + 1

    def transpose_keys(self, stop):
        """Transpose the keys of the chunks before number `stop`, with a margin of N columns on both sides."""
        n = self.t.candidates
        while self.transposed < stop:
            chunk = self.chunks[self.transposed]
            chunk.keys_DGW = nl.ndarray((self.t.dim, chunk.pack.count, CHUNK + 2 * n), dtype=self.dtype)
            for i in range(chunk.pack.count):
                transpose_keys(chunk.keys_DGW[:, i, n : n + CHUNK], chunk.key_rows[i])
            chunk.key_rows = []
            self.transposed = self.transposed + 1

    def set_new_keys(self, new, new_DGBN):
        """Set the transposed new keys in SBUF: a list by group, and all of them (D, G, B, N)."""
        self.new = new
        self.new_RGD = rows_of_heads(new_DGBN)

    def overlay_new_keys(self, chunk):
        """Put the new keys over the stale ones; those outside of this chunk fall into the margins."""
        t, pack, width = self.t, chunk.pack, chunk.keys_DGW.shape[2]
        for i in range(pack.count):
            sequence = (pack.group + i) // t.kv_heads
            column = self.plan.columns_1CB[0:1, chunk.index, sequence : sequence + 1]
            stale_DN = chunk.keys_DGW.ap(
                [[pack.count * width, t.dim], [1, t.candidates]], offset=i * width, scalar_offset=column, indirect_dim=2
            )
            nisa.tensor_copy(dst=stale_DN, src=self.new[pack.group + i - self.plan.group], engine=nisa.engine.vector)

    def prefetch_values(self, chunk):
        """Gather a chunk's values by half."""
        for group in range(chunk.pack.group, chunk.pack.group + chunk.pack.count):
            for half in range(HALVES):
                values_PJD = nl.ndarray((P, HALF_RUN, self.t.dim), dtype=self.dtype)
                self.kv.gather_values(values_PJD, group, chunk.index * HALVES + half)
                chunk.values.append(values_PJD)

    def append(self, pool, new_RGD):
        """Scatter new rows (R, G, D): values before their first gather, keys after the last gather of stale ones."""
        for head in range(self.t.kv_heads):
            scatter(pool, head, new_RGD[:, head, :], self.plan.rows_R1)
