"""Verification attention over a paged cache: the law of verify_attention, the same bits, other addresses.

Pages (blocks, G, L, D) for keys and values, L a power of two; slot s of sequence b lies in block
block_table[b, s // L] at place s % L. New rows are scattered to their pages, then runs of four keys are
gathered by index; keys are turned on the Tensor Engine, bit for bit.
"""

import math

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.verify_attention_chunks import Rows, attend, plan
from nki_kernels.verify_attention_rows import (
    CHUNK,
    RUN,
    P,
    first_and_last,
    groups_per_scatter,
    move,
    new_rows,
    of_groups,
    ramp,
    tiling,
)


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
        step.keys = nl.ndarray((t.dim, count, rows.shape[0] * RUN), dtype=self.dtype)
        step.key = 0
        for i in range(count):
            turned = nl.ndarray((t.dim, RUN, rows.shape[0]), dtype=self.dtype, buffer=nl.psum)
            for j in range(RUN):
                nisa.nc_transpose(dst=turned[:, j, :], data=rows[:, i, j, :])
            nisa.tensor_copy(dst=step.keys[:, i, :], src=turned.permute((0, 2, 1)), engine=nisa.engine.scalar)

    def load_values(self, step):
        """Gather the values of one chunk: (W / RUN, groups, RUN, D)."""
        step.values = self.gather(self.values, step)

    def gather(self, pages, step):
        """Runs of four keys, one per partition."""
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
        nisa.tensor_scalar(dst=made, data=block, op0=nl.multiply, operand0=float(t.kv_heads * runs),
                           op1=nl.add, operand1=self.inside[head])  # fmt: skip
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


def append_pages(new, pages, positions, table, t, groups):
    """Scatter the new key and value rows of groups[0] to groups[1] to their pages before anything is read."""
    per = groups_per_scatter(t)
    for group in range(groups[0], groups[1], per):
        count = min(per, groups[1] - group)
        row = page_rows(pages[0].shape[2], positions, table, t, (group, count))
        for i in range(2):
            flat = pages[i].reshape((pages[i].shape[0] * t.kv_heads * pages[i].shape[2], t.dim))
            source = new_rows(new[i], t, group, count)
            nisa.dma_copy(dst=flat.ap([[t.dim, row.shape[0]], [1, t.dim]], vector_offset=row), src=source)


def page_rows(length, positions, table, t, span):
    """The row of the flattened pages for each new (group, n) row: int32 (rows, 1)."""
    n, group, count = t.candidates, span[0], span[1]
    rows, kv = count * n, t.kv_heads
    slot, block = nl.ndarray((rows, 1), dtype=nl.int32), nl.ndarray((rows, 1), dtype=nl.int32)
    base = of_groups(positions, t, group, count, n, 0)
    nisa.tensor_tensor(dst=slot, data1=ramp(rows, n, 0, 1, 0), data2=base, op=nl.add)
    nisa.tensor_scalar(dst=block, data=slot, op0=nl.right_shift, operand0=int(math.log2(length)))
    nisa.tensor_scalar(dst=slot, data=slot, op0=nl.bitwise_and, operand0=length - 1)
    at, entry = nl.ndarray((rows, 1), dtype=nl.int32), nl.ndarray((rows, 1), dtype=nl.int32)
    width = table.shape[1]
    nisa.tensor_tensor(dst=at, data1=block, data2=ramp(rows, n * kv, width, 0, group // kv * width), op=nl.add)
    nisa.dma_copy(dst=entry, src=table.reshape((table.shape[0] * width, 1)).ap([[1, rows], [1, 1]], vector_offset=at))
    # entry * G * L + (g * L + place), where g counts the heads within a sequence
    whole, inside = nl.ndarray((rows, 1), dtype=nl.float32), nl.ndarray((rows, 1), dtype=nl.float32)
    heads, back = ramp(rows, n, length, 0, group % kv * length), ramp(rows, n * kv, kv * length, 0, 0)
    nisa.tensor_tensor(dst=inside, data1=heads, data2=slot, op=nl.add)
    if count >= kv:
        nisa.tensor_tensor(dst=inside, data1=inside, data2=back, op=nl.subtract)
    nisa.tensor_scalar(dst=whole, data=entry, op0=nl.multiply, operand0=float(kv * length))
    made = nl.ndarray((rows, 1), dtype=nl.int32)
    nisa.tensor_tensor(dst=made, data1=whole, data2=inside, op=nl.add)
    return made


@nki.jit
def verify_attention_paged_kernel(q, new, k_pages, v_pages, positions, block_table, ancestors=None, with_lse=False):
    """Append the new rows (k_new, v_new) to their pages, then attend; outputs as verify_attention_kernel's.

    k_pages and v_pages (blocks, G, L, D), block_table (B, S / L) int32. The pages change in place.
    """
    batch, heads, count, _ = q.shape
    t = tiling(q, k_pages.shape[1], block_table.shape[1] * k_pages.shape[2])
    out, lse = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm), None
    if with_lse:
        lse = nl.ndarray((batch, heads, count), dtype=nl.float32, buffer=nl.shared_hbm)
    first, last = first_and_last(t)
    if first < last:
        slots = nl.ndarray((1, batch), dtype=nl.int32)
        move(slots, positions.ap([[0, 1], [count, batch]], offset=0))
        append_pages(new, (k_pages, v_pages), positions, block_table, t, (first, last))
        cache = Pages(k_pages, v_pages, block_table, t)
        attend(Rows(q, positions, ancestors, out, lse), cache, slots, t, plan(t, first, last))
    if with_lse:
        return out, lse
    return out
