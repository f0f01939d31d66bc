"""The contiguous cache of verification attention, whose keys are transposed."""

import math

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.rows import RUN, columns, is_short
from nki_kernels.limits import CHUNK
from nki_kernels.tiles import BANK, P, move, transposed


class Cache(nl.NKIObject):
    """Keys (B, G, D, S) and values (B, G, S, D) in HBM, and the new keys of this core's groups in SBUF."""

    def __init__(self, keys_BGDS, values_BGSD, slots_1B, t):
        self.keys_BGDS = keys_BGDS
        self.values_BGSD = values_BGSD
        self.slots_1B = slots_1B
        self.t = t
        self.dtype = values_BGSD.dtype
        # where the candidates begin in each chunk: int32 (1, chunks, B)
        self.columns_1CB = columns(slots_1B, t)
        # new keys, transposed: (D, N) of each group from `first` on
        self.first = 0
        self.new = []

    def load_new_keys(self, new_BGND, first, last):
        """Let the new keys of the groups `first` to `last` travel, through the DMA engines of partitions 32 to 63."""
        n = self.t.candidates
        new_DR, by_group = transposed(new_BGND, first * n, (last - first) * n, P // 4), []
        for i in range(last - first):
            by_group.append(new_DR[:, i * n : (i + 1) * n])
        self.hold_new_keys(by_group, first)

    def hold_new_keys(self, new, first):
        """Take transposed new keys that are in SBUF already: a list of (D, N), one a group from `first` on."""
        self.new = new
        self.first = first

    def new_keys(self, group):
        """Transposed new keys of one group: (D, N)."""
        return self.new[group - self.first]

    def load_keys(self, chunk):
        """Transposed keys of one chunk, the new ones over the stale ones: (D, groups, N + W + N)."""
        span = CHUNK
        if is_short(self.t):
            # the first bank of all groups comes first: it is masked while the second travels
            span = BANK
        chunk.keys_DGW = load_key_tile(self.keys_BGDS, chunk, self.t, span)
        chunk.margin = self.t.candidates
        self.merge(chunk)

    def merge(self, chunk):
        """Put the new keys over the stale ones; those outside of this chunk fall into the margins."""
        t, pack, width = self.t, chunk.pack, chunk.keys_DGW.shape[2]
        for back in range(pack.count):
            i = pack.count - 1 - back
            sequence = (pack.group + i) // t.kv_heads
            column = self.columns_1CB[0:1, chunk.index, sequence : sequence + 1]
            stale_DN = chunk.keys_DGW.ap(
                [[pack.count * width, t.dim], [1, t.candidates]], offset=i * width, scalar_offset=column, indirect_dim=2
            )
            nisa.tensor_copy(dst=stale_DN, src=self.new_keys(pack.group + i), engine=nisa.engine.gpsimd)

    def append(self, pack):
        """Store the pack's new keys: the Scalar Engine's queue comes to them after the pack's exponentials."""
        t = self.t
        flat = self.keys_BGDS.reshape((t.groups * t.dim, t.slots))
        for group in range(pack.group, pack.group + pack.count):
            sequence = group // t.kv_heads
            slots_DN = flat.ap(
                [[t.slots, t.dim], [1, t.candidates]],
                offset=group * t.dim * t.slots,
                scalar_offset=self.slots_1B[0:1, sequence : sequence + 1],
                indirect_dim=1,
            )
            nisa.dma_copy(
                dst=slots_DN, src=self.new_keys(group), dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.scalar
            )

    def load_values(self, chunk):
        """Values of one chunk, eight consecutive keys per partition: (W / RUN, groups, RUN, D)."""
        t, pack = self.t, chunk.pack
        whole, rest, run = chunk.size // RUN, chunk.size % RUN, RUN * t.dim
        base, stride = (pack.group * t.slots + chunk.start) * t.dim, t.slots * t.dim
        values_TGRD = nl.ndarray((math.ceil(chunk.size / RUN), pack.count, RUN, t.dim), dtype=self.dtype)
        chunk.values_TGRD = values_TGRD
        if rest:
            nisa.memset(dst=values_TGRD, value=0.0)
            pattern = [[run, 1], [stride, pack.count], [1, rest * t.dim]]
            source = self.values_BGSD.ap(pattern, offset=base + whole * run)
            nisa.dma_copy(dst=values_TGRD[whole : whole + 1, :, 0:rest, :], src=source)
        if whole:
            for back in range(pack.count):
                i = pack.count - 1 - back
                source = self.values_BGSD.ap([[run, whole], [1, run]], offset=base + i * stride)
                move(values_TGRD[0:whole, i, :, :], source)


def load_key_tile(keys_BGDS, chunk, t, span=CHUNK):
    """Transposed keys with room for the candidates on both sides, (D, groups, N + W + N), by `span` slots."""
    n, pack, size = t.candidates, chunk.pack, chunk.size
    width = math.ceil(size / RUN) * RUN
    keys_DGW = nl.ndarray((t.dim, pack.count, width + 2 * n), dtype=keys_BGDS.dtype)
    if width != size:
        nisa.memset(dst=keys_DGW[:, :, n + size : n + width], value=0.0)
    for start in range(0, size, span):
        stop = min(start + span, size)
        for back in range(pack.count):
            i = pack.count - 1 - back
            offset = (pack.group + i) * t.dim * t.slots + chunk.start + start
            source = keys_BGDS.ap([[t.slots, t.dim], [1, stop - start]], offset=offset)
            move(keys_DGW[:, i, n + start : n + stop], source)
    return keys_DGW
