"""A pool of blocks in HBM: where a sequence's positions are, gathers of neighbours, scatters of new rows.

Keys and values are (blocks, G, 128, D) each; entry t of a sequence's row of the block table (B, S / 128), int32, is the
block of its positions 128 t to 128 t + 127. Block 0 is none: its numbers must be finite, and nothing is written to it.
Addresses are computed in fp32, which is exact below 2^24; the host refuses a larger pool.
"""

import math

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import P, move, ramp, share_of_core

# positions of a block: a key tile, with a key on each partition
BLOCK = P


def run_index(table_BL, own, kv_heads, run):
    """Where the `run` neighbours of each partition begin, for the first kv head of the sequences own[0] to own[1].

    int32 (128, B, S / (128 run)) in rows of `run` positions: with partition p, those p run to p run + run - 1 of each
    128 run positions.
    """
    width, count, places = table_BL.shape[1], own[1] - own[0], BLOCK // run
    pieces = count * width // run
    # whole rows of the table: a descriptor for each partition, and not for each entry
    blocks_PCR = nl.ndarray((P, pieces, run), dtype=nl.int32)
    move(blocks_PCR, table_BL.ap([[0, P], [1, count * width]], offset=own[0] * width))
    place_P1, part_P2 = nl.ndarray((P, 1), dtype=nl.int32), nl.ndarray((P, 2), dtype=nl.int32)
    nisa.iota(dst=place_P1, pattern=[[0, 1]], offset=0, channel_multiplier=1)
    nisa.tensor_scalar(dst=part_P2[:, 0:1], data=place_P1, op0=nl.right_shift, operand0=int(math.log2(places)))
    nisa.tensor_scalar(dst=part_P2[:, 1:2], data=place_P1, op0=nl.bitwise_and, operand0=places - 1)
    # which of a piece's blocks a partition reads, and where in it
    number_PR, chosen_PR = nl.ndarray((P, run), dtype=nl.int32), nl.ndarray((P, run), dtype=nl.int32)
    nisa.iota(dst=number_PR, pattern=[[1, run]], offset=0, channel_multiplier=0)
    nisa.tensor_tensor(dst=chosen_PR, data1=number_PR, data2=part_P2[:, 0:1].broadcast(1, run), op=nl.equal)
    block_PCR, block_PC = nl.ndarray((P, pieces, run), dtype=nl.int32), nl.ndarray((P, pieces), dtype=nl.int32)
    chosen_PCR = chosen_PR.expand_dim(1).broadcast(1, pieces)
    nisa.tensor_tensor(dst=block_PCR, data1=blocks_PCR, data2=chosen_PCR, op=nl.multiply)
    nisa.tensor_reduce(dst=block_PC, op=nl.add, data=block_PCR, axis=2)
    index_PC, inside_PC = nl.ndarray((P, pieces), dtype=nl.int32), part_P2[:, 1:2].broadcast(1, pieces)
    nisa.tensor_scalar(dst=block_PC, data=block_PC, op0=nl.multiply, operand0=float(kv_heads * places))
    nisa.tensor_tensor(dst=index_PC, data1=block_PC, data2=inside_PC, op=nl.add)
    return index_PC.reshape((P, count, width // run))


def gather(dst_PRD, pool, head, index_P1):
    """Neighbouring positions of a kv head on each partition, (128, run, D), from where `run_index` says."""
    _, run, dim = dst_PRD.shape
    blocks, kv_heads = pool.shape[0], pool.shape[1]
    flat = pool.reshape((blocks * kv_heads * BLOCK // run, run * dim))
    rows = flat.ap([[run * dim, P], [1, run * dim]], offset=head * BLOCK * dim, vector_offset=index_P1)
    nisa.dma_copy(dst=dst_PRD, src=rows)


def turn(dst_DW, rows_PRD):
    """Gathered keys (128, RUN, D), turned: (D, 1024) in the order of their positions."""
    _, run, dim = rows_PRD.shape
    psum_DRP = nl.ndarray((dim, run, P), dtype=rows_PRD.dtype, buffer=nl.psum)
    for j in range(run):
        nisa.nc_transpose(dst=psum_DRP[:, j, :], data=rows_PRD[:, j, :])
    nisa.tensor_copy(dst=dst_DW, src=psum_DRP.permute((0, 2, 1)), engine=nisa.engine.scalar)


def rows_in_pool(pool, positions_BN, table_BL, first, rows):
    """Where new rows go: the rows `first` to `first + rows` of (B, N), for the first kv head, int32 (R, 1).

    In rows of the flattened pool (blocks * G * 128, D); behind its end for a row without a block: at a negative
    position, beyond the table, or where the entry is 0.
    """
    width, kv_heads, end = table_BL.shape[1], pool.shape[1], pool.shape[0] * pool.shape[1] * BLOCK
    slot_R1, inside_R1 = nl.ndarray((rows, 1), dtype=nl.int32), nl.ndarray((rows, 1), dtype=nl.int32)
    move(slot_R1, positions_BN.ap([[1, rows], [1, 1]], offset=first))
    candidates = positions_BN.shape[1]
    entries_R1 = ramp(rows, candidates, width, 0, first // candidates * width)
    nisa.tensor_scalar(
        dst=inside_R1, data=slot_R1, op0=nl.maximum, operand0=0.0, op1=nl.minimum, operand1=float(width * BLOCK - 1)
    )
    tile_R1, place_R1 = nl.ndarray((rows, 1), dtype=nl.int32), nl.ndarray((rows, 1), dtype=nl.int32)
    nisa.tensor_scalar(dst=tile_R1, data=inside_R1, op0=nl.right_shift, operand0=int(math.log2(BLOCK)))
    nisa.tensor_scalar(dst=place_R1, data=inside_R1, op0=nl.bitwise_and, operand0=BLOCK - 1)
    entry_R1, block_R1 = nl.ndarray((rows, 1), dtype=nl.int32), nl.ndarray((rows, 1), dtype=nl.int32)
    nisa.tensor_tensor(dst=entry_R1, data1=tile_R1, data2=entries_R1, op=nl.add)
    table = table_BL.reshape((table_BL.shape[0] * width, 1))
    nisa.dma_copy(dst=block_R1, src=table.ap([[1, rows], [1, 1]], vector_offset=entry_R1))
    held_R1, row_R1 = nl.ndarray((rows, 1), dtype=nl.float32), nl.ndarray((rows, 1), dtype=nl.float32)
    index_R1 = nl.ndarray((rows, 1), dtype=nl.int32)
    nisa.tensor_tensor(dst=held_R1, data1=slot_R1, data2=inside_R1, op=nl.equal)
    nisa.scalar_tensor_tensor(
        dst=held_R1, data=block_R1, op0=nl.greater, operand0=0.0, op1=nl.multiply, operand1=held_R1
    )
    nisa.tensor_scalar(
        dst=held_R1, data=held_R1, op0=nl.multiply, operand0=-float(end), op1=nl.add, operand1=float(end)
    )
    nisa.scalar_tensor_tensor(
        dst=row_R1, data=block_R1, op0=nl.multiply, operand0=float(kv_heads * BLOCK), op1=nl.add, operand1=place_R1
    )
    nisa.tensor_tensor(dst=index_R1, data1=row_R1, data2=held_R1, op=nl.add)
    return index_R1


def scatter(pool, head, rows_RD, index_R1):
    """Write a kv head's new rows where `rows_in_pool` says; those without a block are dropped."""
    rows, dim = rows_RD.shape
    flat = pool.reshape((pool.shape[0] * pool.shape[1] * BLOCK, dim))
    target = flat.ap([[dim, rows], [1, dim]], offset=head * BLOCK * dim, vector_offset=index_R1)
    nisa.dma_copy(dst=target, src=rows_RD, oob_mode=nisa.oob_mode.skip)


def append(new, pools, places, rows, heads):
    """Scatter new keys and values (B, G, N, D) to the pools: rows[0] to rows[1] of (B, N) of the heads heads[0] to [1].

    places is (positions (B, N), block_table (B, S / 128)). The rows are those of whole sequences, or of one.
    """
    candidates, dim = new[0].shape[2], new[0].shape[3]
    # up to 128 rows at a time, in whole sequences where several fit
    each = P
    if candidates < P:
        each = P // candidates * candidates
    for first in range(rows[0], rows[1], each):
        count = min(each, rows[1] - first)
        index_R1 = rows_in_pool(pools[0], places[0], places[1], first, count)
        for i in range(2):
            for head in range(heads[0], heads[1]):
                rows_RD = nl.ndarray((count, dim), dtype=new[i].dtype)
                move(rows_RD, rows_of_head(new[i], head, first, count))
                scatter(pools[i], head, rows_RD, index_R1)


def rows_of_head(new_BGND, head, first, rows):
    """The rows `first` to `first + rows` of (B, N) of a kv head in HBM: whole sequences, or within one."""
    _, kv_heads, candidates, dim = new_BGND.shape
    sequence, inside = first // candidates, first % candidates
    offset = ((sequence * kv_heads + head) * candidates + inside) * dim
    if rows <= candidates - inside:
        return new_BGND.ap([[dim, rows], [1, dim]], offset=offset)
    return new_BGND.ap([[kv_heads * candidates * dim, rows // candidates], [dim, candidates], [1, dim]], offset=offset)


@nki.jit
def append_rows_kernel(k_new, v_new, k_pages, v_pages, positions, block_table):
    """The pools (blocks, G, 128, D) with a prompt's new keys and values (1, G, C, D) at positions (1, C); two cores
    write half of the rows each. block_table (1, S / 128) int32; rows without a block are dropped.
    """
    rows = share_of_core(k_new.shape[2], BLOCK)
    append((k_new, v_new), (k_pages, v_pages), (positions, block_table), rows, (0, k_new.shape[1]))
    return k_pages, v_pages
