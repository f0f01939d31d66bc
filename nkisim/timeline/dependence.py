"""Data dependence between events: who must wait for whom, from the memory that each touches.

Per storage, a sorted map of disjoint byte segments holds the last writer and the readers since.
Strided tiles with the same stride and disjoint columns do not conflict. A storage that takes
over the address of an earlier one waits for the earlier one's last uses.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from nkisim.dtypes import INFO
from nkisim.event import Event, Extent

# kinds of edge: the consumer reads the producer's result, overwrites what it read, or overwrites its result
RESULT, READ, WRITE = 0, 1, 2

Edges = dict[int, int]
# (first partition, last partition + 1, stride, residue, row) ; stride 0 means dense
Shape = tuple[int, int, int, int, int]


def shape_of(extent: Extent) -> Shape:
    """Reduce an extent to its partitions and, where it is a uniform stride, its columns."""
    p0, p1 = extent.partitions
    start, stop = extent.span
    row = extent.row_bytes
    total = extent.elements * INFO[extent.dtype].itemsize // max(1, p1 - p0)
    gap = stop - start - row
    if row <= 0 or gap <= 0 or total >= stop - start:
        return p0, p1, 0, 0, 0
    runs = total // row
    if runs < 2 or gap % (runs - 1):
        return p0, p1, 0, 0, 0
    stride = gap // (runs - 1)
    if stride <= row:
        return p0, p1, 0, 0, 0
    return p0, p1, stride, start % stride, row


def may_overlap(a: Shape, b: Shape) -> bool:
    """Whether two shapes can touch the same byte, given that their spans overlap."""
    if a[0] >= b[1] or b[0] >= a[1]:
        return False
    stride = a[2]
    if not stride or stride != b[2]:
        return True
    ahead = (b[3] - a[3]) % stride
    return ahead < a[4] or stride - ahead < b[4]


class Segment:
    """Bytes [start, stop): their last writer, or -1, and the last reader of each lane since."""

    __slots__ = ("readers", "start", "stop", "writer")

    def __init__(self, start: int, stop: int, writer: int, readers: dict[int, int]) -> None:
        self.start, self.stop, self.writer, self.readers = start, stop, writer, readers

    def collect(self, write: bool, edges: Edges) -> None:
        """Add the edges of an access to exactly this segment."""
        writer = self.writer
        if not write:
            if writer >= 0:
                edges[writer] = RESULT
            return
        if writer >= 0 and edges.get(writer) != RESULT:
            edges[writer] = WRITE
        for reader in self.readers.values():
            edges.setdefault(reader, READ)

    def record(self, write: bool, event: int, lane: int) -> None:
        """Make an access the latest one of exactly this segment."""
        if write:
            self.writer, self.readers = event, {}
        else:
            self.readers[lane] = event

    def written(self, event: int, edges: Edges) -> None:
        """Add the edges of a write to exactly this segment, and make it the latest access."""
        writer = self.writer
        if writer >= 0 and edges.get(writer) != RESULT:
            edges[writer] = WRITE
        if self.readers:
            for reader in self.readers.values():
                edges.setdefault(reader, READ)
            self.readers = {}
        self.writer = event

    def cut(self, start: int, stop: int) -> Segment:
        """The same history for a part of the bytes."""
        return Segment(start, stop, self.writer, dict(self.readers))


class Segments:
    """Disjoint byte segments in address order."""

    __slots__ = ("exact", "parts", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.parts: list[Segment] = []
        # segments by their bounds, for the common access that repeats an earlier one
        self.exact: dict[tuple[int, int], Segment] = {}

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        low = bisect_right(self.starts, start) - 1
        if low < 0 or self.parts[low].stop <= start:
            low += 1
        return low, bisect_left(self.starts, stop, low)

    def collect(self, start: int, stop: int, write: bool, edges: Edges) -> None:
        """Add the edges that an access to [start, stop) needs."""
        same = self.exact.get((start, stop))
        if same is not None:
            same.collect(write, edges)
            return
        low, high = self._range(start, stop)
        for at in range(low, high):
            self.parts[at].collect(write, edges)

    def record(self, start: int, stop: int, write: bool, event: int, lane: int) -> None:
        """Make the access the latest one of [start, stop)."""
        same = self.exact.get((start, stop))
        if same is not None:
            same.record(write, event, lane)
            return
        low, high = self._range(start, stop)
        old = self.parts[low:high]
        new: list[Segment] = []
        if old and old[0].start < start:
            new.append(old[0].cut(old[0].start, start))
        if write:
            new.append(Segment(start, stop, event, {}))
        else:
            new.extend(_read_segments(old, start, stop, event, lane))
        if old and old[-1].stop > stop:
            new.append(old[-1].cut(stop, old[-1].stop))
        self.parts[low:high] = new
        self.starts[low:high] = [part.start for part in new]
        for part in old:
            del self.exact[part.start, part.stop]
        for part in new:
            self.exact[part.start, part.stop] = part


def _read_segments(old: list[Segment], start: int, stop: int, event: int, lane: int) -> list[Segment]:
    """Cut the old segments to [start, stop), fill the holes, and add one reader to each."""
    new: list[Segment] = []
    at = start
    for part in old:
        low, high = max(part.start, start), min(part.stop, stop)
        if at < low:
            new.append(Segment(at, low, -1, {lane: event}))
        read = part.cut(low, high)
        read.readers[lane] = event
        new.append(read)
        at = high
    if at < stop:
        new.append(Segment(at, stop, -1, {lane: event}))
    return new


class History:
    """The access history of one tensor: segments per shape of access."""

    __slots__ = ("conflicts", "known", "shapes")

    def __init__(self) -> None:
        self.shapes: dict[Shape, Segments] = {}
        self.conflicts: dict[Shape, list[Segments]] = {}
        # the histories of accesses seen before, by what the access looks like
        self.known: dict[tuple[object, ...], list[Segments]] = {}

    def segments(self, shape: Shape) -> list[Segments]:
        """The histories that an access of this shape can conflict with; its own comes first."""
        found = self.conflicts.get(shape)
        if found is None:
            own = self.shapes[shape] = Segments()
            others = [s for key, s in self.shapes.items() if key != shape and may_overlap(key, shape)]
            found = self.conflicts[shape] = [own, *others]
            for key, known in self.conflicts.items():
                if key != shape and may_overlap(key, shape):
                    known.append(own)
        return found

    def outstanding(self, shape: Shape, start: int, stop: int, edges: Edges) -> None:
        """Edges to everything that touched [start, stop) in any shape that overlaps."""
        for key, segments in self.shapes.items():
            if may_overlap(key, shape):
                segments.collect(start, stop, True, edges)


# per operand of an event, reads first: whether it is written, the histories that it touches, and its bytes
Operands = list[tuple[bool, list[Segments], tuple[int, int]]]


def _access(histories: list[Segments], span: tuple[int, int], access: tuple[bool, int, int], edges: Edges) -> None:
    """Add the edges of one access (write, position, lane) to its histories, its own first, and remember it there."""
    write, position, lane = access
    own = histories[0].exact.get(span)
    if own is None or len(histories) > 1:
        for segments in histories:
            segments.collect(span[0], span[1], write, edges)
        histories[0].record(span[0], span[1], write, position, lane)
        return
    own.collect(write, edges)
    own.record(write, position, lane)


class Dependence:
    """Feed events in program order; get the edges of each."""

    def __init__(self) -> None:
        self._storages: dict[tuple[int, int], History] = {}
        self._owners: dict[tuple[str, int], Segments] = {}

    def edges(self, position: int, lane: int, event: Event, operands: Operands) -> tuple[Edges, Edges]:
        """Return (edges of a product's first read operand, edges of everything else).

        `operands` is what an earlier event with the same operands left there; empty, it is filled.
        """
        rest: Edges = {}
        first: Edges = {}
        target = first if event.engine == "tensor" else rest
        if operands:
            for write, histories, span in operands:
                own = histories[0].exact.get(span)
                if own is None or len(histories) > 1:
                    _access(histories, span, (write, position, lane), rest if write else target)
                elif write:
                    own.written(position, rest)
                else:
                    # Segment.collect and Segment.record, which most accesses come to
                    if own.writer >= 0:
                        target[own.writer] = RESULT
                    own.readers[lane] = position
                target = rest
        else:
            for extent in event.reads:
                operands.append((False, self._touch(extent, event.core, (False, position, lane), target), extent.span))
                target = rest
            for extent in event.writes:
                operands.append((True, self._touch(extent, event.core, (True, position, lane), rest), extent.span))
        if position in first:
            del first[position]
        if position in rest:
            del rest[position]
        for other in event.after:
            rest[other] = RESULT
        return first, rest

    def _touch(self, extent: Extent, core: int, access: tuple[bool, int, int], edges: Edges) -> list[Segments]:
        """Add the edges of one access (write, position, lane) and remember it; return where that is."""
        key = (extent.tensor, core)
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = History()
        span = extent.span
        look = (extent.partitions, span, extent.elements, extent.row_bytes)
        histories = storage.known.get(look)
        if histories is None:
            shape = shape_of(extent)
            histories = storage.known[look] = storage.segments(shape)
            if extent.space != "hbm":
                self._take_address(extent, shape, core, edges)
        _access(histories, span, access, edges)
        return histories

    def _take_address(self, extent: Extent, shape: Shape, core: int, edges: Edges) -> None:
        """Wait for earlier storages whose address this one takes over."""
        start, stop = extent.span
        owners = self._owners.setdefault((extent.space, core), Segments())
        previous: Edges = {}
        owners.collect(start, stop, False, previous)
        for tensor in previous:
            if tensor != extent.tensor:
                self._storages[tensor, core].outstanding(shape, start, stop, edges)
        owners.record(start, stop, True, extent.tensor, 0)
