"""The rows of verification attention: tiling, and the small operands that are made from positions.

Rows of one (sequence, kv head) group, (H / G) x N of them, lie together; groups are packed on the partitions.
A helper's `positions` and `ancestors` are (B, N) int32 in HBM.
"""

import math
from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

P = 128
# keys per chunk: one PSUM bank of scores
CHUNK = 512
# consecutive keys on one partition: values move in rows of RUN * D elements
RUN = 4
HIDDEN = -1.0e30


@dataclass(frozen=True)
class Tiling(nl.NKIObject):
    """The dims of a launch: `pack` groups share one pass over the engines, `queries` is (H / G) * N."""

    groups: int
    kv_heads: int
    queries: int
    candidates: int
    slots: int
    dim: int
    pack: int


def tiling(q, kv_heads, slots):
    """Integer dims; the groups of one pack are whole sequences or lie within one."""
    batch, heads, count, dim = q.shape
    rows = heads // kv_heads * count
    pack = 1
    for size in range(1, min(P // rows, CHUNK // dim) + 1):
        if size % kv_heads == 0 or kv_heads % size == 0:
            pack = size
    return Tiling(batch * kv_heads, kv_heads, rows, count, slots, dim, pack)


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
    nisa.tensor_scalar(dst=passed, data=passed, op0=nl.greater_equal, operand0=0.0,
                       op1=nl.multiply, operand1=float(jump))  # fmt: skip
    nisa.tensor_reduce(dst=made, op=nl.add, data=passed, axis=1)
    nisa.tensor_tensor(dst=made, data1=made, data2=straight, op=nl.add)
    return made


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


def transposed(source, rows, t, offset):
    """`rows` HBM rows of D elements as an SBUF tile (D, rows)."""
    loaded, made = nl.ndarray((rows, t.dim), dtype=source.dtype), nl.ndarray((t.dim, rows), dtype=source.dtype)
    move(loaded, source.ap([[t.dim, rows], [1, t.dim]], offset=offset))
    turned = nl.ndarray((t.dim, rows), dtype=source.dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=loaded)
    nisa.tensor_copy(dst=made, src=turned)
    return made


def columns(slots, t, tiles):
    """Where the candidates begin in each (start, size) tile with a margin of N on both sides: int32 (1, tiles, B)."""
    batch, n = slots.shape[1], t.candidates
    made = nl.ndarray((1, len(tiles), batch), dtype=nl.int32)
    inside = nl.ndarray((1, len(tiles), batch), dtype=nl.float32)
    for i in range(len(tiles)):
        nisa.tensor_scalar(dst=inside[:, i, :], data=slots, op0=nl.add, operand0=float(n - tiles[i][0]),
                           op1=nl.maximum, operand1=0.0)  # fmt: skip
        nisa.tensor_scalar(dst=made[:, i, :], data=inside[:, i, :], op0=nl.minimum, operand0=float(tiles[i][1] + n))
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
