"""Products with packed weights that are streamed through SBUF: y = x W for up to 128 rows.

A packed weight is (blocks, K, C): block b has columns b * C to b * C + C - 1 of W (K, blocks * C). With T = K // 128,
partition p has rows p * T to p * T + T - 1 of a block, which are adjacent in HBM, so that a transfer moves long rows; K
tiles of 128 accumulate in ascending order and then the last K % 128 rows. If K has sections, each has this layout,
one after the other. A product's bits depend on its row and this order, not on the number of rows or the row's index.
"""

import nki.isa as nisa
import nki.language as nl

from nki_kernels.layer.channel_scale import ChannelScale
from nki_kernels.tiles import P, absent, dma_static, itemsize, transpose_on_pe

# bytes per partition of one transfer, and of all transfers that are in flight or loaded and unused
TILE_BYTES = 8192
AHEAD_BYTES = 98304


class PackedWeight(nl.NKIObject):
    """A packed weight (blocks, K, C) in HBM, its name, and the blocks[0] to blocks[1] that this core multiplies.

    `scale` (blocks, 1, C) is that of an FP8 weight; load_scale loads it with channels on the partitions.
    """

    def __init__(self, name, tensor, blocks, sections=1, scale=None):
        self.name = name
        self.tensor = tensor
        self.blocks = blocks
        self.sections = sections
        self.scale = scale
        self.channels = None
        self.depth = tensor.shape[1]
        self.columns = tensor.shape[2]
        self.k_tiles = -(-tensor.shape[1] // P)

    def is_fp8(self):
        return not absent(self.scale)

    def fills_tiles(self):
        """Whether each block of FP8 gate and up has 128 channels: a K tile of down (pack_down)."""
        return self.is_fp8() and self.columns == 2 * P

    def load_scale(self, groups):
        """Load the scales of this core's blocks, if there are any, for groups of columns."""
        if self.is_fp8() and absent(self.channels) and self.blocks[0] < self.blocks[1]:
            self.channels = ChannelScale(self.scale, self.blocks, groups)

    def tiles(self, tail=False, max_bytes=TILE_BYTES):
        """This core's tiles in the order of use, of up to `max_bytes` per partition.

        With `tail` the last block has short tiles, so that little work is left when the last one arrives.
        """
        full, queue = self.depth // P, []
        per_section = full // self.sections
        step = max(1, max_bytes // (self.columns * itemsize(self.tensor.dtype)))
        for block in range(self.blocks[0], self.blocks[1]):
            if block == self.blocks[1] - 1 and tail:
                step = max(1, step // 4)
            for section in range(self.sections):
                for first in range(0, per_section, step):
                    start = section * per_section
                    queue.append(WeightTile(self, block, start + first, start + min(first + step, per_section)))
            if self.depth % P:
                queue.append(WeightTile(self, block, full, full + 1))
        return queue


class WeightTile(nl.NKIObject):
    """K tiles `first` to `last` of one block; K tile K // 128 is the remainder, on partitions from `start` on.

    `stride` and `offset` are elements of the weight: from partition to partition, and to the tile's first one.
    """

    def __init__(self, weight, block, first, last):
        full, remainder, columns = weight.depth // P, weight.depth % P, weight.columns
        per_section = full // weight.sections
        self.weight = weight
        # WeightStream.next_tile: (128, tiles, C), filled on the partitions of the tile
        self.data_PTC = None
        self.first = first
        self.last = last
        self.start = 0
        self.rows = P
        self.stride = per_section * columns
        self.offset = block * weight.depth * columns
        if first == full:
            self.rows = remainder
            # remainder tiles of consecutive blocks go to different partitions, so that different DMA queues load them
            self.start = block % remainder_slots(remainder) * remainder
            self.stride = columns
            self.offset = self.offset + full * P * columns
        else:
            self.offset = self.offset + (first // per_section * per_section * P + first % per_section) * columns

    def partitions(self):
        return slice(self.start, self.start + self.rows)

    def bytes_per_partition(self):
        return (self.last - self.first) * self.weight.columns * itemsize(self.weight.tensor.dtype)

    def load(self):
        """One transfer of long rows."""
        count, columns, tensor = self.last - self.first, self.weight.columns, self.weight.tensor
        data_PTC = nl.ndarray((P, count, columns), dtype=tensor.dtype)
        source = tensor.ap([[self.stride, self.rows], [1, count * columns]], offset=self.offset)
        dma_static(data_PTC[self.start : self.start + self.rows], source)
        return data_PTC


def remainder_slots(remainder):
    """How often `remainder` rows fit the partitions, each time at one where an operand may start."""
    if remainder in (32, 64):
        return P // remainder
    return 1


class WeightStream(nl.NKIObject):
    """Tiles in the order of use: each is prefetched `ahead` bytes per partition before its use."""

    def __init__(self, queue, ahead=AHEAD_BYTES):
        self.queue = queue
        self.limit = ahead
        self.loaded = []
        self.used = 0
        self.ahead_bytes = 0

    def prefetch(self):
        """Issue the next loads, up to the limit."""
        while len(self.loaded) < len(self.queue) and self.ahead_bytes < self.limit:
            tile = self.queue[len(self.loaded)]
            self.loaded.append(tile.load())
            self.ahead_bytes = self.ahead_bytes + tile.bytes_per_partition()

    def next_tile(self, weight):
        """The next tile; AssertionError if it is not one of `weight`."""
        self.prefetch()
        assert self.used < len(self.queue), f"the stream ends before {weight.name}"
        tile = self.queue[self.used]
        assert tile.weight.name == weight.name, f"the next tile is of {tile.weight.name}, not of {weight.name}"
        tile.data_PTC = self.loaded[self.used]
        self.used = self.used + 1
        self.ahead_bytes = self.ahead_bytes - tile.bytes_per_partition()
        return tile


class RowStationary(nl.NKIObject):
    """Rows (128, tiles, R) stationary, weights moving: PSUM (R, C), in the PE columns from `column` on, if given."""

    def __init__(self, x_PTR, psum_RC, column=-1):
        self.x_PTR = x_PTR
        self.psum = psum_RC
        self.position = ()
        self.size = ()
        if column >= 0:
            self.position = (0, column)
            self.size = (P, x_PTR.shape[2])

    def add(self, tiles):
        """Accumulate the K tiles of some weight tiles."""
        for tile in tiles:
            inside = tile.partitions()
            for t in range(tile.first, tile.last):
                nisa.nc_matmul(
                    dst=self.psum,
                    stationary=self.x_PTR[inside, t, :],
                    moving=tile.data_PTC[inside, t - tile.first, :],
                    accumulate=t > 0,
                    tile_position=self.position,
                    tile_size=self.size,
                )


class WeightStationary(nl.NKIObject):
    """Weights stationary, rows (128, tiles, R) moving: PSUM (W, n, R) of n of the J groups of W <= 128 columns each.

    Group j has columns j W to j W + W - 1, or with `interleaved` columns w J + j, so that a partition has J adjacent
    columns. Weight loads overlap the matmuls; a matmul lasts R cycles, so for R <= 64 this costs about half of moving
    512 columns. Groups whose sums are open together have a tensor each (n = 1), since several in one tensor are
    reported to lose partial sums; with `sequential` a block is multiplied group by group, and n = J.
    """

    def __init__(self, x_PTR, width, groups, interleaved, sequential=False, first=0):
        self.x_PTR = x_PTR
        self.width = width
        self.groups = groups
        self.first = first
        self.interleaved = interleaved
        self.psum = []
        self.each = 1
        if sequential:
            self.each = groups
        for _ in range(groups // self.each):
            shape = (width, self.each, x_PTR.shape[2])
            self.psum.append(nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum))

    def add(self, tiles):
        """Accumulate the K tiles of some weight tiles, group by group."""
        width, groups = self.width, self.groups
        for j in range(groups):
            psum_WR = self.psum[j // self.each][:, j % self.each, :]
            for tile in tiles:
                inside = tile.partitions()
                for t in range(tile.first, tile.last):
                    weights_KC = tile.data_PTC[inside, t - tile.first, :]
                    if self.interleaved:
                        group_KW = weights_KC.reshape((tile.rows, width, groups))[:, :, j]
                    else:
                        group_KW = weights_KC[:, (self.first + j) * width : (self.first + j + 1) * width]
                    moving_KR = self.x_PTR[inside, t, :]
                    nisa.nc_matmul(dst=psum_WR, stationary=group_KW, moving=moving_KR, accumulate=t > 0)


def accumulate(stream, weight, products):
    """Multiply the next block of a weight for each of the products; K tiles accumulate in ascending order."""
    done = 0
    while done < weight.k_tiles:
        tile = stream.next_tile(weight)
        for product in products:
            product.add([tile])
        done = tile.last


def next_block(stream, weight):
    """All tiles of the next block, in the order of its K tiles."""
    block = [stream.next_tile(weight)]
    while block[len(block) - 1].last < weight.k_tiles:
        block.append(stream.next_tile(weight))
    return block


def row_products(weight, x):
    """RowStationary for each of several tiles of rows (128, tiles, R)."""
    products = []
    for x_PTR in x:
        psum_RC = nl.ndarray((x_PTR.shape[2], weight.columns), dtype=nl.float32, buffer=nl.psum)
        products.append(RowStationary(x_PTR, psum_RC))
    return products


def transpose_rows(rows_RK):
    """Rows (R, K) in SBUF as K tiles (128, tiles, R); the remainder is repeated in each of its slots."""
    rows, depth = rows_RK.shape
    tiles, remainder, dtype = depth // P, depth % P, rows_RK.dtype
    x_PTR = nl.ndarray((P, tiles + min(remainder, 1), rows), dtype=dtype)
    if remainder:
        copies = remainder_slots(remainder)
        repeated = nl.ndarray((rows, copies, remainder), dtype=dtype)
        nisa.tensor_copy(dst=repeated, src=rows_RK[:, tiles * P : depth].expand_dim(1).broadcast(1, copies))
    if tiles:
        by_tile_RPT = rows_RK[:, 0 : tiles * P].reshape((rows, P, tiles))
        transpose_on_pe(x_PTR, by_tile_RPT, (0, tiles), (nisa.engine.unknown,))
    if remainder:
        psum_KR = nl.ndarray((copies * remainder, rows), dtype=dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=psum_KR, data=repeated)
        engine = alternate_engine(min(tiles, 1))
        nisa.tensor_copy(dst=x_PTR[0 : copies * remainder, tiles, :], src=psum_KR, engine=engine)
    return x_PTR


def transpose_in_order(rows_RK):
    """Rows (R, K) in SBUF as K tiles (128, tiles, R), tile t with inputs 128 t to 128 t + 127."""
    rows, depth = rows_RK.shape
    x_PTR = nl.ndarray((P, depth // P, rows), dtype=rows_RK.dtype)
    by_tile_RPT = rows_RK.reshape((rows, depth // P, P)).permute((0, 2, 1))
    transpose_on_pe(x_PTR, by_tile_RPT, (0, depth // P), (nisa.engine.unknown,))
    return x_PTR


def alternate_engine(i):
    """The Vector Engine for even i, the Scalar Engine for odd i."""
    if i % 2:
        return nisa.engine.scalar
    return nisa.engine.vector
