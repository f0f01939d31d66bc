"""Verification attention over a paged cache: the law of verify_attention, the same bits, different addresses.

Pages (blocks, G, L, D) for keys and values, L a power of two; slot s of sequence b lies in block
block_table[b, s // L] at place s % L. New rows are scattered to their pages, then runs of eight keys are
gathered by index; keys are turned on the Tensor Engine, bit for bit.
"""

import math

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.append import append_pages
from nki_kernels.attention.pipeline import attend, outputs, plan
from nki_kernels.attention.rows import CHUNK, RUN, first_slots, groups_of_core, tiling
from nki_kernels.attention.state import Launch
from nki_kernels.tiles import P, move


class Pages(nl.NKIObject):
    """A paged cache in HBM, keys and values (blocks, G, L, D), and where each sequence's blocks are, (B, S / L)."""

    def __init__(self, keys, values, table, t):
        self.keys = keys
        self.values = values
        self.table = table
        self.t = t
        self.dtype = values.dtype
        self.length = keys.shape[2]
        # for each kv head the run's place within its block: fp32 (P, 1)
        self.inside_P1 = places_inside(self.length // RUN, t)

    def load_keys(self, chunk):
        """Gather the keys of one chunk and turn them: (D, groups, W)."""
        t, pack = self.t, chunk.pack
        if chunk.index == 0:
            for i in range(pack.count):
                pack.runs_PC.append(self.run_index(pack.group + i))
        rows_TGRD = self.gather(self.keys, chunk)
        runs = rows_TGRD.shape[0]
        chunk.keys_DGW = nl.ndarray((t.dim, pack.count, runs * RUN), dtype=self.dtype)
        for i in range(pack.count):
            turned_psum_DRP = nl.ndarray((t.dim, RUN, P), dtype=self.dtype, buffer=nl.psum)
            for j in range(RUN):
                nisa.nc_transpose(dst=turned_psum_DRP[:, j, 0:runs], data=rows_TGRD[:, i, j, :])
            by_key = turned_psum_DRP[:, :, 0:runs].permute((0, 2, 1))
            nisa.tensor_copy(dst=chunk.keys_DGW[:, i, :], src=by_key, engine=nisa.engine.scalar)

    def load_values(self, chunk):
        """Gather the values of one chunk: (W / RUN, groups, RUN, D)."""
        chunk.values_TGRD = self.gather(self.values, chunk)

    def append(self, pack):
        """Nothing: the new rows are in their pages before the first gather."""

    def gather(self, pages, chunk):
        """Runs of eight keys, one per partition: (W / RUN, groups, RUN, D)."""
        t, runs, run = self.t, math.ceil(chunk.size / RUN), RUN * self.t.dim
        flat = pages.reshape((pages.shape[0] * t.kv_heads * self.length // RUN, run))
        rows_TGRD = nl.ndarray((runs, chunk.pack.count, RUN, t.dim), dtype=pages.dtype)
        for i in range(chunk.pack.count):
            index_T1 = chunk.pack.runs_PC[i][0:runs, chunk.index : chunk.index + 1]
            nisa.dma_copy(dst=rows_TGRD[:, i, :, :], src=flat.ap([[run, runs], [1, run]], vector_offset=index_T1))
        return rows_TGRD

    def run_index(self, group):
        """Row of the flattened pages for each run of each chunk of a group: int32 (P, chunks)."""
        t, runs = self.t, self.length // RUN
        chunks, whole = math.ceil(t.slots / CHUNK), t.slots // CHUNK
        sequence, head = group // t.kv_heads, group % t.kv_heads
        block_PC, index_PC = nl.ndarray((P, chunks), dtype=nl.int32), nl.ndarray((P, chunks), dtype=nl.int32)
        per = max(1, P // runs)
        # the blocks of a chunk, each repeated for its runs; a block longer than a chunk serves several
        spread = max(1, runs // P)
        if whole:
            pattern = [[1, per], [0, P // per], [per, whole // spread], [0, spread]]
            offset = sequence * self.table.shape[1]
            move(block_PC[:, 0 : whole // spread * spread], self.table.ap(pattern, offset=offset))
        rest = (t.slots - whole * CHUNK) // RUN
        if rest:
            nisa.memset(dst=block_PC[:, whole:chunks], value=0)
            pattern = [[1, math.ceil(rest / runs)], [0, min(runs, rest)], [1, 1]]
            offset = sequence * self.table.shape[1] + whole * per
            move(block_PC[0:rest, whole:chunks], self.table.ap(pattern, offset=offset))
        # block * (G * runs) + the head's part + the run's place in its block
        nisa.tensor_scalar(
            dst=index_PC,
            data=block_PC,
            op0=nl.multiply,
            operand0=float(t.kv_heads * runs),
            op1=nl.add,
            operand1=self.inside_P1[head],
        )
        if spread > 1:
            phase_PC = nl.ndarray((P, chunks // spread, spread), dtype=nl.float32)
            nisa.iota(dst=phase_PC, pattern=[[0, chunks // spread], [P, spread]], offset=0, channel_multiplier=0)
            nisa.tensor_tensor(dst=index_PC, data1=index_PC, data2=phase_PC, op=nl.add)
        return index_PC


def places_inside(runs, t):
    """For each kv head the run's place within its block, with the head's offset: fp32 (P, 1) each."""
    place_P1, places = nl.ndarray((P, 1), dtype=nl.int32), []
    nisa.iota(dst=place_P1, pattern=[[0, 1]], offset=0, channel_multiplier=1)
    nisa.tensor_scalar(dst=place_P1, data=place_P1, op0=nl.bitwise_and, operand0=runs - 1)
    for head in range(t.kv_heads):
        shifted_P1 = nl.ndarray((P, 1), dtype=nl.float32)
        nisa.tensor_scalar(dst=shifted_P1, data=place_P1, op0=nl.add, operand0=float(head * runs))
        places.append(shifted_P1)
    return places


@nki.jit
def verify_attention_paged_kernel(
    q, k_new, v_new, k_pages, v_pages, positions, block_table, ancestors=None, with_lse=False
):
    """Append the new rows to their pages, then attend; outputs as verify_attention_kernel's.

    k_pages and v_pages (blocks, G, L, D), block_table (B, S / L) int32. The pages change in place.
    """
    t = tiling(q.shape, k_pages.shape[1], block_table.shape[1] * k_pages.shape[2], gathered=True)
    out, lse = outputs(q, with_lse)
    first, last = groups_of_core(t)
    if first < last:
        slots_1B = first_slots(positions)
        append_pages((k_new, v_new), (k_pages, v_pages), positions, block_table, t, (first, last))
        cache = Pages(k_pages, v_pages, block_table, t)
        launch = Launch(t, cache, (positions, ancestors, slots_1B), (out, lse))
        attend(launch, plan(q, t, first, last))
    if with_lse:
        return out, lse
    return out
