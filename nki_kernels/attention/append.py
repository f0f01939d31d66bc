"""How new rows get into the cache: scatters of value rows, and of key rows where keys are not transposed.

Addresses are computed in fp32, which is exact below 2^24 rows; the host refuses a larger cache.
"""

import math

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.rows import of_groups
from nki_kernels.tiles import P, move, ramp


def groups_per_scatter(t):
    """How many groups' new rows fit one scatter of up to 128 rows."""
    per = P // t.candidates
    if per > t.kv_heads:
        return per // t.kv_heads * t.kv_heads
    while t.kv_heads % per:
        per = per - 1
    return per


def new_rows(new_BGND, t, group, count):
    """New key or value rows of some groups: SBUF (groups * N, D)."""
    rows = count * t.candidates
    new_RD = nl.ndarray((rows, t.dim), dtype=new_BGND.dtype)
    move(new_RD, new_BGND.ap([[t.dim, rows], [1, t.dim]], offset=group * t.candidates * t.dim))
    return new_RD


def append_values(values_BGSD, new_BGND, positions_BN, t, groups):
    """Scatter the new value rows of groups[0] to groups[1] to their slots before anything reads them."""
    n, per = t.candidates, groups_per_scatter(t)
    flat = values_BGSD.reshape((t.groups * t.slots, t.dim))
    for group in range(groups[0], groups[1], per):
        count = min(per, groups[1] - group)
        rows = count * n
        slot_R1, new_RD = of_groups(positions_BN, t, group, count, n, 0), new_rows(new_BGND, t, group, count)
        first_R1, row_R1 = ramp(rows, n, t.slots, 1, group * t.slots), nl.ndarray((rows, 1), dtype=nl.int32)
        nisa.tensor_tensor(dst=row_R1, data1=first_R1, data2=slot_R1, op=nl.add)
        nisa.dma_copy(dst=flat.ap([[t.dim, rows], [1, t.dim]], vector_offset=row_R1), src=new_RD)


def append_pages(new, pages, positions_BN, table, t, groups):
    """Scatter the new key and value rows of groups[0] to groups[1] to their pages before anything is read."""
    per = groups_per_scatter(t)
    for group in range(groups[0], groups[1], per):
        count = min(per, groups[1] - group)
        row_R1 = page_rows(pages[0].shape[2], positions_BN, table, t, (group, count))
        for i in range(2):
            flat = pages[i].reshape((pages[i].shape[0] * t.kv_heads * pages[i].shape[2], t.dim))
            new_RD = new_rows(new[i], t, group, count)
            nisa.dma_copy(dst=flat.ap([[t.dim, row_R1.shape[0]], [1, t.dim]], vector_offset=row_R1), src=new_RD)


def page_rows(length, positions_BN, table, t, span):
    """The row of the flattened pages for each new (group, n) row: int32 (rows, 1)."""
    n, group, count = t.candidates, span[0], span[1]
    rows, kv, width = count * n, t.kv_heads, table.shape[1]
    # work that does not depend on positions comes first, while these travel
    first_R1, index_R1 = of_groups(positions_BN, t, group, count, n, 0), ramp(rows, n, 0, 1, 0)
    sequence_R1 = ramp(rows, n * kv, width, 0, group // kv * width)
    heads_R1 = ramp(rows, n, length, 0, group % kv * length)
    back_R1 = ramp(rows, n * kv, kv * length, 0, 0)
    slot_R1, block_R1 = nl.ndarray((rows, 1), dtype=nl.int32), nl.ndarray((rows, 1), dtype=nl.int32)
    nisa.tensor_tensor(dst=slot_R1, data1=index_R1, data2=first_R1, op=nl.add)
    nisa.tensor_scalar(dst=block_R1, data=slot_R1, op0=nl.right_shift, operand0=int(math.log2(length)))
    at_R1, page_R1 = nl.ndarray((rows, 1), dtype=nl.int32), nl.ndarray((rows, 1), dtype=nl.int32)
    nisa.tensor_tensor(dst=at_R1, data1=block_R1, data2=sequence_R1, op=nl.add)
    entries = table.reshape((table.shape[0] * width, 1))
    nisa.dma_copy(dst=page_R1, src=entries.ap([[1, rows], [1, 1]], vector_offset=at_R1))
    # page * G * L + (g * L + place), where g counts the heads within a sequence
    whole_R1, inside_R1 = nl.ndarray((rows, 1), dtype=nl.float32), nl.ndarray((rows, 1), dtype=nl.float32)
    nisa.tensor_scalar(dst=slot_R1, data=slot_R1, op0=nl.bitwise_and, operand0=length - 1)
    nisa.tensor_tensor(dst=inside_R1, data1=heads_R1, data2=slot_R1, op=nl.add)
    if count >= kv:
        # of one whole sequence `back` is 0
        nisa.tensor_tensor(dst=inside_R1, data1=inside_R1, data2=back_R1, op=nl.subtract)
    nisa.tensor_scalar(dst=whole_R1, data=page_R1, op0=nl.multiply, operand0=float(kv * length))
    row_R1 = nl.ndarray((rows, 1), dtype=nl.int32)
    nisa.tensor_tensor(dst=row_R1, data1=whole_R1, data2=inside_R1, op=nl.add)
    return row_R1
