"""Verification attention: N candidate rows per sequence over the cached prefix and themselves, in one pass.

out[r] = sum_s exp(q[r].k[s] / sqrt(D) - m) v[s] / sum_s exp(q[r].k[s] / sqrt(D) - m), s over r's visible slots

Row n of sequence b stands in cache slot positions[b, 0] + n and is written there first. A chain's row sees
the slots up to its own; with `ancestors`, row n sees the prefix and the candidates j whose bit is set in
ancestors[b, n]. Keys come in chunks of 512, aligned to absolute position, each with the running maximum m of
the row and merged in ascending order; in a chunk partition p holds keys 4p to 4p + 3, and its four key tiles
are summed in order. What a row cannot see adds exact zeros, so that its bits depend on its own slot and cache
alone: not on N, its index, its neighbours, or the calls that wrote the prefix.

Layouts: q (B, H, N, D), new keys and values (B, G, N, D), k_cache (B, G, D, S) transposed, v_cache (B, G, S, D).
Cost: keys and values are read once (roofline.verify_attention). Design and timeline: docs/verify_attention.md.
"""

import math

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.verify_attention_chunks import Rows, attend, plan
from nki_kernels.verify_attention_rows import (
    CHUNK,
    RUN,
    columns,
    first_and_last,
    groups_per_scatter,
    move,
    new_rows,
    of_groups,
    ramp,
    tiling,
    transposed,
)

# chunks per transfer of keys: short at first so that work starts early, then rows of 2 KiB
FIRST_TILE, LATER_TILE = 1, 2


class Cache(nl.NKIObject):
    """A contiguous cache with transposed keys: (B, G, D, S) and (B, G, S, D)."""

    def __init__(self, keys, values, new_keys, slots, t):
        self.keys = keys
        self.values = values
        self.new_keys = new_keys
        self.slots = slots
        self.t = t
        self.dtype = values.dtype
        self.tiles = key_tiles(t)
        self.where = columns(slots, t, self.tiles)

    def load_keys(self, step):
        """The step's keys, which lie in the pack's current key tile; a new tile is loaded and merged first."""
        pack, t = step.pack, self.t
        if step.chunk == 0:
            pack.tile = -1
            offset = pack.group * t.candidates * t.dim
            pack.new = transposed(self.new_keys, pack.count * t.candidates, t, offset)
        following = pack.tile + 1
        if following < len(self.tiles) and self.tiles[following][0] == step.start:
            pack.tile = following
            pack.keys = load_key_tile(self.keys, pack, self.tiles[following], t)
            merge_new_keys(pack, self.where, t)
        step.keys = pack.keys
        step.key = t.candidates + step.start - self.tiles[pack.tile][0]
        if step.last:
            append_keys(self.keys, pack, self.slots, t)

    def load_values(self, step):
        """Values of one chunk, four consecutive keys per partition: (W / RUN, groups, RUN, D)."""
        t, pack = self.t, step.pack
        whole, rest, run = step.size // RUN, step.size % RUN, RUN * t.dim
        base, stride = (pack.group * t.slots + step.start) * t.dim, t.slots * t.dim
        step.values = nl.ndarray((math.ceil(step.size / RUN), pack.count, RUN, t.dim), dtype=self.dtype)
        if rest:
            nisa.memset(dst=step.values, value=0.0)
            source = self.values.ap([[run, 1], [stride, pack.count], [1, rest * t.dim]], offset=base + whole * run)
            nisa.dma_copy(dst=step.values[whole : whole + 1, :, 0:rest, :], src=source)
        if whole:
            source = self.values.ap([[run, whole], [stride, pack.count], [1, run]], offset=base)
            nisa.dma_copy(dst=step.values[0:whole], src=source)


def key_tiles(t):
    """Start and size of each transfer of keys, in slots; the tile has no say in the result's bits."""
    tiles, start, chunks = [], 0, FIRST_TILE
    while start < t.slots:
        size = min(chunks * CHUNK, t.slots - start)
        tiles.append((start, size))
        start = start + size
        if len(tiles) >= LATER_TILE:
            chunks = LATER_TILE
    return tiles


