"""How new rows get into a contiguous cache: scatters of value rows.

Addresses are computed in fp32, which is exact below 2^24 rows; the host refuses a larger cache.
"""

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
