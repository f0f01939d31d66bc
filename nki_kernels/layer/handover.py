"""The way of heads to the core that attends with them, and of its result to the output projection.

All of it stays in SBUF. Of two cores each makes half of the heads and attends half of the groups; the rest of its
tiles is zero bits until the other core's tile is laid over them.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import this_core

# exchanges between the two cores, each with a number of its own: they follow each other in the same order on both
# cores, so that one number would do
HEADS, VALUES, ATTENDED = 0, 1, 2
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


def send(mine, theirs, pipe):
    """Send a tile (partitions, numbers) to the other core and receive one of the same shape."""
    other, way = 1 - nl.program_id(0), nisa.dma_engine.dma
    if mine.shape[1] <= MOST_BY_GPSIMD:
        way = nisa.dma_engine.gpsimd_dma
    nisa.sendrecv(src=mine, dst=theirs, send_to_rank=other, recv_from_rank=other, pipe_id=pipe, dma_engine=way)


def swapped(mine, pipe):
    """The other core's tile of the same shape (partitions, numbers), which goes there at the same time."""
    theirs = nl.ndarray(mine.shape, dtype=mine.dtype)
    send(mine, theirs, pipe)
    return theirs


def lay_over(mine, theirs):
    """Add the other core's numbers, bit for bit: where one tile has numbers the other has zero bits."""
    bits = nl.uint16
    if mine.dtype == nl.float32:
        bits = nl.uint32
    nisa.tensor_tensor(dst=mine.view(bits), data1=mine.view(bits), data2=theirs.view(bits), op=nl.bitwise_or)


class Handed(nl.NKIObject):
    """The rows' keys (D, B, G, N) and queries (D, B, H, N), turned, in one tile that is exchanged at once; their values
    (R, G, D); and attention's result, turned (D, H, B, N). The first core makes all values, as they come first and are
    at most a third of the heads.
    """

    def __init__(self, shape, kv, dtype):
        batch, heads, candidates, dim = shape
        self.dtype = dtype
        self.keys_end = batch * kv * candidates
        self.heads_DR = shared_tile((dim, self.keys_end + batch * heads * candidates), dtype)
        self.k_DBGN = self.keys().reshape((dim, batch, kv, candidates))
        self.q_DBHN = self.queries().reshape((dim, batch, heads, candidates))
        self.values_RGD = nl.ndarray((batch * candidates, kv, dim), dtype=dtype)
        self.attended_DHBN = shared_tile((dim, heads, batch, candidates), dtype)

    def send_values(self):
        """The second core gets the values; the first ignores what comes back."""
        if on_two_cores():
            rows, kv, dim = self.values_RGD.shape
            values_RC, unread_RC = self.values_RGD.reshape((rows, kv * dim)), nl.ndarray((rows, kv * dim), self.dtype)
            source_RC, target_RC = values_RC, unread_RC
            if nl.program_id(0) == 1:
                source_RC, target_RC = unread_RC, values_RC
                nisa.memset(dst=unread_RC, value=0.0)
            send(source_RC, target_RC, VALUES)

    def exchange(self):
        """Both cores' keys and queries are there for both."""
        if on_two_cores():
            lay_over(self.heads_DR, swapped(self.heads_DR, HEADS))

    def keys(self):
        """(D, B * G * N)."""
        return self.heads_DR[:, 0 : self.keys_end]

    def queries(self):
        """(D, B * H * N)."""
        return self.heads_DR[:, self.keys_end : self.heads_DR.shape[1]]

    def collect(self):
        """The results of both cores: (D, H, R)."""
        dim, heads, batch, candidates = self.attended_DHBN.shape
        attended_DR = self.attended_DHBN.reshape((dim, heads * batch * candidates))
        if on_two_cores():
            lay_over(attended_DR, swapped(attended_DR, ATTENDED))
        return attended_DR.reshape((dim, heads, batch * candidates))
