"""Data dependence between events: who must wait for whom, from the memory that each touches.

Per storage, a sorted map of disjoint byte segments holds the last writer and the readers since.
Strided tiles with the same stride and disjoint columns do not conflict. A storage that takes
over the address of an earlier one waits for the earlier one's last uses.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from nkisim.dtypes import INFO
from nkisim.event import Event, Extent

# kinds of edge: the consumer reads the producer's result, overwrites its operand, or overwrites its result
RESULT, READ, WRITE = 0, 1, 2
KINDS_OF_EDGES = 3

Edges = dict[int, int]
Span = tuple[int, int]
# (whether it writes, the event's position, its lane)
Access = tuple[bool, int, int]
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

    def cut(self, start: int, stop: int) -> Segment:
        """A copy of this history, for a part of the bytes."""
        return Segment(start, stop, self.writer, dict(self.readers))


class Segments:
    """Disjoint byte segments in address order, touched in one shape."""

    __slots__ = ("cuts", "exact", "parts", "rivals", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.parts: list[Segment] = []
        # segments by their bounds, for the common access that repeats an earlier one
        self.exact: dict[Span, Segment] = {}
        # the same tensor's segments in shapes that may overlap
        self.rivals: list[Segments] = []
        # how often these or the rivals' segments were cut anew
        self.cuts = 0

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        low = bisect_right(self.starts, start) - 1
        if low < 0 or self.parts[low].stop <= start:
            low += 1
        return low, bisect_left(self.starts, stop, low)

    def touched(self, span: Span) -> list[Segment]:
        """The segments that hold bytes of the span."""
        same = self.exact.get(span)
        if same is not None:
            return [same]
        low, high = self._range(*span)
        return self.parts[low:high]

    def collect(self, span: Span, write: bool, edges: Edges) -> None:
        """Add the edges that an access to the span needs."""
        for part in self.touched(span):
            part.collect(write, edges)

    def access(self, span: Span, access: Access, edges: Edges) -> None:
        """Add the edges of an access, to these segments and to the rivals', and remember it here."""
        write, position, lane = access
        same = self.exact.get(span)
        if same is not None:
            same.collect(write, edges)
        else:
            self.collect(span, write, edges)
        for rival in self.rivals:
            rival.collect(span, write, edges)
        if same is not None:
            same.record(write, position, lane)
        else:
            self.cut(span, access)

    def cut(self, span: Span, access: Access) -> None:
        """Make an access the latest one of its span, which is no segment yet."""
        (start, stop), (write, event, lane) = span, access
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
        for segments in (self, *self.rivals):
            segments.cuts += 1


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

    __slots__ = ("known", "shapes")

    def __init__(self) -> None:
        self.shapes: dict[Shape, Segments] = {}
        # the same by the extent of earlier accesses
        self.known: dict[tuple[object, ...], Segments] = {}

    def segments(self, shape: Shape) -> Segments:
        """The segments of a shape, which know those that it can conflict with."""
        segment = self.shapes.get(shape)
        if segment is None:
            segment = Segments()
            for key, other in self.shapes.items():
                if may_overlap(key, shape):
                    segment.rivals.append(other)
                    other.rivals.append(segment)
                    other.cuts += 1
            self.shapes[shape] = segment
        return segment

    def outstanding(self, shape: Shape, span: Span, edges: Edges) -> None:
        """Edges to everything that touched the span in any shape that overlaps."""
        for key, segments in self.shapes.items():
            if may_overlap(key, shape):
                segments.collect(span, True, edges)


class Operand:
    """An operand that events name again and again: the segments that it touches, until they are cut anew."""

    __slots__ = ("cuts", "others", "segment", "segments", "span", "write")

    def __init__(self, segments: Segments, span: Span, write: bool) -> None:
        self.segments, self.span, self.write = segments, span, write
        self.segment: Segment | None = None
        self.others: list[Segment] = []
        self.cuts = -1

    def access(self, position: int, lane: int, edges: Edges) -> None:
        """Add the edges of an access and remember it; the next one finds its segments."""
        segments, span = self.segments, self.span
        segments.access(span, (self.write, position, lane), edges)
        self.segment = segments.exact.get(span)
        if self.segment is not None:
            self.others = [part for rival in segments.rivals for part in rival.touched(span)]
            self.cuts = segments.cuts


class Dependence:
    """Feed events in program order; get the edges of each."""

    def __init__(self) -> None:
        self._storages: dict[tuple[int, int], History] = {}
        self._owners: dict[tuple[str, int], Segments] = {}

    def edges(self, position: int, lane: int, event: Event, operands: list[Operand]) -> tuple[Edges, Edges]:
        """Return (edges of a product's first read operand, edges of everything else); of others, all edges twice.

        `operands` is the list that an earlier event with the same operands left, reads first; empty, it is filled.
        """
        rest: Edges = {}
        first: Edges = {} if event.engine == "tensor" else rest
        target = first
        for operand in operands:
            write, segment = operand.write, operand.segment
            target = rest if write else target
            if segment is None or operand.cuts != operand.segments.cuts:
                operand.access(position, lane, target)
            else:
                # Segment.collect and Segment.record, without a call in the most common case
                if write:
                    segment.collect(True, target)
                    segment.writer, segment.readers = position, {}
                else:
                    if segment.writer >= 0:
                        target[segment.writer] = RESULT
                    segment.readers[lane] = position
                for other in operand.others:
                    other.collect(write, target)
            target = rest
        if not operands:
            operands += self._touch_all(event, (position, lane), first, rest)
        if position in first:
            del first[position]
        if position in rest:
            del rest[position]
        for producer in event.after:
            rest[producer] = RESULT
        return first, rest

    def _touch_all(self, event: Event, at: tuple[int, int], first: Edges, rest: Edges) -> list[Operand]:
        """Add the edges of all accesses by an event (position, lane) and remember them; return where that is."""
        operands: list[Operand] = []
        for extent in event.reads:
            operands.append(self._touch(extent, event.core, (False, *at), rest if operands else first))
        for extent in event.writes:
            operands.append(self._touch(extent, event.core, (True, *at), rest))
        return operands

    def _touch(self, extent: Extent, core: int, access: Access, edges: Edges) -> Operand:
        """Add the edges of one access and remember it; return where that is."""
        key = (extent.tensor, core)
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = History()
        span = extent.span
        place = (extent.partitions, span, extent.elements, extent.row_bytes)
        segments = storage.known.get(place)
        if segments is None:
            shape = shape_of(extent)
            segments = storage.known[place] = storage.segments(shape)
            if extent.space != "hbm":
                self._take_address(extent, shape, core, edges)
        segments.access(span, access, edges)
        return Operand(segments, span, access[0])

    def _take_address(self, extent: Extent, shape: Shape, core: int, edges: Edges) -> None:
        """Wait for earlier storages whose address this one takes over."""
        owners = self._owners.setdefault((extent.space, core), Segments())
        previous: Edges = {}
        owners.access(extent.span, (True, extent.tensor, 0), previous)
        for owner in previous:
            if owner != extent.tensor:
                self._storages[owner, core].outstanding(shape, extent.span, edges)
