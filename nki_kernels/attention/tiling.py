"""The tiling of verification and decode attention: groups of rows, packs of groups, the rows' limits.

The (H / G) * N rows of one (sequence, kv head) group are adjacent; a pack of groups shares the engines. R are the rows
of a pack.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.limits import CHUNK
from nki_kernels.tiles import BANK, P, absent, core_slice, dma_static


@dataclass(frozen=True)
class Tiling(nl.NKIObject):
    """The dims of a launch: `pack` groups of `queries` = (H / G) * N rows share one pass over the engines."""

    groups: int
    kv_heads: int
    queries: int
    candidates: int
    length: int
    dim: int
    pack: int


class Pack(nl.NKIObject):
    """`count` groups from `group` on, and the last position that each of their rows attends, fp32 (R, 1)."""

    def __init__(self, group, count, limit_R1):
        self.group = group
        self.count = count
        self.limit_R1 = limit_R1


def tiling(shape, kv_heads, length):
    """Integer dims of queries (B, H, N, D); the groups of one pack are full sequences or lie within one."""
    batch, heads, candidates, dim = shape
    rows, groups = heads // kv_heads * candidates, batch * kv_heads
    largest = min(P // rows, BANK // dim)
    # small launches use two packs, so that the engines overlap
    if groups * length <= 4 * CHUNK:
        largest = min(largest, 2)
    pack = 1
    for size in range(1, largest + 1):
        if size % kv_heads == 0 or kv_heads % size == 0:
            pack = size
    return Tiling(groups, kv_heads, rows, candidates, length, dim, pack)


def groups_of_core(t):
    """This core's groups, first and last: all, or about half, in full sequences if there is more than one."""
    unit = 1
    if t.groups > t.kv_heads:
        unit = t.kv_heads
    return core_slice(t.groups, unit)


def packs_of(t, groups, positions_BN, limit_B1):
    """The packs of groups[0] to groups[1]; `limit_B1` is the operand of block drafts or None."""
    packs = []
    for group in range(groups[0], groups[1], t.pack):
        count = min(t.pack, groups[1] - group)
        packs.append(Pack(group, count, row_limits(positions_BN, limit_B1, t, (group, count))))
    return packs


def load_per_row(table, t, pack, each_row):
    """int32 (R, 1) of a (B, N) table in HBM: with `each_row` each row's entry, else the first of its sequence."""
    kv, width, group, count = t.kv_heads, table.shape[1], pack[0], pack[1]
    sequences, heads = 1, count
    if count >= kv:
        sequences, heads = count // kv, kv
    fastest, repeats, step = 1, t.queries, 0
    if each_row:
        fastest, repeats, step = t.candidates, t.queries // t.candidates, 1
    entries_R1 = nl.ndarray((count * t.queries, 1), dtype=nl.int32)
    pattern = [[width, sequences], [0, heads * repeats], [step, fastest], [1, 1]]
    dma_static(entries_R1, table.ap(pattern, offset=group // kv * width))
    return entries_R1


def row_limits(positions_BN, limit_B1, t, pack):
    """The last position that each row of a pack, (group, count), attends, fp32 (R, 1): its own, or its sequence's."""
    limit_R1 = nl.ndarray((pack[1] * t.queries, 1), dtype=nl.float32)
    if absent(limit_B1):
        nisa.tensor_copy(dst=limit_R1, src=load_per_row(positions_BN, t, pack, True))
    else:
        nisa.tensor_copy(dst=limit_R1, src=load_per_row(limit_B1, t, pack, False))
    return limit_R1
