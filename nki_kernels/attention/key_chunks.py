"""Keys and values of one sequence in a pool of blocks, chunk by chunk as the tiles of prompt attention visit them.

A pool is (blocks, G, 128, D); block table[0, t] holds positions 128 t to 128 t + 127. A chunk is aligned to absolute
position, and so are its pieces of 1024 keys.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.blocks import BLOCK, gather, run_index, turn
from nki_kernels.attention.rows import RUN
from nki_kernels.tiles import P, itemsize, move

# key tiles whose scores fill two PSUM banks, and that travel together
PIECE = 8
# bytes of the keys between two merges, for one head dimension: 4096 of bf16, 2048 of fp32
CHUNK_BYTES = 8192


class Pool(nl.NKIObject):
    """Keys and values (blocks, G, 128, D) in HBM, and the sequence's block table: int32 (1, S / 128)."""

    def __init__(self, keys, values, table):
        self.keys = keys
        self.values = values
        self.dtype = keys.dtype
        self.kv_heads = keys.shape[1]
        self.dim = keys.shape[3]
        # key tiles of a chunk
        self.chunk = CHUNK_BYTES // itemsize(keys.dtype) // BLOCK
        self.slots = table.shape[1] * BLOCK
        self.table_1T = nl.ndarray(table.shape, dtype=table.dtype)
        move(self.table_1T, table)
        # where eight keys of each piece begin for the first kv head: int32 (128, 1, pieces)
        self.runs_P1C = run_index(table, (0, 1), self.kv_heads, RUN)

    def fetch_keys(self, rows_PRD, group, piece):
        """Gather a piece's keys, eight neighbours on each partition: (128, 8, D)."""
        gather(rows_PRD, self.keys, group, self.runs_P1C[:, 0, piece : piece + 1])

    def fetch_values(self, values_PD, group, tile):
        """Let the values of one block travel: (128, D)."""
        rows = self.values.ap(
            [[self.dim, BLOCK], [1, self.dim]],
            offset=group * BLOCK * self.dim,
            scalar_offset=self.table_1T[0:1, tile : tile + 1],
            indirect_dim=0,
        )
        nisa.dma_copy(dst=values_PD, src=rows, dge_mode=nisa.dge_mode.hwdge)


class KeyChunk(nl.NKIObject):
    """A chunk of keys of one kv head, as far as the cache has them: `tiles` key tiles from `first` on."""

    def __init__(self, pool, group, index):
        first = index * pool.chunk
        self.pool = pool
        self.group = group
        self.first = first
        self.tiles = min(pool.chunk, pool.slots // BLOCK - first)
        self.pieces = self.tiles // PIECE
        # fetch_keys and fetch_values: key rows of each piece (128, 8, D), and values (128, tiles, D)
        self.rows = []
        self.values_PTD = None
        # turn: keys (D, tiles, 128), and how many pieces of them are turned
        self.keys_DTP = None
        self.turned = 0

    def fetch_keys(self):
        """Let the next piece's keys travel."""
        rows_PRD = nl.ndarray((P, RUN, self.pool.dim), dtype=self.pool.dtype)
        self.pool.fetch_keys(rows_PRD, self.group, self.first // PIECE + len(self.rows))
        self.rows.append(rows_PRD)

    def fetch_values(self, piece):
        """Let a piece's values travel."""
        pool = self.pool
        if piece == 0:
            self.values_PTD = nl.ndarray((BLOCK, self.tiles, pool.dim), dtype=pool.dtype)
        for t in range(piece * PIECE, piece * PIECE + PIECE):
            pool.fetch_values(self.values_PTD[:, t, :], self.group, self.first + t)

    def turn_until(self, pieces):
        """Turn the keys of the first `pieces` pieces, unless they are."""
        while self.turned < pieces:
            self.turn()

    def turn(self):
        """Turn the next piece's keys: partition p had the keys 8p to 8p + 7."""
        pool, piece = self.pool, self.turned
        if piece == 0:
            self.keys_DTP = nl.ndarray((pool.dim, self.tiles, BLOCK), dtype=pool.dtype)
        turn(self.keys_DTP[:, piece * PIECE : piece * PIECE + PIECE, :], self.rows[piece])
        self.turned = self.turned + 1
