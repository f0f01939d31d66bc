"""The rows of verification attention: tiling, and the small operands that follow from positions.

Rows of one (sequence, kv head) group, (H / G) x N of them, lie together; groups are packed on the partitions.
positions and ancestors are (B, N) int32 in HBM; R are the rows of a pack.
"""

import math
from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.limits import CHUNK
from nki_kernels.tiles import BANK, P, move, ramp, share_of_core

# consecutive keys on one partition: values move in rows of RUN * D elements
RUN = 8
# key tiles that are turned and copied together
HALF = 4
HIDDEN = -1.0e30


@dataclass(frozen=True)
class Tiling(nl.NKIObject):
    """The dims of a launch: `pack` groups share one pass over the engines, `queries` is (H / G) * N.

    Lags are in turns of the pipeline: a chunk's keys travel `ahead` of its scores, which are turned `turn` and weighed
    `weigh` later; with `halves` the second half of the key tiles is weighed one turn after the first.
    """

    groups: int
    kv_heads: int
    queries: int
    candidates: int
    slots: int
    dim: int
    pack: int
    ahead: int
    turn: int
    weigh: int
    halves: bool


def tiling(shape, kv_heads, slots, gathered=False):
    """Integer dims of queries (B, H, N, D); the groups of one pack are whole sequences or lie within one."""
    batch, heads, candidates, dim = shape
    rows, groups = heads // kv_heads * candidates, batch * kv_heads
    most = min(P // rows, BANK // dim)
    # little work is cut in two, so that the engines have something to overlap
    if groups * slots <= 4 * CHUNK:
        most = min(most, 2)
    pack = 1
    for size in range(1, most + 1):
        if size % kv_heads == 0 or kv_heads % size == 0:
            pack = size
    # long lags keep the memory busy to the end; where several packs of many rows wait for the engines they cost time
    ahead, turn, weigh = 1, 2, 3
    if gathered:
        ahead = 2
    elif groups <= pack or pack * rows <= P // 2:
        ahead, turn, weigh = 3, 3, 4
    # of two chunks the second's turns come between the first's products
    halves = math.ceil(slots / CHUNK) * math.ceil(groups / pack) <= 2
    if halves:
        ahead, turn, weigh = 1, 2, 2
    return Tiling(groups, kv_heads, rows, candidates, slots, dim, pack, ahead, turn, weigh, halves)


def is_short(t):
    """Whether one or two packs of one chunk each are all there is, so that latency counts and not the memory's rate."""
    return t.halves and t.slots <= CHUNK


def groups_of_core(t):
    """This core's groups, first and last: of two cores about half each, in whole sequences if there are several."""
    unit = 1
    if t.groups > t.kv_heads:
        unit = t.kv_heads
    return share_of_core(t.groups, unit)


def first_slots(positions_BN):
    """The slot of each sequence's row 0: int32 (1, B)."""
    batch, candidates = positions_BN.shape
    slots_1B = nl.ndarray((1, batch), dtype=nl.int32)
    move(slots_1B, positions_BN.ap([[0, 1], [candidates, batch]], offset=0))
    return slots_1B


def of_groups(table_BN, t, group, count, inner, step):
    """Each group's entries of a (B, N) table on `inner` rows, int32 (rows, 1): the first, or all N if step=1."""
    n, kv = t.candidates, t.kv_heads
    fastest, repeats = 1, inner
    if step:
        fastest, repeats = n, inner // n
    sequences, heads = 1, count
    if count >= kv:
        sequences, heads = count // kv, kv
    entries_R1 = nl.ndarray((count * inner, 1), dtype=nl.int32)
    pattern = [[n, sequences], [0, heads * repeats], [step, fastest], [1, 1]]
    move(entries_R1, table_BN.ap(pattern, offset=group // kv * n))
    return entries_R1


def columns(slots_1B, t):
    """Where the candidates begin in each chunk with a margin of N on both sides: int32 (1, chunks, B)."""
    batch, n, chunks = slots_1B.shape[1], t.candidates, math.ceil(t.slots / CHUNK)
    columns_1CB = nl.ndarray((1, chunks, batch), dtype=nl.int32)
    inside_1CB = nl.ndarray((1, chunks, batch), dtype=nl.float32)
    for i in range(chunks):
        size, inside, column = min(CHUNK, t.slots - i * CHUNK), inside_1CB[:, i, :], columns_1CB[:, i, :]
        nisa.tensor_scalar(
            dst=inside, data=slots_1B, op0=nl.add, operand0=float(n - i * CHUNK), op1=nl.maximum, operand1=0.0
        )
        nisa.tensor_scalar(dst=column, data=inside, op0=nl.minimum, operand0=float(size + n))
    return columns_1CB


def row_limits(positions_BN, t, pack, tree):
    """The last slot that each row may see, fp32 (R, 1): its own in a chain, the last candidate's in a tree."""
    limit_R1 = nl.ndarray((pack.count * t.queries, 1), dtype=nl.float32)
    if tree:
        first_R1 = of_groups(positions_BN, t, pack.group, pack.count, t.queries, 0)
        nisa.tensor_scalar(dst=limit_R1, data=first_R1, op0=nl.add, operand0=float(t.candidates - 1))
    else:
        nisa.tensor_copy(dst=limit_R1, src=of_groups(positions_BN, t, pack.group, pack.count, t.queries, 1))
    return limit_R1


def hidden_candidates(ancestors_BN, t, pack):
    """HIDDEN for a candidate that is not the row's ancestor, else 0, in the row's own group: fp32 (R, groups, N)."""
    rows, n = pack.count * t.queries, t.candidates
    bits_RN, index_RN = nl.ndarray((rows, n), dtype=nl.int32), nl.ndarray((rows, n), dtype=nl.int32)
    word_R1 = of_groups(ancestors_BN, t, pack.group, pack.count, t.queries, 1)
    nisa.iota(dst=index_RN, pattern=[[1, n]], offset=0, channel_multiplier=0)
    nisa.tensor_tensor(dst=bits_RN, data1=word_R1.broadcast(1, n), data2=index_RN, op=nl.right_shift)
    nisa.tensor_scalar(dst=bits_RN, data=bits_RN, op0=nl.bitwise_and, operand0=1)
    own_RN, group_R1 = nl.ndarray((rows, n), dtype=nl.float32), ramp(rows, t.queries, 1, 0, 0)
    nisa.tensor_scalar(dst=own_RN, data=bits_RN, op0=nl.subtract, operand0=1.0, op1=nl.multiply, operand1=-HIDDEN)
    hidden_RGN = nl.ndarray((rows, pack.count, n), dtype=nl.float32)
    mine_RG = nl.ndarray((rows, pack.count), dtype=nl.float32)
    for i in range(pack.count):
        nisa.tensor_scalar(dst=mine_RG[:, i : i + 1], data=group_R1, op0=nl.equal, operand0=float(i))
        nisa.tensor_scalar(dst=hidden_RGN[:, i, :], data=own_RN, op0=nl.multiply, operand0=mine_RG[:, i : i + 1])
    return hidden_RGN
