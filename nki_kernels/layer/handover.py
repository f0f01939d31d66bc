"""The division of a decode step's attention between two cores, and what they exchange, all of it in SBUF.

A core attends its own sequences. It makes their heads and the output of their rows alone too, unless the weights are so
large that reading them twice takes longer than an exchange: then each core makes half of the heads, or half of the
output's columns, for the rows of both. No partial sums are added.
"""

import math

import nki.isa as nisa
import nki.language as nl

from nki_kernels.layer.stream_output import room
from nki_kernels.tiles import itemsize, share_of_core, this_core

# an exchange takes 4.3 us by nkisim's laws, in which two cores read this much of HBM
WORTH_SHARING = 3000000
# exchanges between the two cores, each with a number of its own
HEADS, ATTENDED = 0, 1
# numbers per partition that the GpSimd engines' own DMA carries, sooner than the shared one
MOST_BY_GPSIMD = 256


class Division(nl.NKIObject):
    """The sequences that this core attends, `own`, and those whose heads it makes, `made`: first and last."""

    def __init__(self, weights, batch):
        # whether two cores share the blocks of the weights of heads and output
        self.shares_heads = is_shared(weights[0])
        self.shares_output = self.shares_heads and is_shared(weights[1])
        self.own = share_of_core(batch)
        self.made = self.own
        if self.shares_heads:
            self.made = (0, batch)

    def of_heads(self, weight):
        """The blocks of QKV that this core multiplies, first and last."""
        if self.shares_heads:
            return share_of_core(weight.shape[0])
        return 0, weight.shape[0]

    def of_output(self, weight):
        """The same of the output projection."""
        if self.shares_output:
            return share_of_core(weight.shape[0])
        return 0, weight.shape[0]

    def count(self):
        """Sequences of this core."""
        return self.own[1] - self.own[0]


def is_shared(weight):
    """Whether each of two cores should multiply half of the blocks of a packed weight (blocks, K, C)."""
    blocks, depth, columns = weight.shape
    size = blocks * depth * columns * itemsize(weight.dtype)
    return this_core()[1] == 2 and blocks % 2 == 0 and size > WORTH_SHARING


def swap(halves_DHC, pipe):
    """Send this core's half of a tile (D, 2, C) to the other core, and receive the other half."""
    own, way = nl.program_id(0), nisa.dma_engine.dma
    if halves_DHC.shape[2] <= MOST_BY_GPSIMD:
        way = nisa.dma_engine.gpsimd_dma
    nisa.sendrecv(
        src=halves_DHC[:, own, :],
        dst=halves_DHC[:, 1 - own, :],
        send_to_rank=1 - own,
        recv_from_rank=1 - own,
        pipe_id=pipe,
        dma_engine=way,
    )


class Handed(nl.NKIObject):
    """The turned heads (D, heads, B, N) of the sequences that this core makes, in the order v, k, q, and attention's
    result (D, H, R) of the rows whose output it makes, with room for store_product.
    """

    def __init__(self, division, shape, kv, dtype):
        batch, heads, candidates, dim = shape
        self.division = division
        self.candidates = candidates
        self.kv = kv
        self.per = heads // kv
        made, rows = division.made[1] - division.made[0], division.count() * candidates
        self.heads_DHBN = nl.ndarray((dim, 2 * kv + heads, made, candidates), dtype=dtype)
        # with a shared output, each core's result (D, 2, H, R): the first core has the most rows
        self.results_DCHR = None
        if division.shares_output:
            rows = batch * candidates
            shape = (dim, 2, heads, math.ceil(batch / 2) * candidates)
            self.results_DCHR = nl.ndarray(shape, dtype=dtype)
            nisa.memset(dst=self.results_DCHR, value=0.0)
        self.rows = rows
        self.attended_DHR = None
        if rows > 0:
            self.attended_DHR = nl.ndarray((dim, heads, room(rows)), dtype=dtype)
            if room(rows) > rows:
                nisa.memset(dst=self.attended_DHR[:, :, rows : room(rows)], value=0.0)

    def exchange_heads(self):
        """The heads that the other core makes arrive."""
        if self.division.shares_heads:
            dim, heads, batch, candidates = self.heads_DHBN.shape
            swap(self.heads_DHBN.reshape((dim, 2, heads // 2 * batch * candidates)), HEADS)

    def of_own(self, head, count):
        """Some heads of this core's sequences: (D, count, B, N)."""
        first = self.division.own[0] - self.division.made[0]
        return self.heads_DHBN[:, head : head + count, first : first + self.division.count(), :]

    def keys(self):
        """The new keys of each (sequence, kv head) group: a list of (D, N)."""
        return self.by_group(self.kv, 1)

    def queries(self):
        """The queries of each group: a list of (D, H / G, N)."""
        return self.by_group(2 * self.kv, self.per)

    def by_group(self, head, count):
        """The heads of each group, of which the first one's are `count` heads from `head` on."""
        groups = []
        for sequence in range(self.division.count()):
            for g in range(self.kv):
                groups.append(self.of_own(head + g * count, count)[:, :, sequence, :])
        return groups

    def attended(self):
        """Where attention's result of this core's sequences goes: (D, H, B, N)."""
        count, place_DHR = self.division.count(), self.attended_DHR
        if self.division.shares_output:
            place_DHR = self.results_DCHR[:, nl.program_id(0), :, :]
        dim, heads, _ = place_DHR.shape
        return place_DHR[:, :, 0 : count * self.candidates].reshape((dim, heads, count, self.candidates))

    def collect(self):
        """Attention's result of the rows whose output this core makes."""
        if self.division.shares_output:
            dim, _, heads, most = self.results_DCHR.shape
            swap(self.results_DCHR.reshape((dim, 2, heads * most)), ATTENDED)
            for core in range(2):
                first, last = core * most, min(self.rows, (core + 1) * most)
                if first < last:
                    target, source = self.attended_DHR[:, :, first:last], self.results_DCHR[:, core, :, :]
                    nisa.tensor_copy(dst=target, src=source[:, :, 0 : last - first])
        return self.attended_DHR
