"""How turned heads reach the core that attends with them, and how what it attended reaches the output projection.

All of it stays in SBUF. Of two cores each makes half of the heads and attends half of the groups; the rest of its
tiles is zero bits until the other core's tile is laid over them.
"""

import nki.isa as nisa
import nki.language as nl

# exchanges between the two cores, each with a number of its own
KEYS, QUERIES, ATTENDED = 0, 1, 2


def on_two_cores():
    """Whether another core shares this launch."""
    return nl.program_ndim() > 0 and nl.num_programs() > 1


def tile(shape, dtype):
    """A tile in SBUF, of zero bits if the other core makes a part of it."""
    made = nl.ndarray(shape, dtype=dtype)
    if on_two_cores():
        nisa.memset(dst=made, value=0.0)
    return made


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
        self.k = tile((dim, batch, kv, candidates), dtype)
        self.q = tile((dim, batch, heads, candidates), dtype)

    def exchange(self, values):
        """Both cores' heads are there for both, and the values that either wrote to the cache."""
        if on_two_cores():
            k, q = swapped(self.k, KEYS), swapped(self.q, QUERIES)
            nisa.core_barrier(data=values, cores=(0, 1))
            lay_over(self.k, k)
            lay_over(self.q, q)

    def keys(self):
        """(D, B * G * N)."""
        return self.k.reshape((self.k.shape[0], self.k.shape[1] * self.k.shape[2] * self.k.shape[3]))

    def queries(self):
        """(D, B * H * N)."""
        return self.q.reshape((self.q.shape[0], self.q.shape[1] * self.q.shape[2] * self.q.shape[3]))

    def collect(self, steps):
        """What the packs hold after their last step, of both cores, turned: (D, H, R)."""
        dim, batch, heads, candidates = self.q.shape
        kv, group = self.k.shape[2], heads // self.k.shape[2]
        made = tile((dim, heads, batch, candidates), self.q.dtype)
        for step in steps:
            if step.last:
                values = step.pack.values
                for i in range(step.pack.count):
                    turned = nl.ndarray((dim, values.shape[0]), dtype=values.dtype, buffer=nl.psum)
                    nisa.nc_transpose(dst=turned, data=values[:, i, :])
                    sequence, head = (step.pack.group + i) // kv, (step.pack.group + i) % kv * group
                    own = turned[:, i * group * candidates : (i + 1) * group * candidates]
                    nisa.tensor_copy(dst=made[:, head : head + group, sequence, :], src=own)
        if on_two_cores():
            lay_over(made, swapped(made, ATTENDED))
        return made.reshape((dim, heads, batch * candidates))
