"""How turned heads reach the core that attends with them, and how what it attended reaches the output projection.

All of it stays in SBUF. Of two cores each makes half of the heads and attends half of the groups; the rest of its
tiles is zero bits until the other core's tile is laid over them.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import this_core

# exchanges between the two cores, each with a number of its own: they follow each other in the same order on both
# cores, so that one number would do
KEYS, QUERIES, ATTENDED = 0, 1, 2


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
    """The other core's tile of the same shape, which goes there at the same time."""
    other, theirs = 1 - nl.program_id(0), nl.ndarray(mine.shape, dtype=mine.dtype)
    nisa.sendrecv(src=mine, dst=theirs, send_to_rank=other, recv_from_rank=other, pipe_id=pipe)
    return theirs


def lay_over(mine, theirs):
    """Add the other core's numbers, bit for bit: where one tile has numbers the other has zero bits."""
    bits = nl.uint16
    if mine.dtype == nl.float32:
        bits = nl.uint32
    nisa.tensor_tensor(dst=mine.view(bits), data1=mine.view(bits), data2=theirs.view(bits), op=nl.bitwise_or)


class Turned(nl.NKIObject):
    """The rows' keys (D, B, G, N) and queries (D, B, H, N)."""

    def __init__(self, shape, kv, dtype):
        batch, heads, candidates, dim = shape
        self.k_DBGN = shared_tile((dim, batch, kv, candidates), dtype)
        self.q_DBHN = shared_tile((dim, batch, heads, candidates), dtype)

    def exchange(self, values):
        """Both cores' heads are there for both, and the values that either wrote to the cache."""
        if on_two_cores():
            k_DBGN, q_DBHN = swapped(self.k_DBGN, KEYS), swapped(self.q_DBHN, QUERIES)
            nisa.core_barrier(data=values, cores=(0, 1))
            lay_over(self.k_DBGN, k_DBGN)
            lay_over(self.q_DBHN, q_DBHN)

    def keys(self):
        """(D, B * G * N)."""
        dim, batch, kv, candidates = self.k_DBGN.shape
        return self.k_DBGN.reshape((dim, batch * kv * candidates))

    def queries(self):
        """(D, B * H * N)."""
        dim, batch, heads, candidates = self.q_DBHN.shape
        return self.q_DBHN.reshape((dim, batch * heads * candidates))

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
            lay_over(attended_DHBN, swapped(attended_DHBN, ATTENDED))
        return attended_DHBN.reshape((dim, heads, batch * candidates))
