"""Streaming packed weights through SBUF past a few rows that stay: y = x W for up to 128 rows.

A packed weight is (blocks, K, C): block b holds columns b * C to b * C + C - 1 of W (K, blocks * C). With
T = K // 128, partition p holds rows p * T to p * T + T - 1 of a block, which lie together in HBM, so that a
transfer moves long rows; the contraction takes T tiles of 128 in ascending order and then the last K % 128 rows.
A K that is cut into sections is laid out so in each section, one section after the other.
The rows are the stationary operand and the weights move, at most 512 columns per product: a product's bits
depend on its own row and on this order alone, not on the number of rows or the row's index.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import PSUM_BANK_BYTES, P, itemsize, move

# bytes per partition of one transfer, and of all transfers that are under way or wait for use
PIECE_BYTES = 8192
AHEAD_BYTES = 98304


class Piece(nl.NKIObject):
    """Contraction tiles `first` to `last` of one block; tile K // 128 is the rest, on partitions from `start` on.

    `stride` and `offset` are numbers of the weight: from partition to partition, and where the piece begins.
    """

    def __init__(self, weight, block, first, last, cut):
        depth, columns = weight.shape[1], weight.shape[2]
        tiles, rest = depth // P, depth % P
        per = tiles // cut
        self.weight = weight
        # Stream.take: the piece's numbers, (128, tiles, C)
        self.tile_PTC = None
        self.first = first
        self.last = last
        self.start = 0
        self.rows = P
        self.stride = per * columns
        self.offset = block * depth * columns
        if first == tiles:
            self.rows = rest
            # neighbouring blocks have their rests on different partitions, which different DMA engines serve
            self.start = block % copies_of_rest(rest) * rest
            self.stride = columns
            self.offset = self.offset + tiles * P * columns
        else:
            self.offset = self.offset + (first // per * per * P + first % per) * columns


def copies_of_rest(rest):
    """How many times a rest of `rest` rows fits the partitions at places where an operand may start."""
    if rest in (32, 64):
        return P // rest
    return 1


def pieces(weight, blocks, cut=1, tail=False, most=PIECE_BYTES):
    """The pieces of blocks[0] to blocks[1] in the order of use, K cut into `cut` sections, of `most` bytes a partition.

    With `tail` the last block comes in short pieces, so that little is left to do when the last one arrives.
    """
    depth, columns = weight.shape[1], weight.shape[2]
    tiles, per, queue = depth // P, depth // P // cut, []
    step = max(1, most // (columns * itemsize(weight.dtype)))
    for block in range(blocks[0], blocks[1]):
        if block == blocks[1] - 1 and tail:
            step = max(1, step // 4)
        for section in range(cut):
            for first in range(0, per, step):
                last = min(first + step, per)
                queue.append(Piece(weight, block, section * per + first, section * per + last, cut))
        if depth % P:
            queue.append(Piece(weight, block, tiles, tiles + 1, cut))
    return queue


class Stream(nl.NKIObject):
    """Pieces in the order of use: each is requested `AHEAD_BYTES` before its use."""

    def __init__(self, queue):
        self.queue = queue
        self.loaded = []
        self.used = 0
        self.held_bytes = 0

    def fill(self):
        """Ask for the next pieces as far as there is room."""
        while len(self.loaded) < len(self.queue) and self.held_bytes < AHEAD_BYTES:
            piece = self.queue[len(self.loaded)]
            self.loaded.append(load(piece))
            self.held_bytes = self.held_bytes + held(piece)

    def take(self):
        """The next piece, with its numbers in piece.tile_PTC."""
        self.fill()
        piece = self.queue[self.used]
        piece.tile_PTC = self.loaded[self.used]
        self.used = self.used + 1
        self.held_bytes = self.held_bytes - held(piece)
        return piece


def held(piece):
    """Bytes per partition of a piece."""
    return (piece.last - piece.first) * piece.weight.shape[2] * itemsize(piece.weight.dtype)


def load(piece):
    """One transfer: (128, tiles, C), long rows on every partition; of the rest only its rows are filled."""
    count, columns = piece.last - piece.first, piece.weight.shape[2]
    tile_PTC = nl.ndarray((P, count, columns), dtype=piece.weight.dtype)
    source = piece.weight.ap([[piece.stride, piece.rows], [1, count * columns]], offset=piece.offset)
    move(tile_PTC[piece.start : piece.start + piece.rows], source)
    return tile_PTC


def product(stream, turned_PTR):
    """The next block's product with the turned rows (128, tiles, R): PSUM (R, C)."""
    return products(stream, [turned_PTR])[0]


def products(stream, turned):
    """The next block's products with each of several tiles of turned rows (128, tiles, R): PSUM (R, C) each."""
    weight, parts, tile = stream.queue[stream.used].weight, [], 0
    for turned_PTR in turned:
        parts.append(nl.ndarray((turned_PTR.shape[2], weight.shape[2]), dtype=nl.float32, buffer=nl.psum))
    while tile < (weight.shape[1] + P - 1) // P:
        piece = stream.take()
        for i in range(len(turned)):
            add_piece(parts[i], piece, turned[i])
        tile = piece.last
    return parts


def add_piece(part_psum_RC, piece, turned_PTR):
    """Add one piece's products with the turned rows (128, tiles, R) to a block's sum (R, C)."""
    inside = slice(piece.start, piece.start + piece.rows)
    for t in range(piece.first, piece.last):
        nisa.nc_matmul(
            dst=part_psum_RC,
            stationary=turned_PTR[inside, t, :],
            moving=piece.tile_PTC[inside, t - piece.first, :],
            accumulate=t > 0,
        )


def turn_rows(rows_RK):
    """Rows (R, K) in SBUF as the stationary operand of `product`: (128, tiles, R), the rest repeated if it fits."""
    rows, depth = rows_RK.shape
    tiles, rest, dtype = depth // P, depth % P, rows_RK.dtype
    turned_PTR = nl.ndarray((P, tiles + min(rest, 1), rows), dtype=dtype)
    if rest:
        copies = copies_of_rest(rest)
        repeated = nl.ndarray((rows, copies, rest), dtype=dtype)
        nisa.tensor_copy(dst=repeated, src=rows_RK[:, tiles * P : depth].expand_dim(1).broadcast(1, copies))
    each = max(1, PSUM_BANK_BYTES // (rows * itemsize(dtype)))
    for first in range(0, tiles, each):
        last = min(first + each, tiles)
        by_tile = rows_RK[:, 0 : tiles * P].reshape((rows, P, tiles))
        psum_PTR = nl.ndarray((P, last - first, rows), dtype=dtype, buffer=nl.psum)
        for t in range(first, last):
            nisa.nc_transpose(dst=psum_PTR[:, t - first, :], data=by_tile[:, :, t])
        nisa.tensor_copy(dst=turned_PTR[:, first:last, :], src=psum_PTR)
    if rest:
        rest_psum_KR = nl.ndarray((copies * rest, rows), dtype=dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=rest_psum_KR, data=repeated)
        nisa.tensor_copy(dst=turned_PTR[0 : copies * rest, tiles, :], src=rest_psum_KR, engine=turns(min(tiles, 1)))
    return turned_PTR


def turns(number):
    """The Vector and the Scalar Engine in turn."""
    if number % 2:
        return nisa.engine.scalar
    return nisa.engine.vector
