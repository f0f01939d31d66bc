"""The software pipeline of verification attention: the order of its stages over the chunks of all packs."""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.paged_kv import RUN, transpose_keys
from nki_kernels.attention.softmax import add_sums, add_values, exponentials, multiply, scores, transpose
from nki_kernels.attention.tiling import chunks_of, row_limits
from nki_kernels.limits import CHUNK
from nki_kernels.tiles import P, dma_static, preload_act_table


def plan(q, t, first, last):
    """The chunks of the groups `first` to `last`, their queries loaded and transposed."""
    chunks, rows = chunks_of(t, first, last), t.queries
    q_DR = load_transposed(q, first * rows, (last - first) * rows)
    for chunk in chunks:
        start = (chunk.pack.group - first) * rows
        chunk.pack.q_DR = q_DR[:, start : start + chunk.pack.count * rows]
    final = chunks[len(chunks) - 1]
    if final.index == 0 and final.pack.count > 2:
        # a short launch ends with small stores: its last groups are multiplied, normalized and stored one by one
        final.spans = []
        for i in range(final.pack.count):
            final.spans.append((i, i + 1))
    return chunks


def load_transposed(source, first, rows):
    """Rows `first` to `first + rows` of D elements of an HBM tensor (..., D), transposed: (D, rows)."""
    dim = source.shape[len(source.shape) - 1]
    source_DR = nl.ndarray((dim, rows), dtype=source.dtype)
    for done in range(0, rows, P):
        count = min(P, rows - done)
        rows_RD = nl.ndarray((count, dim), dtype=source.dtype)
        psum_DR = nl.ndarray((dim, count), dtype=source.dtype, buffer=nl.psum)
        dma_static(rows_RD, source.ap([[dim, count], [1, dim]], offset=(first + done) * dim))
        nisa.nc_transpose(dst=psum_DR, data=rows_RD)
        nisa.tensor_copy(dst=source_DR[:, done : done + count], src=psum_DR)
    return source_DR


def load_keys(chunk, launch):
    """Gather and transpose a chunk's keys; before a pack's first chunk, compute the positions that its rows attend."""
    t, kv, pack = launch.t, launch.kv, chunk.pack
    if chunk.index == 0:
        pack.limit_R1 = row_limits(launch.positions_BN, launch.limit_B1, t, pack)
        pack.zero_R1 = nl.ndarray((pack.count * t.queries, 1), dtype=nl.float32)
        nisa.memset(dst=pack.zero_R1, value=0.0)
    chunk.keys_DGW = nl.ndarray((t.dim, pack.count, CHUNK), dtype=kv.dtype)
    for i in range(pack.count):
        transpose_keys(chunk.keys_DGW[:, i, :], kv.gather_keys(pack.group + i, chunk.index))


def load_values(chunk, launch):
    """Gather a chunk's values."""
    pack = chunk.pack
    chunk.values_PGRD = nl.ndarray((P, pack.count, RUN, launch.t.dim), dtype=launch.kv.dtype)
    for i in range(pack.count):
        launch.kv.gather_values(chunk.values_PGRD[:, i, :, :], pack.group + i, chunk.index)


# (lag, stage) in the order within an iteration: iteration i of the pipeline runs a stage on chunk i - lag. Keys are
# gathered ahead of the values of earlier chunks, so that the pipeline drains on values.
PREFETCH_DISTANCE, DRAIN = 2, 4
STAGES = (
    (1, exponentials),
    (2, transpose),
    (0, scores),
    (-PREFETCH_DISTANCE, load_keys),
    (1, load_values),
    (DRAIN, add_values),
    (3, multiply),
    (3, add_sums),
)


def attend(launch, chunks):
    """Run all chunks through all stages, so that the engines overlap on adjacent chunks."""
    count = len(chunks)
    preload_act_table(nl.exp)
    for i in range(-PREFETCH_DISTANCE, count + DRAIN):
        for entry in STAGES:
            index, stage = i - entry[0], entry[1]
            if 0 <= index < count:
                stage(chunks[index], launch)
