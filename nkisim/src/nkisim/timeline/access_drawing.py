"""The tensors of SBUF and PSUM as SVG: lifetimes, and reads and writes on a grid of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from nkisim.event import Event
from nkisim.timeline.drawing import COLOURS, LEFT, RIGHT, WIDTH, axis, clock, rect, shown_from
from nkisim.timeline.schedule import Schedule

ROW, BAR, TOP = 15, 12, 40
# cells of the grid, and rows of one memory
CELLS, MAX_ROWS = 200, 48
SPACES = {"sbuf": "SBUF", "psum": "PSUM"}
WRITES, READS = COLOURS["store"], COLOURS["tensor"]
Span = tuple[float, float]


@dataclass(slots=True)
class Accesses:
    """One tensor on chip: where it is, and when it is written and read."""

    name: str
    space: str
    core: int
    partitions: tuple[int, int]
    span: tuple[int, int]
    writes: list[Span] = field(default_factory=list)
    reads: list[Span] = field(default_factory=list)

    @property
    def life(self) -> Span:
        """From the first access to the end of the last one."""
        spans = self.writes + self.reads
        return min(start for start, _ in spans), max(end for _, end in spans)

    @property
    def size(self) -> int:
        """Bytes in a partition, as far as instructions touch them."""
        return self.span[1] - self.span[0]


def accesses(events: Sequence[Event], result: Schedule) -> list[Accesses]:
    """The tensors on chip in the order of their first access; a transfer accesses them while its data move."""
    tensors: dict[tuple[str, int, int], Accesses] = {}
    for at, event in enumerate(events):
        during = shown_from(result, at), result.end[at]
        for extents, is_write in ((event.writes, True), (event.reads, False)):
            for x in extents:
                if x.space not in SPACES:
                    continue
                key = x.space, x.core, x.tensor
                known = tensors.setdefault(key, Accesses(x.name, x.space, x.core, x.partitions, x.span))
                (a, b), (low, high) = known.partitions, known.span
                known.partitions = min(a, x.partitions[0]), max(b, x.partitions[1])
                known.span = min(low, x.span[0]), max(high, x.span[1])
                (known.writes if is_write else known.reads).append(during)
    return sorted(tensors.values(), key=lambda t: (t.core, t.life[0]))


def cells(spans: Iterable[Span], latency: float) -> list[int]:
    """How many accesses are in progress in each cell of the grid."""
    counts = [0] * CELLS
    for start, end in spans:
        first, last = (min(CELLS - 1, int(time / latency * CELLS)) for time in (start, end))
        for cell in range(first, last + 1):
            counts[cell] += 1
    return counts


def draw_accesses(events: Sequence[Event], result: Schedule, space: str) -> str:
    """The SVG of one memory, largest tensors first where there are too many; "" where it is not used."""
    tensors = [t for t in accesses(events, result) if t.space == space]
    if not tensors:
        return ""
    large = sorted(tensors, key=lambda t: -t.size * (t.life[1] - t.life[0]))[:MAX_ROWS]
    shown = [t for t in tensors if any(t is other for other in large)]
    latency = max(result.latency_ns, 1.0)
    scale = (WIDTH - LEFT - RIGHT) / latency
    height = TOP + ROW * len(shown) + 10
    rest = f", the {len(shown)} largest of {len(tensors)} tensors" if len(shown) < len(tensors) else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" '
        f'font-size="10" role="img" aria-label="accesses of {SPACES[space]}">',
        f'<text x="4" y="14" fill="#20262c" font-weight="600" font-size="12">{SPACES[space]}{rest}</text>',
        *axis(latency, scale, height),
    ]
    for row, tensor in enumerate(shown):
        parts += _row(tensor, result, TOP + ROW * row, scale)
    return "\n".join([*parts, "</svg>"])


def _row(tensor: Accesses, result: Schedule, y: float, scale: float) -> list[str]:
    """The lifetime, and in it the writes above the reads."""
    several = len({label.split()[1] for label in result.lanes}) > 1
    name = f"core {tensor.core} {tensor.name}" if several else tensor.name
    start, end = tensor.life
    about = (
        f"{name}: partitions {tensor.partitions[0]} to {tensor.partitions[1] - 1}, bytes {tensor.span[0]} to "
        f"{tensor.span[1] - 1}, {clock(start)} to {clock(end)}, {len(tensor.writes)} writes, {len(tensor.reads)} reads "
        f"(simulated)"
    )
    text = escape(name if len(name) < 26 else f"{name[:24]}…")
    parts = [f'<text x="{LEFT - 10}" y="{y + 9:.1f}" text-anchor="end" fill="#20262c">{text}</text>']
    parts.append(rect((LEFT + start * scale, y, (end - start) * scale, BAR), "#e8ebef", about))
    latency, width = max(result.latency_ns, 1.0), (WIDTH - LEFT - RIGHT) / CELLS
    for spans, colour, top in ((tensor.writes, WRITES, y), (tensor.reads, READS, y + BAR / 2)):
        kind = "writes" if spans is tensor.writes else "reads"
        for cell, count in enumerate(cells(spans, latency)):
            if count:
                place = LEFT + cell * width, top, width, BAR / 2
                parts.append(rect(place, colour, f"{name}: {count} {kind} (simulated)"))
    return parts
