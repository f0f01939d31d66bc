"""The rows of verification attention: tiling, and the small operands that are made from positions.

Rows of one (sequence, kv head) group, (H / G) x N of them, lie together; groups are packed on the partitions.
A helper's `positions` and `ancestors` are (B, N) int32 in HBM.
"""

import math
from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

P = 128
# columns of one matmul: a PSUM bank of fp32
BANK = 512
# keys per chunk: two banks of scores
CHUNK = 1024
# consecutive keys on one partition: values move in rows of RUN * D elements
RUN = 8
# key tiles that are turned and copied together
HALF = 4
HIDDEN = -1.0e30


@dataclass(frozen=True)
class Tiling(nl.NKIObject):
    """The dims of a launch: `pack` groups share one pass over the engines, `queries` is (H / G) * N.

    Lags are in steps: a chunk's keys travel `ahead` of its scores, which are turned `turn` and weighed `weigh` later;
    with `halves` the second half of the key tiles is weighed one step after the first.
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


def tiling(q, kv_heads, slots, gathered=False):
    """Integer dims; the groups of one pack are whole sequences or lie within one."""
    batch, heads, count, dim = q.shape
    rows, groups = heads // kv_heads * count, batch * kv_heads
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
    # of two steps the second's turns come between the first's products
    halves = math.ceil(slots / CHUNK) * math.ceil(groups / pack) <= 2
    if halves:
        ahead, turn, weigh = 1, 2, 2
    return Tiling(groups, kv_heads, rows, count, slots, dim, pack, ahead, turn, weigh, halves)


def first_and_last(t):
    """The groups of this core: each of two cores takes about half, in whole sequences if there are several."""
    if nl.program_ndim() == 0 or nl.num_programs() == 1:
        return 0, t.groups
    unit = 1
    if t.groups > t.kv_heads:
        unit = t.kv_heads
    half = math.ceil(t.groups / unit / 2) * unit
    if nl.program_id(0) == 0:
        return 0, half
    return half, t.groups


def move(dst, src):
    """A small transfer whose descriptors are made beforehand, so that many can follow each other."""
    nisa.dma_copy(dst=dst, src=src, dge_mode=nisa.dge_mode.none)


def first_slots(positions):
    """The slot of each sequence's row 0: int32 (1, B)."""
    batch, count = positions.shape
    made = nl.ndarray((1, batch), dtype=nl.int32)
    move(made, positions.ap([[0, 1], [count, batch]], offset=0))
    return made


