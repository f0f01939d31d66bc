"""The order of verification attention: every chunk of every pack of rows, run as a software pipeline.

The launch's cache object knows where keys and values come from.
"""

import math

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.rows import columns, hidden_candidates, is_short, row_limits
from nki_kernels.attention.softmax import (
    add_sums,
    add_values,
    exponentials,
    scores,
    turn,
    weigh_first_half,
    weigh_second_half,
)
from nki_kernels.attention.state import Chunk, Pack
from nki_kernels.limits import CHUNK
from nki_kernels.tiles import BANK, P, absent, transposed, warm_up


def outputs(q, with_lse):
    """out (B, H, N, D) and lse (B, H, N) fp32, or None without `with_lse`."""
    out_BHND, lse_BHN = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm), None
    if with_lse:
        lse_BHN = nl.ndarray(q.shape[0:3], dtype=nl.float32, buffer=nl.shared_hbm)
    return out_BHND, lse_BHN


def chunks_of(t, first, last):
    """Every chunk of every pack of the groups `first` to `last`, in order."""
    chunks = []
    for group in range(first, last, t.pack):
        pack = Pack(group, min(t.pack, last - group))
        for index in range(math.ceil(t.slots / CHUNK)):
            chunks.append(Chunk(pack, index, t.slots))
    return chunks


def plan(q, t, first, last):
    """The chunks of the groups `first` to `last` of q in HBM; the one that ends the launch is weighed in parts.

    Parts are halves of a bank, in a short launch single groups. The queries travel through partitions whose DMA
    engines other small loads leave free.
    """
    chunks, rows = chunks_of(t, first, last), t.queries
    q_DR = transposed(q, first * rows, (last - first) * rows, P // 2)
    for chunk in chunks:
        start = (chunk.pack.group - first) * rows
        chunk.pack.q_DR = q_DR[:, start : start + chunk.pack.count * rows]
    final, per = chunks[len(chunks) - 1], max(1, BANK // 2 // t.dim)
    if is_short(t):
        per = 1
    final.spans = []
    for stop in range(final.pack.count, 0, -per):
        final.spans.append((max(0, stop - per), stop))
    return chunks


def load_keys(chunk, launch):
    """Let a chunk's keys travel, and before a pack's first chunk the limits of its rows."""
    if chunk.index == 0:
        load_limits(chunk.pack, launch)
    launch.cache.load_keys(chunk)


def load_limits(pack, launch):
    """The range of slots that each row may see, and with ancestors the candidates that are hidden from it."""
    t, tree = launch.t, not absent(launch.ancestors_BN)
    pack.limit_R1 = row_limits(launch.positions_BN, t, pack, tree)
    pack.zero_R1 = nl.ndarray((pack.count * t.queries, 1), dtype=nl.float32)
    nisa.memset(dst=pack.zero_R1, value=0.0)
    if tree:
        pack.hidden_RGN = hidden_candidates(launch.ancestors_BN, t, pack)
        pack.columns_1CB = columns(launch.slots_1B, t)


def append_keys(chunk, launch):
    """Store a pack's new keys after its last chunk's exponentials.

    Earlier would give the same bits, for the stale columns are replaced in SBUF; here the transfers delay nothing.
    """
    if chunk.last:
        launch.cache.append(chunk.pack)


def load_values(chunk, launch):
    """Let a chunk's values travel."""
    launch.cache.load_values(chunk)


def stages(t):
    """(lag, stage) in the order of a turn: turn i of the pipeline works on chunk i - lag.

    Keys travel ahead of the values of earlier chunks, so that little is left to do when the last values arrive.
    """
    return (
        (1, exponentials),
        (1, append_keys),
        (t.turn, turn),
        (t.weigh + 1, weigh_second_half),
        (0, scores),
        (-t.ahead, load_keys),
        (1, load_values),
        (t.weigh + 1, add_values),
        (t.weigh, weigh_first_half),
        (t.weigh, add_sums),
    )


def attend(launch, chunks):
    """All chunks through all stages, so that the engines overlap on neighbouring chunks."""
    t, count = launch.t, len(chunks)
    warm_up(nl.exp)
    for i in range(-t.ahead, count + t.weigh + 1):
        for entry in stages(t):
            place, stage = i - entry[0], entry[1]
            if 0 <= place < count:
                stage(chunks[place], launch)
