"""The core split (LNC 2) of decode attention: which core computes which heads and output rows, and the exchanges.

Each core attends half of the sequences. QKV and output projection are replicated below MIN_BYTES_TO_SPLIT and split by
blocks of columns above, with one SBUF exchange each; no partial sums are added.

| QKV      | output   | heads of a core             | output of a core               | exchanges       |
|----------|----------|-----------------------------|--------------------------------|-----------------|
| small    | any      | all, of its sequences       | all columns, of its sequences  | none            |
| large    | small    | half, of all sequences      | all columns, of its sequences  | heads           |
| large    | large    | half, of all sequences      | half of the columns, all rows  | heads, attended |
"""

import math

import nki.isa as nisa
import nki.language as nl

from nki_kernels.layer.projections import padded_rows
from nki_kernels.tiles import core_slice, itemsize, this_core

# bytes that two cores read from HBM in the 4.3 us (simulated) of one exchange
MIN_BYTES_TO_SPLIT = 3000000
# sendrecv pipes: one per exchange that may be outstanding
HEADS_PIPE, ATTENDED_PIPE, MLP_PIPE = 0, 1, 2
# up to this many elements per partition, gpsimd_dma is faster than the shared DMA
MAX_GPSIMD_DMA_ELEMENTS = 256


def weight_bytes(tensor):
    """Bytes of a packed weight (blocks, K, C)."""
    return tensor.shape[0] * tensor.shape[1] * tensor.shape[2] * itemsize(tensor.dtype)


class CoreSplit(nl.NKIObject):
    """The sequences, first and last, that this core attends, and those whose heads it projects."""

    def __init__(self, qkv, out, batch):
        self.splits_heads = is_split(qkv)
        self.splits_output = self.splits_heads and is_split(out)
        self.attended = core_slice(batch)
        self.projected = self.attended
        if self.splits_heads:
            self.projected = (0, batch)
        self.count = self.attended[1] - self.attended[0]

    def qkv_blocks(self, qkv):
        """The blocks of QKV that this core multiplies, first and last."""
        if self.splits_heads:
            return core_slice(qkv.shape[0])
        return 0, min(self.count, 1) * qkv.shape[0]

    def out_blocks(self, out):
        """The blocks of the output projection that this core multiplies."""
        if self.splits_output:
            return core_slice(out.shape[0])
        # a core that only computes heads for its peer has no output rows
        return 0, min(self.count, 1) * out.shape[0]


def is_split(tensor):
    """Whether each of two cores multiplies half of the blocks of a packed weight."""
    return this_core()[1] == 2 and tensor.shape[0] % 2 == 0 and weight_bytes(tensor) > MIN_BYTES_TO_SPLIT


def exchange(src, dst, pipe, dma_engine):
    """Send a tile in SBUF to the other core, and receive the other core's."""
    peer = 1 - nl.program_id(0)
    nisa.sendrecv(src=src, dst=dst, send_to_rank=peer, recv_from_rank=peer, pipe_id=pipe, dma_engine=dma_engine)


def exchange_halves(halves_DHC, pipe):
    """Send this core's half of a tile (D, 2, C) to the other core, and receive the other half."""
    core, dma_engine = nl.program_id(0), nisa.dma_engine.dma
    if halves_DHC.shape[2] <= MAX_GPSIMD_DMA_ELEMENTS:
        dma_engine = nisa.dma_engine.gpsimd_dma
    exchange(halves_DHC[:, core, :], halves_DHC[:, 1 - core, :], pipe, dma_engine)


class CoreExchange(nl.NKIObject):
    """Transposed heads (D, heads, B, N) of the sequences whose heads this core computes, in the order v, k, q, and the
    attention output (D, H, R) of the rows whose projection it computes, padded for `project`.
    """

    def __init__(self, split, shape, kv_heads, dtype):
        batch, heads, candidates, dim = shape
        projected = split.projected[1] - split.projected[0]
        self.split = split
        self.candidates = candidates
        self.kv_heads = kv_heads
        self.q_heads_per_kv = heads // kv_heads
        self.heads_DHBN = nl.ndarray((dim, 2 * kv_heads + heads, projected, candidates), dtype=dtype)
        self.rows = split.count * candidates
        # with a split output, each core's attention output (D, 2, H, R): the first core has as many rows or more
        self.gathered_DCHR = None
        if split.splits_output:
            self.rows = batch * candidates
            self.gathered_DCHR = nl.ndarray((dim, 2, heads, math.ceil(batch / 2) * candidates), dtype=dtype)
            nisa.memset(dst=self.gathered_DCHR, value=0.0)
        self.attended_DHR = None
        if self.rows > 0:
            padded = padded_rows(self.rows)
            self.attended_DHR = nl.ndarray((dim, heads, padded), dtype=dtype)
            if padded > self.rows:
                nisa.memset(dst=self.attended_DHR[:, :, self.rows : padded], value=0.0)

    def exchange_heads(self):
        """Receive the other core's half of the heads."""
        if self.split.splits_heads:
            dim, heads, batch, candidates = self.heads_DHBN.shape
            exchange_halves(self.heads_DHBN.reshape((dim, 2, heads // 2 * batch * candidates)), HEADS_PIPE)

    def attended_heads(self, head, count):
        """Heads of the sequences that this core attends: (D, count, B, N)."""
        first = self.split.attended[0] - self.split.projected[0]
        return self.heads_DHBN[:, head : head + count, first : first + self.split.count, :]

    def by_group(self, head, count):
        """The heads of each (sequence, kv head) group, `count` each from `head` on: a list of (D, count, N)."""
        groups = []
        for sequence in range(self.split.count):
            for g in range(self.kv_heads):
                groups.append(self.attended_heads(head + g * count, count)[:, :, sequence, :])
        return groups

    def attended(self):
        """Where attention stores the result of this core's sequences: (D, H, B, N)."""
        count, target_DHR = self.split.count, self.attended_DHR
        if self.split.splits_output:
            target_DHR = self.gathered_DCHR[:, nl.program_id(0), :, :]
        dim, heads, _ = target_DHR.shape
        return target_DHR[:, :, 0 : count * self.candidates].reshape((dim, heads, count, self.candidates))

    def gather_attended(self):
        """The attention output of the rows whose projection this core computes."""
        if self.split.splits_output:
            dim, _, heads, per_core = self.gathered_DCHR.shape
            exchange_halves(self.gathered_DCHR.reshape((dim, 2, heads * per_core)), ATTENDED_PIPE)
            for core in range(2):
                first, last = core * per_core, min(self.rows, (core + 1) * per_core)
                if first < last:
                    target, source = self.attended_DHR[:, :, first:last], self.gathered_DCHR[:, core, :, :]
                    nisa.tensor_copy(dst=target, src=source[:, :, 0 : last - first])
        return self.attended_DHR
