"""Verification attention: N candidate rows per sequence over the cached prefix and themselves, in one pass.

out[r] = sum_s exp(q[r].k[s] / sqrt(D) - m) v[s] / sum_s exp(q[r].k[s] / sqrt(D) - m), s over r's visible slots

Row n of sequence b stands in cache slot positions[b, 0] + n and is written there first. A chain's row sees
the slots up to its own; with `ancestors`, row n sees the prefix and the candidates j whose bit is set in
ancestors[b, n]. Keys come in chunks of 1024, aligned to absolute position, each with the running maximum m of
the row and merged in ascending order; in a chunk partition p holds keys 8p to 8p + 7, and its eight key tiles
are summed in order. What a row cannot see adds exact zeros, so that its bits depend on its own slot and cache
alone: not on N, its index, its neighbours, or the calls that wrote the prefix.

Layouts: q (B, H, N, D), new keys and values (B, G, N, D), k_cache (B, G, D, S) transposed, v_cache (B, G, S, D).
Cost: keys and values are read once (roofline.verify_attention). Design and timeline: docs/verify_attention.md.
"""

import math

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.append import append_values
from nki_kernels.attention.pipeline import Rows, attend, outputs, plan
from nki_kernels.attention.rows import RUN, P, columns, first_and_last, first_slots, move, tiling, transposed


class Cache(nl.NKIObject):
    """A contiguous cache with transposed keys: (B, G, D, S) and (B, G, S, D)."""

    def __init__(self, keys, values, slots, t):
        self.keys = keys
        self.values = values
        self.slots = slots
        self.t = t
        self.dtype = values.dtype
        self.where = columns(slots, t)

    def take(self, new_keys, first, last):
        """Let the new keys of the groups `first` to `last` travel, through the DMA engines of partitions 32 to 63."""
        n = self.t.candidates
        self.first = first
        self.new = transposed(new_keys, first * n, (last - first) * n, self.t, P // 4)

    def new_keys(self, group):
        """Transposed new keys of one group: (D, N)."""
        start = (group - self.first) * self.t.candidates
        return self.new[:, start : start + self.t.candidates]

    def load_keys(self, step):
        """Transposed keys of one chunk, the new ones over the stale ones: (D, groups, N + W + N)."""
        step.keys = load_key_tile(self.keys, step, self.t)
        step.key = self.t.candidates
        self.merge(step)

    def merge(self, step):
        """Put the new keys over the stale ones; what lies outside of this chunk falls into the margins."""
        t, pack, width = self.t, step.pack, step.keys.shape[2]
        for back in range(pack.count):
            i = pack.count - 1 - back
            sequence = (pack.group + i) // t.kv_heads
            column = self.where[0:1, step.chunk, sequence : sequence + 1]
            target = step.keys.ap(
                [[pack.count * width, t.dim], [1, t.candidates]], offset=i * width, scalar_offset=column, indirect_dim=2
            )
            nisa.tensor_copy(dst=target, src=self.new_keys(pack.group + i), engine=nisa.engine.gpsimd)

    def append(self, pack):
        """Store the pack's new keys: the Scalar Engine's queue comes to them after the pack's exponentials."""
        t = self.t
        flat = self.keys.reshape((t.groups * t.dim, t.slots))
        for group in range(pack.group, pack.group + pack.count):
            sequence = group // t.kv_heads
            target = flat.ap(
                [[t.slots, t.dim], [1, t.candidates]],
                offset=group * t.dim * t.slots,
                scalar_offset=self.slots[0:1, sequence : sequence + 1],
                indirect_dim=1,
            )
            nisa.dma_copy(dst=target, src=self.new_keys(group), dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.scalar)

    def load_values(self, step):
        """Values of one chunk, eight consecutive keys per partition: (W / RUN, groups, RUN, D)."""
        t, pack = self.t, step.pack
        whole, rest, run = step.size // RUN, step.size % RUN, RUN * t.dim
        base, stride = (pack.group * t.slots + step.start) * t.dim, t.slots * t.dim
        step.values = nl.ndarray((math.ceil(step.size / RUN), pack.count, RUN, t.dim), dtype=self.dtype)
        if rest:
            nisa.memset(dst=step.values, value=0.0)
            source = self.values.ap([[run, 1], [stride, pack.count], [1, rest * t.dim]], offset=base + whole * run)
            nisa.dma_copy(dst=step.values[whole : whole + 1, :, 0:rest, :], src=source)
        if whole:
            for back in range(pack.count):
                i = pack.count - 1 - back
                move(step.values[0:whole, i, :, :], self.values.ap([[run, whole], [1, run]], offset=base + i * stride))


def load_key_tile(keys, step, t):
    """Transposed keys with room for the candidates on both sides: (D, groups, N + W + N)."""
    n, pack, size = t.candidates, step.pack, step.size
    width = math.ceil(size / RUN) * RUN
    made = nl.ndarray((t.dim, pack.count, width + 2 * n), dtype=keys.dtype)
    if width != size:
        nisa.memset(dst=made[:, :, n + size : n + width], value=0.0)
    for back in range(pack.count):
        i = pack.count - 1 - back
        source = keys.ap([[t.slots, t.dim], [1, size]], offset=(pack.group + i) * t.dim * t.slots + step.start)
        move(made[:, i, n : n + size], source)
    return made


@nki.jit
def verify_attention_kernel(q, k_new, v_new, k_cache, v_cache, positions, ancestors=None, with_lse=False):
    """Append the new rows, then attend: out (B, H, N, D) in q's dtype, and lse (B, H, N) fp32 if asked.

    positions (B, N) int32, ancestors (B, N) int32 or None; positions[b, 0] + N <= S. The caches change in place.
    """
    t = tiling(q, v_cache.shape[1], v_cache.shape[2])
    out, lse = outputs(q, with_lse)
    first, last = first_and_last(t)
    if first < last:
        slots = first_slots(positions)
        append_values(v_cache, v_new, positions, t, (first, last))
        cache, steps = Cache(k_cache, v_cache, slots, t), plan(q, t, first, last)
        cache.take(k_new, first, last)
        attend(Rows(positions, ancestors, out, lse), cache, slots, t, steps)
    if with_lse:
        return out, lse
    return out
