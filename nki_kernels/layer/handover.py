"""How turned heads reach the core that attends with them, and how what it attended reaches the output projection.

All of it stays in SBUF. Of two cores each makes half of the heads and attends half of the groups; the rest of its
tiles is zero bits until the other core's tile is laid over them.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import this_core

# exchanges between the two cores, each with a number of its own: they follow each other in the same order on both
# cores, so that one number would do
HEADS, ATTENDED = 0, 1
# numbers per partition that the GpSimd engines' own DMA carries, sooner than the shared one
MOST_BY_GPSIMD = 256


def on_two_cores():
    """Whether another core shares this launch."""
    return this_core()[1] == 2


def shared_tile(shape, dtype):
    """A tile in SBUF, of zero bits if the other core makes a part of it."""
    tile = nl.ndarray(shape, dtype=dtype)
    if on_two_cores():
        nisa.memset(dst=tile, value=0.0)
    return tile


def swapped(mine, pipe):
    """The other core's tile of the same shape (partitions, numbers), which goes there at the same time."""
    other, theirs, way = 1 - nl.program_id(0), nl.ndarray(mine.shape, dtype=mine.dtype), nisa.dma_engine.dma
    if mine.shape[1] <= MOST_BY_GPSIMD:
        way = nisa.dma_engine.gpsimd_dma
    nisa.sendrecv(src=mine, dst=theirs, send_to_rank=other, recv_from_rank=other, pipe_id=pipe, dma_engine=way)
    return theirs


def lay_over(mine, theirs):
    """Add the other core's numbers, bit for bit: where one tile has numbers the other has zero bits."""
    bits = nl.uint16
    if mine.dtype == nl.float32:
        bits = nl.uint32
    nisa.tensor_tensor(dst=mine.view(bits), data1=mine.view(bits), data2=theirs.view(bits), op=nl.bitwise_or)


class Turned(nl.NKIObject):
    """The rows' keys (D, B, G, N) and queries (D, B, H, N), in one tile that is exchanged at once."""

    def __init__(self, shape, kv, dtype):
        batch, heads, candidates, dim = shape
        self.keys_end = batch * kv * candidates
        self.heads_DR = shared_tile((dim, self.keys_end + batch * heads * candidates), dtype)
        self.k_DBGN = self.keys().reshape((dim, batch, kv, candidates))
        self.q_DBHN = self.queries().reshape((dim, batch, heads, candidates))

    def exchange(self, values):
        """Both cores' heads are there for both, and the values that either wrote to the cache."""
        if on_two_cores():
            theirs_DR = swapped(self.heads_DR, HEADS)
            # on an engine that has nothing to do before the scores, so that the heads do not wait for it
            nisa.core_barrier(data=values, cores=(0, 1), engine=nisa.engine.scalar)
            lay_over(self.heads_DR, theirs_DR)

    def keys(self):
        """(D, B * G * N)."""
        return self.heads_DR[:, 0 : self.keys_end]

    def queries(self):
        """(D, B * H * N)."""
        return self.heads_DR[:, self.keys_end : self.heads_DR.shape[1]]

    def collect(self, chunks):
        """What the packs hold after their last chunk, of both cores, turned: (D, H, R)."""
        dim, batch, heads, candidates = self.q_DBHN.shape
        kv, group = self.k_DBGN.shape[2], heads // self.k_DBGN.shape[2]
        attended_DHBN = shared_tile((dim, heads, batch, candidates), self.q_DBHN.dtype)
        for chunk in chunks:
            if chunk.last:
                values_RGD = chunk.pack.values_RGD
                for i in range(chunk.pack.count):
                    turned_psum_DR = nl.ndarray((dim, values_RGD.shape[0]), dtype=values_RGD.dtype, buffer=nl.psum)
                    nisa.nc_transpose(dst=turned_psum_DR, data=values_RGD[:, i, :])
                    sequence, head = (chunk.pack.group + i) // kv, (chunk.pack.group + i) % kv * group
                    own = turned_psum_DR[:, i * group * candidates : (i + 1) * group * candidates]
                    nisa.tensor_copy(dst=attended_DHBN[:, head : head + group, sequence, :], src=own)
        if on_two_cores():
            attended_DR = attended_DHBN.reshape((dim, heads * batch * candidates))
            lay_over(attended_DR, swapped(attended_DR, ATTENDED))
        return attended_DHBN.reshape((dim, heads, batch * candidates))
