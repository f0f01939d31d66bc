"""A pool of blocks as attention with the slots on the partitions reads it: keys turned, the new ones over stale ones.

Keys are gathered eight neighbours to a partition and turned by the Tensor Engine, values as turned_attention weighs
them. New keys replace stale columns on chip, so that keys may travel before there are new ones.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.blocks import gather, rows_in_pool, run_index, scatter, turn
from nki_kernels.attention.rows import RUN, columns
from nki_kernels.layer.heads import rows_of_heads
from nki_kernels.limits import CHUNK
from nki_kernels.tiles import P, itemsize

# the runs of slots on a partition: columns of keys that are 16 bytes apart or more load slowly
HALVES = 2


class Tables(nl.NKIObject):
    """Where the sequences own[0] to own[1] are in a pool (blocks, G, 128, D), and in those of other layers."""

    def __init__(self, pool, table_BL, candidates, t, own):
        self.t = t
        # this core's first sequence and group
        self.sequence = own[0]
        self.first = own[0] * t.kv_heads
        # where neighbours begin, int32 (128, B, C), and of values (128, B, 2 C)
        self.keys_PBC = run_index(table_BL, own, t.kv_heads, RUN)
        self.values_PBC = run_index(table_BL, own, t.kv_heads, RUN // HALVES)
        # candidates is (positions (B, N), the slots (1, B)): where they begin in each chunk, int32 (1, C, B)
        self.columns_1CB = columns(candidates[1], t)
        # where the rows of this core go, int32 (R, 1)
        rows = (own[1] - own[0]) * t.candidates
        self.rows_R1 = rows_in_pool(pool, candidates[0], table_BL, own[0] * t.candidates, rows)


class Blocks(nl.NKIObject):
    """A layer's keys and values (blocks, G, 128, D) in HBM, and how far its chunks have come."""

    def __init__(self, pools, tables, chunks):
        self.chunks = chunks
        # chunks whose keys were asked for, and those whose keys were turned
        self.asked = 0
        self.turned = 0
        self.keys = pools[0]
        self.values = pools[1]
        self.tables = tables
        self.t = tables.t
        self.dtype = pools[0].dtype
        self.first = tables.first
        # hold: transposed new keys (D, N), one a group, and as rows (R, G, D)
        self.new = []
        self.new_RGD = None

    def index(self, runs_PBC, group, piece):
        """A piece's index of a group's sequence: (128, 1)."""
        sequence = group // self.t.kv_heads - self.tables.sequence
        return runs_PBC[:, sequence, piece : piece + 1]

    def fetch_keys(self, stop, ahead=0):
        """Let the keys of the chunks before number `stop` travel, and of more up to `ahead` bytes a partition."""
        size = 0
        while self.asked < len(self.chunks) and (self.asked < stop or size < ahead):
            chunk = self.chunks[self.asked]
            for group in range(chunk.pack.group, chunk.pack.group + chunk.pack.count):
                rows_PRD, head = nl.ndarray((P, RUN, self.t.dim), dtype=self.dtype), group % self.t.kv_heads
                gather(rows_PRD, self.keys, head, self.index(self.tables.keys_PBC, group, chunk.index))
                chunk.rows.append(rows_PRD)
                size = size + RUN * self.t.dim * itemsize(self.dtype)
            self.asked = self.asked + 1

    def turn_keys(self, stop):
        """Turn the keys of the chunks before number `stop`, with room for the candidates on both sides:
        (D, groups, N + W + N) a chunk.
        """
        n = self.t.candidates
        while self.turned < stop:
            chunk = self.chunks[self.turned]
            chunk.keys_DGW = nl.ndarray((self.t.dim, chunk.pack.count, CHUNK + 2 * n), dtype=self.dtype)
            chunk.margin = n
            for i in range(chunk.pack.count):
                turn(chunk.keys_DGW[:, i, n : n + CHUNK], chunk.rows[i])
            chunk.rows = []
            self.turned = self.turned + 1

    def hold(self, new, new_DGBN):
        """Take the new keys, which are in SBUF, turned: a list of (D, N), one a group, and all of them (D, G, B, N)."""
        self.new = new
        self.new_RGD = rows_of_heads(new_DGBN)

    def merge(self, chunk):
        """Put the new keys over the stale ones; those outside of this chunk fall into the margins."""
        t, pack, width = self.t, chunk.pack, chunk.keys_DGW.shape[2]
        for i in range(pack.count):
            sequence = (pack.group + i) // t.kv_heads
            column = self.tables.columns_1CB[0:1, chunk.index, sequence : sequence + 1]
            stale_DN = chunk.keys_DGW.ap(
                [[pack.count * width, t.dim], [1, t.candidates]], offset=i * width, scalar_offset=column, indirect_dim=2
            )
            nisa.tensor_copy(dst=stale_DN, src=self.new[pack.group + i - self.first], engine=nisa.engine.vector)

    def fetch_values(self, chunk):
        """Let a chunk's values travel: a tile (128, RUN / HALVES, D) for each half of a group."""
        for group in range(chunk.pack.group, chunk.pack.group + chunk.pack.count):
            for half in range(HALVES):
                values_PJD = nl.ndarray((P, RUN // HALVES, self.t.dim), dtype=self.dtype)
                piece = chunk.index * HALVES + half
                gather(
                    values_PJD, self.values, group % self.t.kv_heads, self.index(self.tables.values_PBC, group, piece)
                )
                chunk.values.append(values_PJD)

    def append_values(self, new_DGBN):
        """Scatter the new values, turned (D, G, B, N), to their blocks before any are read."""
        new_RGD = rows_of_heads(new_DGBN)
        for head in range(self.t.kv_heads):
            scatter(self.values, head, new_RGD[:, head, :], self.tables.rows_R1)

    def append_keys(self):
        """The same of the new keys, once all stale ones have been asked for."""
        for head in range(self.t.kv_heads):
            scatter(self.keys, head, self.new_RGD[:, head, :], self.tables.rows_R1)