def load_key_tile(keys, pack, tile, t):
    """Transposed keys with room for the candidates on both sides: (D, groups, N + W + N)."""
    n, start, size = t.candidates, tile[0], tile[1]
    width = math.ceil(size / RUN) * RUN
    made = nl.ndarray((t.dim, pack.count, width + 2 * n), dtype=keys.dtype)
    if width != size:
        nisa.memset(dst=made[:, :, n + size : n + width], value=0.0)
    for back in range(pack.count):
        i = pack.count - 1 - back
        source = keys.ap([[t.slots, t.dim], [1, size]], offset=(pack.group + i) * t.dim * t.slots + start)
        move(made[:, i, n : n + size], source)
    return made


def merge_new_keys(pack, where, t):
    """Put the new keys over the stale ones; what lies outside of this key tile falls into the margins."""
    n, count, width = t.candidates, pack.count, pack.keys.shape[2]
    for back in range(count):
        i = count - 1 - back
        sequence = (pack.group + i) // t.kv_heads
        column = where[0:1, pack.tile, sequence : sequence + 1]
        target = pack.keys.ap([[count * width, t.dim], [1, n]], offset=i * width, scalar_offset=column, indirect_dim=2)
        nisa.tensor_copy(dst=target, src=pack.new[:, i * n : (i + 1) * n], engine=nisa.engine.gpsimd)


def append_keys(keys, pack, slots, t):
    """Store the new key columns of each group, after the loads of the pack's stale ones."""
    n = t.candidates
    flat = keys.reshape((t.groups * t.dim, t.slots))
    for i in range(pack.count):
        sequence = (pack.group + i) // t.kv_heads
        target = flat.ap([[t.slots, t.dim], [1, n]], offset=(pack.group + i) * t.dim * t.slots,
                         scalar_offset=slots[0:1, sequence : sequence + 1], indirect_dim=1)  # fmt: skip
        nisa.dma_copy(dst=target, src=pack.new[:, i * n : (i + 1) * n])


def append_values(values, new_values, positions, t, groups):
    """Scatter the new value rows of groups[0] to groups[1] to their slots before anything reads them."""
    n, per = t.candidates, groups_per_scatter(t)
    flat = values.reshape((t.groups * t.slots, t.dim))
    for group in range(groups[0], groups[1], per):
        count = min(per, groups[1] - group)
        rows = count * n
        base, new = of_groups(positions, t, group, count, n, 0), new_rows(new_values, t, group, count)
        start, row = ramp(rows, n, t.slots, 1, group * t.slots), nl.ndarray((rows, 1), dtype=nl.int32)
        nisa.tensor_tensor(dst=row, data1=start, data2=base, op=nl.add)
        nisa.dma_copy(dst=flat.ap([[t.dim, rows], [1, t.dim]], vector_offset=row), src=new)


@nki.jit
def verify_attention_kernel(q, k_new, v_new, k_cache, v_cache, positions, ancestors=None, with_lse=False):
    """Append the new rows, then attend: out (B, H, N, D) in q's dtype, and lse (B, H, N) fp32 if asked.

    positions (B, N) int32, ancestors (B, N) int32 or None; positions[b, 0] + N <= S. The caches change in place.
    """
    batch, heads, count, _ = q.shape
    t = tiling(q, v_cache.shape[1], v_cache.shape[2])
    out, lse = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm), None
    if with_lse:
        lse = nl.ndarray((batch, heads, count), dtype=nl.float32, buffer=nl.shared_hbm)
    first, last = first_and_last(t)
    if first < last:
        slots = nl.ndarray((1, batch), dtype=nl.int32)
        move(slots, positions.ap([[0, 1], [count, batch]], offset=0))
        append_values(v_cache, v_new, positions, t, (first, last))
        cache = Cache(k_cache, v_cache, k_new, slots, t)
        attend(Rows(q, positions, ancestors, out, lse), cache, slots, t, plan(t, first, last))
    if with_lse:
        return out, lse
    return out
