"""Keys and values of one kv head of a prompt, chunk by chunk: prefetched from the pages, keys transposed.

A chunk is aligned to absolute position, and so are its pieces of 1024 keys.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.paged_kv import PAGE, RUN, PagedKV, PageIndex, transpose_keys
from nki_kernels.tiles import dma_static, itemsize

# key tiles of a piece, whose scores fill two PSUM banks, and which are prefetched together
PIECE = RUN
# bytes of the keys between two updates of the running max, for one head dimension: 4096 of bf16, 2048 of fp32
CHUNK_BYTES = 8192


class PromptKV(nl.NKIObject):
    """The sequence's pages: `length` key tiles, `per_chunk` of them in a chunk."""

    def __init__(self, pools, block_table_1T):
        self.kv = PagedKV(pools, PageIndex(block_table_1T, (0, 1), pools[0].shape[1], RUN))
        self.per_chunk = CHUNK_BYTES // itemsize(pools[0].dtype) // PAGE
        self.length = block_table_1T.shape[1]
        # int32 (1, T) in SBUF
        self.table_1T = nl.ndarray(block_table_1T.shape, dtype=block_table_1T.dtype)
        dma_static(self.table_1T, block_table_1T)


class KeyChunk(nl.NKIObject):
    """A chunk of keys of one kv head: `tiles` key tiles from `first` on."""

    def __init__(self, pages, group, index):
        first = index * pages.per_chunk
        self.pages = pages
        self.group = group
        self.first = first
        self.tiles = min(pages.per_chunk, pages.length - first)
        self.pieces = self.tiles // PIECE
        # prefetch_keys and prefetch_values: key rows of each piece (128, 8, D), and values (128, tiles, D)
        self.rows = []
        self.values_PTD = None
        # transpose_until: keys (D, tiles, 128), and the number of pieces that are transposed
        self.keys_DTP = None
        self.transposed = 0

    def prefetch_keys(self):
        """Gather the next piece's keys."""
        self.rows.append(self.pages.kv.gather_keys(self.group, self.first // PIECE + len(self.rows)))

    def prefetch_values(self, piece):
        """Load a piece's values, one transfer per page."""
        kv = self.pages.kv
        if piece == 0:
            self.values_PTD = nl.ndarray((PAGE, self.tiles, kv.dim), dtype=kv.dtype)
        for t in range(piece * PIECE, piece * PIECE + PIECE):
            page_PD = kv.values.ap(
                [[kv.dim, PAGE], [1, kv.dim]],
                offset=self.group * PAGE * kv.dim,
                scalar_offset=self.pages.table_1T[0:1, self.first + t : self.first + t + 1],
                indirect_dim=0,
            )
            nisa.dma_copy(dst=self.values_PTD[:, t, :], src=page_PD, dge_mode=nisa.dge_mode.hwdge)

    def transpose_until(self, pieces):
        """Transpose the keys of the first `pieces` pieces, unless they are."""
        while self.transposed < pieces:
            first = self.transposed * PIECE
            if first == 0:
                self.keys_DTP = nl.ndarray((self.pages.kv.dim, self.tiles, PAGE), dtype=self.pages.kv.dtype)
            transpose_keys(self.keys_DTP[:, first : first + PIECE, :], self.rows[self.transposed])
            self.transposed = self.transposed + 1
