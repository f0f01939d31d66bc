"""Verification attention over a paged cache: the law of verify_attention, the same bits, other addresses.

Pages (blocks, G, L, D) for keys and values, L a power of two; slot s of sequence b lies in block
block_table[b, s // L] at place s % L. New rows are scattered to their pages, then runs of eight keys are
gathered by index; keys are turned on the Tensor Engine, bit for bit.
"""

import math

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.append import append_pages
from nki_kernels.attention.pipeline import Rows, attend, outputs, plan
from nki_kernels.attention.rows import CHUNK, RUN, P, first_and_last, first_slots, move, tiling


class Pages(nl.NKIObject):
    """A paged cache and the table that says where each sequence's blocks are."""

    def __init__(self, keys, values, table, t):
        self.keys = keys
        self.values = values
        self.table = table
        self.t = t
        self.dtype = values.dtype
        self.length = keys.shape[2]
        self.inside = places_inside(self.length // RUN, t)

    def load_keys(self, step):
        """Gather the keys of one chunk and turn them: (D, groups, W)."""
        t, count = self.t, step.pack.count
        if step.chunk == 0:
            step.pack.runs = []
            for i in range(count):
                step.pack.runs.append(self.run_index(step.pack.group + i))
        rows = self.gather(self.keys, step)
        per = rows.shape[0]
        step.keys = nl.ndarray((t.dim, count, per * RUN), dtype=self.dtype)
        step.key = 0
        for i in range(count):
            turned = nl.ndarray((t.dim, RUN, P), dtype=self.dtype, buffer=nl.psum)
            for j in range(RUN):
                nisa.nc_transpose(dst=turned[:, j, 0:per], data=rows[:, i, j, :])
            by_key = turned[:, :, 0:per].permute((0, 2, 1))
            nisa.tensor_copy(dst=step.keys[:, i, :], src=by_key, engine=nisa.engine.scalar)

    def load_values(self, step):
        """Gather the values of one chunk: (W / RUN, groups, RUN, D)."""
        step.values = self.gather(self.values, step)

    def append(self, pack):
        """Nothing: the new rows are in their pages before the first gather."""

    def gather(self, pages, step):
        """Runs of eight keys, one per partition."""
        t, per, run = self.t, math.ceil(step.size / RUN), RUN * self.t.dim
        flat = pages.reshape((pages.shape[0] * t.kv_heads * self.length // RUN, run))
        made = nl.ndarray((per, step.pack.count, RUN, t.dim), dtype=pages.dtype)
        for i in range(step.pack.count):
            index = step.pack.runs[i][0:per, step.chunk : step.chunk + 1]
            nisa.dma_copy(dst=made[:, i, :, :], src=flat.ap([[run, per], [1, run]], vector_offset=index))
        return made

    def run_index(self, group):
        """Row of the flattened pages for each run of each chunk of a group: int32 (P, chunks)."""
        t, runs = self.t, self.length // RUN
        chunks, whole = math.ceil(t.slots / CHUNK), t.slots // CHUNK
        sequence, head = group // t.kv_heads, group % t.kv_heads
        block, made = nl.ndarray((P, chunks), dtype=nl.int32), nl.ndarray((P, chunks), dtype=nl.int32)
        per = max(1, P // runs)
        # the blocks of a chunk, each repeated for its runs; a block longer than a chunk serves several
        spread = max(1, runs // P)
        if whole:
            pattern = [[1, per], [0, P // per], [per, whole // spread], [0, spread]]
            move(block[:, 0 : whole // spread * spread], self.table.ap(pattern, offset=sequence * self.table.shape[1]))
        rest = (t.slots - whole * CHUNK) // RUN
        if rest:
            nisa.memset(dst=block[:, whole:chunks], value=0)
            pattern = [[1, math.ceil(rest / runs)], [0, min(runs, rest)], [1, 1]]
            offset = sequence * self.table.shape[1] + whole * per
            move(block[0:rest, whole:chunks], self.table.ap(pattern, offset=offset))
        # block * (G * runs) + the head's part + the run's place in its block
        nisa.tensor_scalar(
            dst=made,
            data=block,
            op0=nl.multiply,
            operand0=float(t.kv_heads * runs),
            op1=nl.add,
            operand1=self.inside[head],
        )
        if spread > 1:
            phase = nl.ndarray((P, chunks // spread, spread), dtype=nl.float32)
            nisa.iota(dst=phase, pattern=[[0, chunks // spread], [P, spread]], offset=0, channel_multiplier=0)
            nisa.tensor_tensor(dst=made, data1=made, data2=phase, op=nl.add)
        return made


def places_inside(runs, t):
    """For each kv head the run's place within its block, with the head's offset: fp32 (P, 1) each."""
    place, made = nl.ndarray((P, 1), dtype=nl.int32), []
    nisa.iota(dst=place, pattern=[[0, 1]], offset=0, channel_multiplier=1)
    nisa.tensor_scalar(dst=place, data=place, op0=nl.bitwise_and, operand0=runs - 1)
    for head in range(t.kv_heads):
        shifted = nl.ndarray((P, 1), dtype=nl.float32)
        nisa.tensor_scalar(dst=shifted, data=place, op0=nl.add, operand0=float(head * runs))
        made.append(shifted)
    return made


@nki.jit
def verify_attention_paged_kernel(q, new, k_pages, v_pages, positions, block_table, ancestors=None, with_lse=False):
    """Append the new rows (k_new, v_new) to their pages, then attend; outputs as verify_attention_kernel's.

    k_pages and v_pages (blocks, G, L, D), block_table (B, S / L) int32. The pages change in place.
    """
    t = tiling(q, k_pages.shape[1], block_table.shape[1] * k_pages.shape[2], gathered=True)
    out, lse = outputs(q, with_lse)
    first, last = first_and_last(t)
    if first < last:
        slots = first_slots(positions)
        append_pages(new, (k_pages, v_pages), positions, block_table, t, (first, last))
        cache = Pages(k_pages, v_pages, block_table, t)
        attend(Rows(positions, ancestors, out, lse), cache, slots, t, plan(q, t, first, last))
    if with_lse:
        return out, lse
    return out
