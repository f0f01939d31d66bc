"""A paged KV cache in HBM: page indices from the block table, gathers of keys and values, scatters of new rows.

Keys and values are pools (pages, G, 128, D) each; entry t of a sequence's row of the block table (B, S / 128), int32,
is the page of its positions 128 t to 128 t + 127. Page 0 is the null page: finite contents, never written. The last
SPARE_PAGES pages are spare: each core writes rows without a page to its own one, and no block table names them.
Indices are computed in fp32, which is exact below 2**24; limits.attention_limit_error refuses a larger pool.
"""

import math

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import P, absent, affine_iota, dma_static, this_core

# positions of a page, as many as a key tile has keys
PAGE = P
# consecutive positions on a partition: a gather moves rows of RUN * D elements
RUN = 8
# consecutive positions on a partition that are in different key tiles, in decode and in prefill: values are gathered in
# these runs. Runs of 8 would give key columns a stride of 16 bytes, which load into the PE array at half rate
TILE_RUN = 4
HALVES = RUN // TILE_RUN


class PageIndex(nl.NKIObject):
    """Where the run of `run` positions that a partition loads begins in a pool, for sequences[0] to sequences[1].

    index_PBC is int32 (128, B, S / (128 run)) in units of `run` pool rows, for kv head 0. A gather tile is 128 runs:
    partition p loads its positions p run to p run + run - 1.
    """

    def __init__(self, block_table_BL, sequences, kv_heads, run):
        self.first = sequences[0]
        self.run = run
        width, count, per_page = block_table_BL.shape[1], sequences[1] - sequences[0], PAGE // run
        tiles = count * width // run
        # full rows of the table: one descriptor per partition, not one per entry
        pages_PCR = nl.ndarray((P, tiles, run), dtype=nl.int32)
        dma_static(pages_PCR, block_table_BL.ap([[0, P], [1, count * width]], offset=sequences[0] * width))
        partition_P1, split_P2 = nl.ndarray((P, 1), dtype=nl.int32), nl.ndarray((P, 2), dtype=nl.int32)
        nisa.iota(dst=partition_P1, pattern=[[0, 1]], offset=0, channel_multiplier=1)
        shift = int(math.log2(per_page))
        nisa.tensor_scalar(dst=split_P2[:, 0:1], data=partition_P1, op0=nl.right_shift, operand0=shift)
        nisa.tensor_scalar(dst=split_P2[:, 1:2], data=partition_P1, op0=nl.bitwise_and, operand0=per_page - 1)
        # the page of a gather tile that a partition reads, and the run within this page
        number_PR, chosen_PR = nl.ndarray((P, run), dtype=nl.int32), nl.ndarray((P, run), dtype=nl.int32)
        nisa.iota(dst=number_PR, pattern=[[1, run]], offset=0, channel_multiplier=0)
        nisa.tensor_tensor(dst=chosen_PR, data1=number_PR, data2=split_P2[:, 0:1].broadcast(1, run), op=nl.equal)
        masked_PCR, page_PC = nl.ndarray((P, tiles, run), dtype=nl.int32), nl.ndarray((P, tiles), dtype=nl.int32)
        chosen_PCR = chosen_PR.expand_dim(1).broadcast(1, tiles)
        nisa.tensor_tensor(dst=masked_PCR, data1=pages_PCR, data2=chosen_PCR, op=nl.multiply)
        nisa.tensor_reduce(dst=page_PC, op=nl.add, data=masked_PCR, axis=2)
        index_PC, run_PC = nl.ndarray((P, tiles), dtype=nl.int32), split_P2[:, 1:2].broadcast(1, tiles)
        nisa.tensor_scalar(dst=page_PC, data=page_PC, op0=nl.multiply, operand0=float(kv_heads * per_page))
        nisa.tensor_tensor(dst=index_PC, data1=page_PC, data2=run_PC, op=nl.add)
        self.index_PBC = index_PC.reshape((P, count, width // run))

    def gather(self, dst_PRD, pool, group, tile):
        """Gather one tile of 128 runs of a (sequence, kv head) group: (128, run, D)."""
        pages, kv_heads, _, dim = pool.shape
        row = self.run * dim
        index_P1 = self.index_PBC[:, group // kv_heads - self.first, tile : tile + 1]
        flat = pool.reshape((pages * kv_heads * PAGE // self.run, row))
        offset = group % kv_heads * PAGE * dim
        nisa.dma_copy(dst=dst_PRD, src=flat.ap([[row, P], [1, row]], offset=offset, vector_offset=index_P1))


class PagedKV(nl.NKIObject):
    """A layer's K and V pools, and the page indices, which all layers share; values may have shorter runs."""

    def __init__(self, pools, key_index, value_index=None):
        self.keys = pools[0]
        self.values = pools[1]
        self.dtype = pools[0].dtype
        self.dim = pools[0].shape[3]
        self.key_index = key_index
        self.value_index = value_index
        if absent(value_index):
            self.value_index = key_index

    def gather_keys(self, group, chunk):
        """Gather a chunk's keys as rows: (128, RUN, D)."""
        rows_PRD = nl.ndarray((P, self.key_index.run, self.dim), dtype=self.dtype)
        self.key_index.gather(rows_PRD, self.keys, group, chunk)
        return rows_PRD

    def gather_values(self, dst_PRD, group, tile):
        """Gather a tile of values: (128, run, D)."""
        self.value_index.gather(dst_PRD, self.values, group, tile)


def transpose_keys(dst_DW, rows_PRD):
    """Gathered keys (128, RUN, D) transposed on the Tensor Engine: (D, 1024) in the order of positions."""
    _, run, dim = rows_PRD.shape
    psum_DRP = nl.ndarray((dim, run, P), dtype=rows_PRD.dtype, buffer=nl.psum)
    for j in range(run):
        nisa.nc_transpose(dst=psum_DRP[:, j, :], data=rows_PRD[:, j, :])
    nisa.tensor_copy(dst=dst_DW, src=psum_DRP.permute((0, 2, 1)), engine=nisa.engine.scalar)


def spare_rows(pool, rows):
    """Rows of this core's spare page in a flattened pool (pages * G * 128, D), for kv head 0: fp32 (R, 1).

    Each row of a scatter has its own, so no two rows of a scatter, or of two cores, are written to the same place.
    """
    pages, kv_heads, _, _ = pool.shape
    core, _ = this_core()
    spare_R1 = nl.ndarray((rows, 1), dtype=nl.float32)
    nisa.iota(dst=spare_R1, pattern=[[0, 1]], offset=(pages - 1 - core) * kv_heads * PAGE, channel_multiplier=1)
    return spare_R1


def scatter_indices(spare_R1, kv_heads, positions_BN, block_table_BL, first):
    """Where rows `first` to `first + R` of (B, N) go in a flattened pool (pages * G * 128, D): int32 (R, 1), kv head 0.

    A row at a negative position, beyond the table, or with an entry of page 0 goes to its row of `spare_rows`.
    """
    width, rows = block_table_BL.shape[1], spare_R1.shape[0]
    position_R1, inside_R1 = nl.ndarray((rows, 1), dtype=nl.int32), nl.ndarray((rows, 1), dtype=nl.int32)
    dma_static(position_R1, positions_BN.ap([[1, rows], [1, 1]], offset=first))
    candidates = positions_BN.shape[1]
    entries_R1 = affine_iota(rows, candidates, width, 0, first // candidates * width)
    nisa.tensor_scalar(
        dst=inside_R1, data=position_R1, op0=nl.maximum, operand0=0.0, op1=nl.minimum, operand1=float(width * PAGE - 1)
    )
    tile_R1, offset_R1 = nl.ndarray((rows, 1), dtype=nl.int32), nl.ndarray((rows, 1), dtype=nl.int32)
    nisa.tensor_scalar(dst=tile_R1, data=inside_R1, op0=nl.right_shift, operand0=int(math.log2(PAGE)))
    nisa.tensor_scalar(dst=offset_R1, data=inside_R1, op0=nl.bitwise_and, operand0=PAGE - 1)
    # index = spare + in_range * delta
    delta_R1 = nl.ndarray((rows, 1), dtype=nl.float32)
    nisa.tensor_tensor(dst=delta_R1, data1=offset_R1, data2=spare_R1, op=nl.subtract)
    entry_R1, page_R1 = nl.ndarray((rows, 1), dtype=nl.int32), nl.ndarray((rows, 1), dtype=nl.int32)
    nisa.tensor_tensor(dst=entry_R1, data1=tile_R1, data2=entries_R1, op=nl.add)
    table = block_table_BL.reshape((block_table_BL.shape[0] * width, 1))
    nisa.dma_copy(dst=page_R1, src=table.ap([[1, rows], [1, 1]], vector_offset=entry_R1))
    in_range_R1, index_R1 = nl.ndarray((rows, 1), dtype=nl.float32), nl.ndarray((rows, 1), dtype=nl.int32)
    nisa.tensor_tensor(dst=in_range_R1, data1=position_R1, data2=inside_R1, op=nl.equal)
    nisa.scalar_tensor_tensor(
        dst=in_range_R1, data=page_R1, op0=nl.greater, operand0=0.0, op1=nl.multiply, operand1=in_range_R1
    )
    nisa.scalar_tensor_tensor(
        dst=delta_R1, data=page_R1, op0=nl.multiply, operand0=float(kv_heads * PAGE), op1=nl.add, operand1=delta_R1
    )
    nisa.scalar_tensor_tensor(
        dst=index_R1, data=delta_R1, op0=nl.multiply, operand0=in_range_R1, op1=nl.add, operand1=spare_R1
    )
    return index_R1


def scatter(pool, head, rows_RD, index_R1):
    """Write a kv head's new rows (R, D) to the pool rows of `scatter_indices`."""
    rows, dim = rows_RD.shape
    flat = pool.reshape((pool.shape[0] * pool.shape[1] * PAGE, dim))
    target = flat.ap([[dim, rows], [1, dim]], offset=head * PAGE * dim, vector_offset=index_R1)
    nisa.dma_copy(dst=target, src=rows_RD)