def of_groups(table, t, group, count, inner, step):
    """Each group's entries of a (B, N) table on `inner` rows, int32 (rows, 1): the first, or all N if step=1."""
    n, kv = t.candidates, t.kv_heads
    fastest, repeats = 1, inner
    if step:
        fastest, repeats = n, inner // n
    sequences, heads = 1, count
    if count >= kv:
        sequences, heads = count // kv, kv
    made = nl.ndarray((count * inner, 1), dtype=nl.int32)
    pattern = [[n, sequences], [0, heads * repeats], [step, fastest], [1, 1]]
    move(made, table.ap(pattern, offset=group // kv * n))
    return made


def ramp(rows, period, per_period, per_row, first):
    """first + per_period * (p // period) + per_row * (p % period) on partition p: fp32 (rows, 1), exact below 2**24."""
    count = math.ceil(rows / period)
    passed, made = nl.ndarray((rows, count), dtype=nl.float32), nl.ndarray((rows, 1), dtype=nl.float32)
    straight = nl.ndarray((rows, 1), dtype=nl.float32)
    # p // period is the number of periods that p has passed, less one
    jump = per_period - per_row * period
    nisa.iota(dst=passed, pattern=[[-period, count]], offset=0, channel_multiplier=1)
    nisa.iota(dst=straight, pattern=[[0, 1]], offset=first - jump, channel_multiplier=per_row)
    nisa.tensor_scalar(
        dst=passed, data=passed, op0=nl.greater_equal, operand0=0.0, op1=nl.multiply, operand1=float(jump)
    )
    nisa.tensor_reduce(dst=made, op=nl.add, data=passed, axis=1)
    nisa.tensor_tensor(dst=made, data1=made, data2=straight, op=nl.add)
    return made


def transposed(source, first, rows, t, start):
    """HBM rows `first` to `first + rows` of D elements as an SBUF tile (D, rows).

    Up to 128 at a time travel, through the partitions from `start` (32 or 64) on if they are allowed there.
    """
    made = nl.ndarray((t.dim, rows), dtype=source.dtype)
    for done in range(0, rows, P):
        count = min(P, rows - done)
        skip = 0
        # 32 rows may start at any multiple of 32, up to 64 at 64
        if count <= start:
            skip = start
        loaded = nl.ndarray((skip + count, t.dim), dtype=source.dtype)
        part = loaded[skip : skip + count, :]
        move(part, source.ap([[t.dim, count], [1, t.dim]], offset=(first + done) * t.dim))
        turned = nl.ndarray((t.dim, count), dtype=source.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=part)
        nisa.tensor_copy(dst=made[:, done : done + count], src=turned)
    return made


def columns(slots, t):
    """Where the candidates begin in each chunk with a margin of N on both sides: int32 (1, chunks, B)."""
    batch, n, chunks = slots.shape[1], t.candidates, math.ceil(t.slots / CHUNK)
    made = nl.ndarray((1, chunks, batch), dtype=nl.int32)
    inside = nl.ndarray((1, chunks, batch), dtype=nl.float32)
    for i in range(chunks):
        size = min(CHUNK, t.slots - i * CHUNK)
        nisa.tensor_scalar(
            dst=inside[:, i, :], data=slots, op0=nl.add, operand0=float(n - i * CHUNK), op1=nl.maximum, operand1=0.0
        )
        nisa.tensor_scalar(dst=made[:, i, :], data=inside[:, i, :], op0=nl.minimum, operand0=float(size + n))
    return made


def row_limits(positions, t, pack, tree):
    """The last slot that each row may see, fp32 (rows, 1): its own in a chain, the last candidate's in a tree."""
    made = nl.ndarray((pack.count * t.queries, 1), dtype=nl.float32)
    if tree:
        first = of_groups(positions, t, pack.group, pack.count, t.queries, 0)
        nisa.tensor_scalar(dst=made, data=first, op0=nl.add, operand0=float(t.candidates - 1))
    else:
        nisa.tensor_copy(dst=made, src=of_groups(positions, t, pack.group, pack.count, t.queries, 1))
    return made


def hidden_candidates(ancestors, t, pack):
    """HIDDEN for a candidate that is not the row's ancestor, else 0, in the row's own group: fp32 (rows, groups, N)."""
    rows, n = pack.count * t.queries, t.candidates
    bits, index = nl.ndarray((rows, n), dtype=nl.int32), nl.ndarray((rows, n), dtype=nl.int32)
    word = of_groups(ancestors, t, pack.group, pack.count, t.queries, 1)
    nisa.iota(dst=index, pattern=[[1, n]], offset=0, channel_multiplier=0)
    nisa.tensor_tensor(dst=bits, data1=word.broadcast(1, n), data2=index, op=nl.right_shift)
    nisa.tensor_scalar(dst=bits, data=bits, op0=nl.bitwise_and, operand0=1)
    own, row = nl.ndarray((rows, n), dtype=nl.float32), ramp(rows, t.queries, 1, 0, 0)
    nisa.tensor_scalar(dst=own, data=bits, op0=nl.subtract, operand0=1.0, op1=nl.multiply, operand1=-HIDDEN)
    made, mine = nl.ndarray((rows, pack.count, n), dtype=nl.float32), nl.ndarray((rows, pack.count), dtype=nl.float32)
    for i in range(pack.count):
        nisa.tensor_scalar(dst=mine[:, i : i + 1], data=row, op0=nl.equal, operand0=float(i))
        nisa.tensor_scalar(dst=made[:, i, :], data=own, op0=nl.multiply, operand0=mine[:, i : i + 1])
    return made
