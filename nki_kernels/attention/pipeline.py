"""The order of verification attention: every chunk of every pack of rows, run as a software pipeline.

Where the keys and values come from is the business of the cache object that `attend` is given.
"""

import math

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.rows import BANK, CHUNK, HALF, P, columns, hidden_candidates, row_limits, transposed
from nki_kernels.attention.softmax import add_sums, add_values, exponentials, scores, turn, weigh


class Pack(nl.NKIObject):
    """Rows that share the engines, and what they carry from chunk to chunk: -max / sqrt(D), sum, weighted values."""

    def __init__(self, group, count):
        self.group = group
        self.count = count


class Step(nl.NKIObject):
    """One chunk of one pack."""

    def __init__(self, pack, chunk, slots):
        self.pack = pack
        self.chunk = chunk
        self.start = chunk * CHUNK
        self.size = min(CHUNK, slots - self.start)
        self.last = self.start + CHUNK >= slots
        # groups whose values are weighed together: all, but in halves in the step that ends the launch
        self.spans = [(0, pack.count)]


class Rows(nl.NKIObject):
    """What every pack reads or writes: positions, ancestors or None, outputs, lse or None."""

    def __init__(self, positions, ancestors, out, lse):
        self.positions = positions
        self.ancestors = ancestors
        self.out = out
        self.lse = lse


def outputs(q, with_lse):
    """out (B, H, N, D) and lse (B, H, N) fp32, or None where it is not asked for."""
    out, lse = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm), None
    if with_lse:
        lse = nl.ndarray(q.shape[0:3], dtype=nl.float32, buffer=nl.shared_hbm)
    return out, lse


def plan(q, t, first, last):
    """Every chunk of every pack of the groups `first` to `last`, in the order in which they start.

    The queries travel through partitions whose DMA engines other small loads leave free.
    """
    turned = transposed(q, first * t.queries, (last - first) * t.queries, t, P // 2)
    steps = []
    for group in range(first, last, t.pack):
        pack = Pack(group, min(t.pack, last - group))
        row = (group - first) * t.queries
        pack.q = turned[:, row : row + pack.count * t.queries]
        for chunk in range(math.ceil(t.slots / CHUNK)):
            steps.append(Step(pack, chunk, t.slots))
    final, per = steps[len(steps) - 1], max(1, BANK // 2 // t.dim)
    final.spans = []
    for stop in range(final.pack.count, 0, -per):
        final.spans.append((max(0, stop - per), stop))
    return steps


def load_limits(pack, rows, slots, t):
    """What each row may see: a range of slots, and for a tree the candidates that are hidden from it."""
    tree = rows.ancestors != None  # noqa: E711
    pack.limit = row_limits(rows.positions, t, pack, tree)
    pack.zero = nl.ndarray((pack.count * t.queries, 1), dtype=nl.float32)
    nisa.memset(dst=pack.zero, value=0.0)
    pack.hidden = None
    if tree:
        pack.hidden = hidden_candidates(rows.ancestors, t, pack)
        pack.where = columns(slots, t)


def warm_up():
    """Let the Scalar Engine load its table of exponentials while the first keys travel."""
    made = nl.ndarray((1, 1), dtype=nl.float32)
    nisa.memset(dst=made, value=0.0)
    nisa.activation(dst=made, op=nl.exp, data=made)


def begin(step, rows, cache, slots, t):
    """Let a step's keys travel, and before a pack's first step the limits of its rows."""
    if step.chunk == 0:
        load_limits(step.pack, rows, slots, t)
    cache.load_keys(step)


def attend(rows, cache, slots, t, steps):
    """All steps, each spread over seven turns of the loop so that the engines overlap on neighbouring chunks.

    Keys travel ahead of the values of earlier chunks, so that little is left to do when the last values arrive.
    """
    count = len(steps)
    warm_up()
    for i in range(-t.ahead, count + t.weigh + 1):
        if 0 <= i - 1 < count:
            exponentials(steps[i - 1], t, cache.dtype)
            if steps[i - 1].last:
                cache.append(steps[i - 1].pack)
        if 0 <= i - t.turn < count:
            turn(steps[i - t.turn])
        if 0 <= i - t.weigh - 1 < count:
            weigh(steps[i - t.weigh - 1], HALF, t)
        if 0 <= i < count:
            scores(steps[i], t)
        if i + t.ahead < count:
            begin(steps[i + t.ahead], rows, cache, slots, t)
        if 0 <= i - 1 < count:
            cache.load_values(steps[i - 1])
        if 0 <= i - t.weigh - 1 < count:
            add_values(steps[i - t.weigh - 1], rows, t)
        if 0 <= i - t.weigh < count:
            weigh(steps[i - t.weigh], 0, t)
            add_sums(steps[i - t.weigh], rows, t)
