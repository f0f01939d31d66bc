"""Paged keys and values as kv_stationary_attention reads them: chunks of keys, key groups, and the order of loads.

A key group has the keys of a pack between two updates of its running max, up to GROUP_BYTES of a head dimension, in
chunks of 1024. While the chunks of a group are scored, the values of the group before are multiplied, sequence by
sequence: the loads of both alternate. R rows of a pack; D of more than 128 is split into D / 128 tiles.
"""

import math

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.paged_kv import HALVES, RUN, TILE_RUN, PagedKV, PageIndex, transpose_keys
from nki_kernels.limits import CHUNK, GROUP_BYTES
from nki_kernels.tiles import P, absent, itemsize


class Plan(nl.NKIObject):
    """What all layers of a launch share: the tiling, the packs and page indices of `sequences`, first and last."""

    def __init__(self, t, packs, block_table_BL, sequences, dtype):
        self.t = t
        self.packs = packs
        # the first group of this core
        self.group = packs[0].group
        self.key_index = PageIndex(block_table_BL, sequences, t.kv_heads, RUN)
        self.value_index = PageIndex(block_table_BL, sequences, t.kv_heads, TILE_RUN)
        # stationary for sums of weights
        self.ones_PP = nl.ndarray((P, P), dtype=dtype)
        nisa.memset(dst=self.ones_PP, value=1.0)


class OnlineSoftmax(nl.NKIObject):
    """The state of a pack of R rows from key group to key group."""

    def __init__(self):
        # the last position that a row attends, on all partitions: fp32 (128, R)
        self.limit_PR = None
        # -max so far: on the rows' partitions (R, 1), and on all (128, R)
        self.neg_max_R1 = None
        self.neg_max_PR = None
        # sum of the weights so far (128, R), and the weighted values, one (128, R) per tile of D
        self.total_PR = None
        self.values_DR = []


class KeyGroup(nl.NKIObject):
    """A key group of a pack in one layer."""

    def __init__(self, pack, softmax, index, last):
        self.pack = pack
        self.softmax = softmax
        self.index = index
        self.last = last
        self.chunks = []
        # score: the largest score of each partition so far, fp32 (128, R)
        self.max_PR = None
        # exponentials: the factor of earlier key groups, fp32 (128, R)
        self.rescale_PR = None
        # prefetch_values: (128, TILE_RUN, D), by group of rows, chunk and half
        self.values = []
        # multiply: the sum of weights (128, R), and the weighted values, one (128, R) per tile of D
        self.sum_psum_PR = None
        self.part_psum_DR = []

    def parts(self):
        """(group of rows, chunk) pairs, whose values are loaded and multiplied in this order."""
        return self.pack.count * len(self.chunks)


class Chunk(nl.NKIObject):
    """1024 keys of a key group, from the prefetch of its keys to its weights."""

    def __init__(self, key_group, index):
        self.key_group = key_group
        self.index = index
        self.start = index * CHUNK
        # prefetch_keys: gathered keys (128, RUN, D), one per group of rows
        self.key_rows = []
        # transpose_keys: transposed keys with margins, one (128, groups, margin + 1024 + margin) per tile of D
        self.keys_DGW = []
        # begin: the mask, uint8 (128, RUN, R); score: masked scores, fp32; exponentials: weights in the model's dtype
        self.visible_PJR = None
        self.masked_PJR = None
        self.weights_PJR = None

    def is_last(self):
        """Whether it is the last chunk of its key group."""
        return self.index == self.key_group.chunks[len(self.key_group.chunks) - 1].index


class Step(nl.NKIObject):
    """A chunk that is scored, None in the last step, and parts[0] to parts[1] of a key group that are multiplied."""

    def __init__(self, chunk, before, parts):
        self.chunk = chunk
        self.before = before
        self.parts = parts


class KVChunks(nl.NKIObject):
    """A layer's pools of keys and values (pages, G, 128, D) in chunks; transposed keys have `margin` columns around."""

    def __init__(self, pools, plan, margin):
        self.plan = plan
        self.t = plan.t
        self.kv = PagedKV(pools, plan.key_index, plan.value_index)
        self.dtype = pools[0].dtype
        self.margin = margin
        self.tiles = math.ceil(self.t.dim / P)
        self.chunks = []
        self.steps = []
        before = None
        for pack in plan.packs:
            for key_group in key_groups(pack, self.t.length, GROUP_BYTES // itemsize(self.dtype)):
                for i in range(len(key_group.chunks)):
                    self.steps.append(step(key_group.chunks[i], before, i, len(key_group.chunks)))
                self.chunks = self.chunks + key_group.chunks
                before = key_group
        self.steps.append(step(None, before, 0, 1))
        # chunks whose keys are issued, and those whose keys are transposed
        self.issued = 0
        self.transposed = 0

    def prefetch_keys(self, stop, ahead=0):
        """Gather the keys of the chunks before number `stop`, and of more up to `ahead` bytes per partition."""
        size = 0
        while self.issued < len(self.chunks) and (self.issued < stop or size < ahead):
            chunk = self.chunks[self.issued]
            pack = chunk.key_group.pack
            for group in range(pack.group, pack.group + pack.count):
                chunk.key_rows.append(self.kv.gather_keys(group, chunk.index))
                size = size + RUN * self.t.dim * itemsize(self.dtype)
            self.issued = self.issued + 1

    def transpose_keys(self, stop):
        """Transpose the keys of the chunks before number `stop`."""
        part, width = min(self.t.dim, P), CHUNK + 2 * self.margin
        while self.transposed < min(stop, len(self.chunks)):
            chunk = self.chunks[self.transposed]
            for d in range(self.tiles):
                keys_DGW = nl.ndarray((part, len(chunk.key_rows), width), dtype=self.dtype)
                for i in range(len(chunk.key_rows)):
                    rows_PRD = chunk.key_rows[i][:, :, d * P : d * P + part]
                    transpose_keys(keys_DGW[:, i, self.margin : self.margin + CHUNK], rows_PRD)
                chunk.keys_DGW.append(keys_DGW)
            chunk.key_rows = []
            self.transposed = self.transposed + 1

    def prefetch_values(self, number):
        """Gather the values that are multiplied in a step."""
        if number == len(self.steps) or absent(self.steps[number].before):
            # after the last step, and before the first key group is scored
            return
        key_group, parts = self.steps[number].before, self.steps[number].parts
        for part in range(parts[0], parts[1]):
            group, chunk = part // len(key_group.chunks), key_group.chunks[part % len(key_group.chunks)]
            for half in range(HALVES):
                values_PJD = nl.ndarray((P, TILE_RUN, self.t.dim), dtype=self.dtype)
                self.kv.gather_values(values_PJD, key_group.pack.group + group, chunk.index * HALVES + half)
                key_group.values.append(values_PJD)


def key_groups(pack, length, size):
    """The key groups of a pack, `size` keys each, and their chunks."""
    groups, softmax, chunks = [], OnlineSoftmax(), length // CHUNK
    each = size // CHUNK
    for first in range(0, chunks, each):
        key_group = KeyGroup(pack, softmax, first // each, first + each >= chunks)
        for index in range(first, min(first + each, chunks)):
            key_group.chunks.append(Chunk(key_group, index))
        groups.append(key_group)
    return groups


def step(chunk, before, i, count):
    """Step i of `count`, which share the parts of the key group `before`, if any."""
    parts = (0, 0)
    if not absent(before):
        parts = (i * before.parts() // count, (i + 1) * before.parts() // count)
    return Step(chunk, before, parts)
