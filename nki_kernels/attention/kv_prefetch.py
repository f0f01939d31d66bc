"""Keys and values of one kv head of a prompt, chunk by chunk: prefetched from the pages, keys transposed.

A chunk is a key group, as in kv_chunks.py, aligned to absolute position. Of 512 positions partition p has 4p to 4p + 3;
position 4p + j is in key tile j. Transposed keys are split into even and odd positions, each masked at once.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.paged_kv import PAGE, TILE_RUN
from nki_kernels.limits import GROUP_BYTES
from nki_kernels.tiles import P, itemsize

# even and odd positions: a stride of 16 bytes or more, as of every fourth fp32 score, halves the rate of an engine
PARITIES = 2


class KeyChunk(nl.NKIObject):
    """A chunk of keys of one kv head: `tiles` key tiles from `first` on."""

    def __init__(self, kv, group, index, length):
        per_chunk = GROUP_BYTES // itemsize(kv.dtype) // PAGE
        self.kv = kv
        self.group = group
        self.first = index * per_chunk
        self.tiles = min(per_chunk, length - self.first)
        self.gathers = self.tiles // TILE_RUN
        # prefetch_schedule: the first step that attends it
        self.step = None
        # prefetch_keys and prefetch_values: key rows of each gather (128, 4, D), and values with a column of ones
        # (128, tiles, D + 1)
        self.rows = []
        self.values_PTU = None
        # transpose_until: keys (D, D / 128, 2, 64 tiles), and the number of transposed gathers
        self.keys_DK2W = None
        self.transposed = 0

    def prefetch_keys(self):
        """Gather the next keys."""
        self.rows.append(self.kv.gather_keys(self.group, self.first // TILE_RUN + len(self.rows)))

    def prefetch_values(self, t):
        """Gather the values of key tiles 4t to 4t + 3."""
        dim, first = self.kv.dim, t * TILE_RUN
        if t == 0:
            self.values_PTU = nl.ndarray((P, self.tiles, dim + 1), dtype=self.kv.dtype)
            nisa.memset(dst=self.values_PTU[:, :, dim : dim + 1], value=1.0, engine=nisa.engine.gpsimd)
        self.kv.gather_values(
            self.values_PTU[:, first : first + TILE_RUN, 0:dim], self.group, self.first // TILE_RUN + t
        )

    def transpose_until(self, count):
        """Transpose the keys of the first `count` gathers that are not transposed yet."""
        dim, dtype = self.kv.dim, self.kv.dtype
        width, halves = min(dim, P), -(-dim // P)
        while self.transposed < count:
            t, columns = self.transposed, P * TILE_RUN // PARITIES
            if t == 0:
                self.keys_DK2W = nl.ndarray((width, halves, PARITIES, self.gathers * columns), dtype=dtype)
            for k in range(halves):
                psum_DJP = nl.ndarray((width, TILE_RUN, P), dtype=dtype, buffer=nl.psum)
                for j in range(TILE_RUN):
                    nisa.nc_transpose(dst=psum_DJP[:, j, :], data=self.rows[t][:, j, k * width : (k + 1) * width])
                dst_DPW = self.keys_DK2W[:, k, :, t * columns : (t + 1) * columns]
                # position 4p + j: column 2p + j // 2 of parity j % 2
                dst_DJPP = dst_DPW.reshape((width, PARITIES, P, TILE_RUN // PARITIES)).permute((0, 3, 1, 2))
                src_DJPP = psum_DJP.reshape((width, TILE_RUN // PARITIES, PARITIES, P))
                nisa.tensor_copy(dst=dst_DJPP, src=src_DJPP, engine=nisa.engine.scalar)
            self.transposed = t + 1
