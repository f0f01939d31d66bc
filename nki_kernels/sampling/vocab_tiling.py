"""Tiling of a vocabulary shard: rows of logits in parts of columns, one part of a row on each partition.

R rows of W_all columns become tiles (P = parts * R, columns): partition j * R + r holds row r's columns j * W to
(j + 1) * W, less the columns beyond the core's last. Two cores take half of the columns each.
"""

import math
from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import P, affine_iota, core_slice, dma_static

# the shortest row that max8 takes
MIN_WIDTH = 8


@dataclass(frozen=True)
class VocabTiling(nl.NKIObject):
    """R rows whose columns first to last lie in `parts` parts of `width` columns, of a row of `stride` columns."""

    rows: int
    first: int
    last: int
    parts: int
    width: int
    stride: int

    def partitions(self):
        return self.rows * self.parts


def vocab_tiling(rows, columns, max_parts=P):
    """The tiling of this core's columns; widths are even, so that every part starts with the first id of a pair."""
    first, last = core_slice(columns, 2)
    count = last - first
    parts = max(1, min(max_parts, P // rows, count // MIN_WIDTH))
    return VocabTiling(rows, first, last, parts, max(MIN_WIDTH, 2 * math.ceil(count / parts / 2)), columns)


def chunks(t, max_size):
    """(start, size) of each chunk of a part's columns, in even sizes of at most `max_size`."""
    sizes = []
    for start in range(0, t.width, max_size):
        sizes.append((start, min(max_size, t.width - start)))
    return sizes


def covered(t, start, size):
    """The number of parts that have all columns of a chunk, and the number of columns of the next part."""
    full = max(0, min(t.parts, (t.last - t.first - start - size) // t.width + 1))
    rest = 0
    if full < t.parts:
        rest = max(0, min(size, t.last - t.first - full * t.width - start))
    return full, rest


def in_hbm(t, source, chunk, part, count, size):
    """The HBM elements of `count` parts from `part` on: [parts, R, size]."""
    offset = t.first + part * t.width + chunk[0]
    return source.ap([[t.width, count], [t.stride, t.rows], [1, size]], offset=offset)


def load(t, source, chunk, fill):
    """One chunk of every row: (parts * R, size) in the source's dtype, with `fill` beyond the last column."""
    size = chunk[1]
    chunk_PW = nl.ndarray((t.partitions(), size), dtype=source.dtype)
    full, rest = covered(t, chunk[0], size)
    if full == t.parts - 1 and rest:
        if rest < size:
            nisa.memset(dst=chunk_PW[:, rest:size], value=fill, engine=nisa.engine.gpsimd)
    elif full < t.parts:
        nisa.memset(dst=chunk_PW, value=fill, engine=nisa.engine.gpsimd)
    if full:
        dma_static(chunk_PW[0 : full * t.rows, :], in_hbm(t, source, chunk, 0, full, size))
    if rest:
        dma_static(chunk_PW[full * t.rows : (full + 1) * t.rows, 0:rest], in_hbm(t, source, chunk, full, 1, rest))
    return chunk_PW


def store(t, target, chunk, chunk_PW):
    """Write one chunk of every row to HBM, without the columns beyond the last."""
    size = chunk[1]
    full, rest = covered(t, chunk[0], size)
    if full:
        dma_static(in_hbm(t, target, chunk, 0, full, size), chunk_PW[0 : full * t.rows, :])
    if rest:
        dma_static(in_hbm(t, target, chunk, full, 1, rest), chunk_PW[full * t.rows : (full + 1) * t.rows, 0:rest])


def per_row(t, source, columns):
    """Each row's `columns` numbers of an HBM tensor (R, columns) on all of its partitions."""
    numbers_PC = nl.ndarray((t.partitions(), columns), dtype=source.dtype)
    dma_static(numbers_PC, source.ap([[0, t.parts], [columns, t.rows], [1, columns]], offset=0))
    return numbers_PC


def for_all(t, source):
    """The number of an HBM tensor (1, 1) on every partition."""
    number_P1 = nl.ndarray((t.partitions(), 1), dtype=source.dtype)
    dma_static(number_P1, source.ap([[0, t.partitions()], [1, 1]], offset=0))
    return number_P1


def part_starts(t, step):
    """(first + j * W) / step on the partitions of part j: fp32 (parts * R, 1), exact below 2^24."""
    return affine_iota(t.partitions(), t.rows, t.width // step, 0, t.first // step)


def store_per_row(target, core, row_1R):
    """One number per row, on one partition, as row `core` of an HBM output (cores, R)."""
    rows = target.shape[1]
    nisa.dma_copy(dst=target.ap([[rows, 1], [1, rows]], offset=core * rows), src=row_1R)
