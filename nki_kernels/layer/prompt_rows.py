"""Tiles of 128 rows of a prompt, transposed for the products of prefill."""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.layer.rmsnorm_rows import RMSNormRows, row_splits
from nki_kernels.tiles import PSUM_BANK_BYTES, P, absent, dma_static, itemsize, transpose_on_pe

# row tiles per weight pass: min(GROUP, what fits TRANSPOSED_BYTES, what fits WITH_INNER_BYTES together with the MLP's
# intermediate rows), at least 1
GROUP, TRANSPOSED_BYTES, WITH_INNER_BYTES = 4, 40960, 98304


class RowTile(nl.NKIObject):
    """Rows `first` to `last` of x, up to 128; with gamma (128, T) under RMSNorm."""

    def __init__(self, x, first, last, gamma_PT):
        self.x = x
        self.first = first
        self.rows = last - first
        self.gamma_PT = gamma_PT
        # sections of K: those of the residual, or one
        self.sections = 1
        if not absent(gamma_PT):
            self.sections = row_splits(x.shape[1])
        # prefetch: (R, E); prepare: the same by K tiles, (R, 128, T), and sums of squares, fp32 (R, 128)
        self.rows_RE = None
        self.by_tile_RPT = None
        self.sums_RP = None
        # transpose, unless given: (128, T, R), times gamma if there is one
        self.x_PTR = None
        # prompt_mlp_kernel: RMSNormRows, and silu(g) u, (R, I)
        self.normed = None
        self.gated_RI = None

    def prefetch(self):
        """Load the rows."""
        depth = self.x.shape[1]
        each = depth // self.sections
        self.rows_RE = nl.ndarray((self.rows, depth), dtype=self.x.dtype)
        for start in range(0, depth, each):
            inside = slice(start, start + each)
            dma_static(self.rows_RE[:, inside], self.x[self.first : self.first + self.rows, inside])

    def prepare(self):
        """K tiles of the rows: element (p, s * per + t) is input s * K / splits + p * per + t, per = T / splits."""
        depth, splits = self.x.shape[1], self.sections
        tiles = depth // P
        # makes the PE transpose's input contiguous: half the time
        by_tile = nl.ndarray((self.rows, splits, tiles // splits, P), dtype=self.x.dtype)
        rows_RSPT = self.rows_RE.reshape((self.rows, splits, P, tiles // splits))
        for s in range(splits):
            source = rows_RSPT[:, s, :, :].permute((0, 2, 1))
            nisa.tensor_copy(dst=by_tile[:, s, :, :], src=source, engine=nisa.engine.gpsimd)
        self.by_tile_RPT = by_tile.reshape((self.rows, tiles, P)).permute((0, 2, 1))
        if not absent(self.gamma_PT):
            self.sum_squares(rows_RSPT)

    def sum_squares(self, rows_RSPT):
        """Each row's sum of squares over the inputs of a partition, in the order of K tiles: fp32 (R, 128)."""
        rows, splits, _, per = rows_RSPT.shape
        self.sums_RP = nl.ndarray((rows, P), dtype=nl.float32)
        # in parts, which leave the engines to other instructions in between
        for first in range(0, P, P // splits):
            inside = slice(first, first + P // splits)
            squares_RSPT = nl.ndarray((rows, splits, P // splits, per), dtype=nl.float32)
            nisa.activation(dst=squares_RSPT, op=nl.square, data=rows_RSPT[:, :, inside, :])
            squares_RPST = squares_RSPT.permute((0, 2, 1, 3))
            nisa.tensor_reduce(dst=self.sums_RP[:, inside], op=nl.add, data=squares_RPST, axis=(2, 3))

    def transpose(self):
        """Transpose; gamma * x, rounded once, bank by bank."""
        if absent(self.by_tile_RPT):
            self.prepare()
        tiles, dtype, engines = self.x.shape[1] // P, self.x.dtype, (nisa.engine.scalar, nisa.engine.vector)
        if absent(self.x_PTR):
            self.x_PTR = nl.ndarray((P, tiles, self.rows), dtype=dtype)
        if absent(self.gamma_PT):
            transpose_on_pe(self.x_PTR, self.by_tile_RPT, (0, tiles), engines)
        else:
            plain_PTR, each = nl.ndarray((P, tiles, self.rows), dtype=dtype), PSUM_BANK_BYTES // (P * itemsize(dtype))
            for first in range(0, tiles, each):
                last = min(first + each, tiles)
                transpose_on_pe(plain_PTR, self.by_tile_RPT, (first, last), (engines[first // each % 2],))
                target, plain = self.x_PTR[:, first:last, :], plain_PTR[:, first:last, :]
                gamma = self.gamma_PT[:, first:last].expand_dim(2).broadcast(2, self.rows)
                nisa.tensor_tensor(dst=target, data1=plain, data2=gamma, op=nl.multiply, engine=nisa.engine.gpsimd)

    def transpose_sums(self, squares_PR):
        """The sums of squares with rows on the free axis."""
        psum_PR = nl.ndarray((P, self.rows), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=psum_PR, data=self.sums_RP)
        nisa.tensor_copy(dst=squares_PR, src=psum_PR, engine=nisa.engine.scalar)

    def norm(self, eps):
        """RMSNorm of the rows; after the first product, which must not wait for the sums of squares."""
        squares_PR = nl.ndarray((P, self.rows), nl.float32)
        self.transpose_sums(squares_PR)
        return RMSNormRows(self.x_PTR, squares_PR, eps)


def groups_of(x, gamma_PT, inner, span, first_size=GROUP, largest=GROUP):
    """Row tiles span[0] to span[1] in groups of as many as fit, up to `largest`, and an empty last group.

    The first group has `first_size` tiles: matmuls begin before more rows are loaded and transposed. A core without
    tiles has only the empty group. `inner` is I, or 0: SBUF holds an intermediate row twice, as a row and transposed.
    """
    count, groups, size = x.shape[0], [], itemsize(x.dtype)
    row_bytes, row_bytes_with_inner = x.shape[1] * size, (x.shape[1] + 2 * inner) * size
    limit = max(1, min(largest, TRANSPOSED_BYTES // row_bytes, WITH_INNER_BYTES // row_bytes_with_inner))
    for i in range(span[0], span[1]):
        if i == span[0] or i == span[0] + first_size or len(groups[len(groups) - 1]) == limit:
            groups.append([])
        groups[len(groups) - 1].append(RowTile(x, i * P, min(i * P + P, count), gamma_PT))
    groups.append([])
    return groups
