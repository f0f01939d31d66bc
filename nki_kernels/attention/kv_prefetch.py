"""Keys and values of one kv head of a prompt, chunk by chunk: prefetched from the pages, keys transposed.

Chunks and their subchunks of 1024 keys are aligned to absolute position.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.paged_kv import PAGE, RUN, transpose_keys
from nki_kernels.tiles import itemsize

# key tiles of a subchunk, whose scores fill two PSUM banks and whose keys are gathered at once
SUBCHUNK = RUN
# bytes of the keys between two updates of the running max, for one head dimension: 4096 of bf16, 2048 of fp32
CHUNK_BYTES = 8192


class KeyChunk(nl.NKIObject):
    """A chunk of keys of one kv head: `tiles` key tiles from `first` on."""

    def __init__(self, kv, table_1T, group, index):
        per_chunk = CHUNK_BYTES // itemsize(kv.dtype) // PAGE
        self.kv = kv
        # the block table in SBUF: int32 (1, S / 128)
        self.table_1T = table_1T
        self.group = group
        self.first = index * per_chunk
        self.tiles = min(per_chunk, table_1T.shape[1] - self.first)
        self.subchunks = self.tiles // SUBCHUNK
        # prefetch_keys and prefetch_values: key rows of each subchunk (128, 8, D), and values (128, tiles, D)
        self.rows = []
        self.values_PTD = None
        # transpose_until: keys (D, tiles, 128), and the number of transposed subchunks
        self.keys_DTP = None
        self.transposed = 0

    def prefetch_keys(self):
        """Gather the next subchunk's keys."""
        self.rows.append(self.kv.gather_keys(self.group, self.first // SUBCHUNK + len(self.rows)))

    def prefetch_values(self, subchunk):
        """Load a subchunk's values, one transfer per page."""
        kv = self.kv
        if subchunk == 0:
            self.values_PTD = nl.ndarray((PAGE, self.tiles, kv.dim), dtype=kv.dtype)
        for t in range(subchunk * SUBCHUNK, (subchunk + 1) * SUBCHUNK):
            page_PD = kv.values.ap(
                [[kv.dim, PAGE], [1, kv.dim]],
                offset=self.group * PAGE * kv.dim,
                scalar_offset=self.table_1T[0:1, self.first + t : self.first + t + 1],
                indirect_dim=0,
            )
            nisa.dma_copy(dst=self.values_PTD[:, t, :], src=page_PD, dge_mode=nisa.dge_mode.hwdge)

    def transpose_until(self, count):
        """Transpose the keys of the first `count` subchunks that are not transposed yet."""
        while self.transposed < count:
            first = self.transposed * SUBCHUNK
            if first == 0:
                self.keys_DTP = nl.ndarray((self.kv.dim, self.tiles, PAGE), dtype=self.kv.dtype)
            transpose_keys(self.keys_DTP[:, first : first + SUBCHUNK, :], self.rows[self.transposed])
            self.transposed = self.transposed + 1
