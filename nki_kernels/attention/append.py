"""How new rows get into the cache: scatters of value rows, and of key rows where keys are not transposed.

Addresses are computed in fp32, which is exact below 2^24 rows; the host refuses a larger cache.
"""

import math

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.rows import P, move, of_groups, ramp


def groups_per_scatter(t):
    """How many groups' new rows fit one scatter of up to 128 rows."""
    per = P // t.candidates
    if per > t.kv_heads:
        return per // t.kv_heads * t.kv_heads
    while t.kv_heads % per:
        per = per - 1
    return per


def new_rows(source, t, group, count):
    """New key or value rows of some groups: SBUF (groups * N, D)."""
    rows = count * t.candidates
    made = nl.ndarray((rows, t.dim), dtype=source.dtype)
    move(made, source.ap([[t.dim, rows], [1, t.dim]], offset=group * t.candidates * t.dim))
    return made


def append_values(values, new_values, positions, t, groups):
    """Scatter the new value rows of groups[0] to groups[1] to their slots before anything reads them."""
    n, per = t.candidates, groups_per_scatter(t)
    flat = values.reshape((t.groups * t.slots, t.dim))
    for group in range(groups[0], groups[1], per):
        count = min(per, groups[1] - group)
        rows = count * n
        base, new = of_groups(positions, t, group, count, n, 0), new_rows(new_values, t, group, count)
        start, row = ramp(rows, n, t.slots, 1, group * t.slots), nl.ndarray((rows, 1), dtype=nl.int32)
        nisa.tensor_tensor(dst=row, data1=start, data2=base, op=nl.add)
        nisa.dma_copy(dst=flat.ap([[t.dim, rows], [1, t.dim]], vector_offset=row), src=new)


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
    rows, kv, width = count * n, t.kv_heads, table.shape[1]
    # what does not depend on positions comes first, while these travel
    base, index = of_groups(positions, t, group, count, n, 0), ramp(rows, n, 0, 1, 0)
    row, heads = ramp(rows, n * kv, width, 0, group // kv * width), ramp(rows, n, length, 0, group % kv * length)
    back = ramp(rows, n * kv, kv * length, 0, 0)
    slot, block = nl.ndarray((rows, 1), dtype=nl.int32), nl.ndarray((rows, 1), dtype=nl.int32)
    nisa.tensor_tensor(dst=slot, data1=index, data2=base, op=nl.add)
    nisa.tensor_scalar(dst=block, data=slot, op0=nl.right_shift, operand0=int(math.log2(length)))
    at, entry = nl.ndarray((rows, 1), dtype=nl.int32), nl.ndarray((rows, 1), dtype=nl.int32)
    nisa.tensor_tensor(dst=at, data1=block, data2=row, op=nl.add)
    nisa.dma_copy(dst=entry, src=table.reshape((table.shape[0] * width, 1)).ap([[1, rows], [1, 1]], vector_offset=at))
    # entry * G * L + (g * L + place), where g counts the heads within a sequence
    whole, inside = nl.ndarray((rows, 1), dtype=nl.float32), nl.ndarray((rows, 1), dtype=nl.float32)
    nisa.tensor_scalar(dst=slot, data=slot, op0=nl.bitwise_and, operand0=length - 1)
    nisa.tensor_tensor(dst=inside, data1=heads, data2=slot, op=nl.add)
    if count >= kv:
        nisa.tensor_tensor(dst=inside, data1=inside, data2=back, op=nl.subtract)
    nisa.tensor_scalar(dst=whole, data=entry, op0=nl.multiply, operand0=float(kv * length))
    made = nl.ndarray((rows, 1), dtype=nl.int32)
    nisa.tensor_tensor(dst=made, data1=whole, data2=inside, op=nl.add)
    return made
