"""A schedule as SVG: one row per engine and queue, a bar per instruction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from nkisim.event import Event
from nkisim.timeline.costs.dma import COLLECTIVES
from nkisim.timeline.schedule import Schedule

WIDTH, LEFT, RIGHT = 1280, 150, 20
ROW, GAP, TOP, BAR = 30, 8, 40, 22
ORDER = ("sync load", "dma load", "sync store", "dma store", "tensor", "vector", "scalar", "gpsimd")
COLOURS = {
    "tensor": "#3b6fb6",
    "vector": "#3f9b6e",
    "scalar": "#8a63b8",
    "gpsimd": "#b07b2c",
    "sync": "#7a8794",
    "load": "#5f9fb5",
    "store": "#b5768a",
    "collective": "#d8c24a",
    "wait": "#e0a050",
    "semaphore": "#d64545",
}
# bars narrower than this many pixels are merged with their neighbours of the same operation
MERGE = 1.5


@dataclass(slots=True)
class Bar:
    """One or several instructions as one rectangle."""

    start: float
    end: float
    op: str
    line: str
    colour: str
    count: int = 1
    work: float = 0.0


def lane_title(label: str) -> str:
    """`core 0 sync load` reads `DMA load (sync)`."""
    _, _, name = label.split(" ", 2)
    if name.startswith("sync "):
        return f"DMA {name.removeprefix('sync ')}"
    return {"tensor": "Tensor", "vector": "Vector", "scalar": "Scalar", "gpsimd": "GpSimd"}.get(name, name)


def _colour(label: str) -> str:
    return COLOURS.get(label.rsplit(maxsplit=1)[-1], "#7a8794")


def lane_order(result: Schedule) -> list[int]:
    """Cores first, then queues above engines."""

    def key(lane: int) -> tuple[int, int]:
        _, core, name = result.lanes[lane].split(" ", 2)
        return int(core), ORDER.index(name) if name in ORDER else len(ORDER)

    return sorted(range(len(result.lanes)), key=key)


def shown_from(result: Schedule, event: int) -> float:
    """Where a bar starts: a transfer is shown while its data moves, not while it waits."""
    return result.moving.get(event, result.start[event])


def bars(events: Sequence[Event], result: Schedule, lane: int, scale: float) -> list[Bar]:
    """The rectangles of one lane, tiny neighbours merged."""
    rows: list[Bar] = []
    members = [i for i, where in enumerate(result.lane_of) if where == lane]
    for i in sorted(members, key=lambda i: shown_from(result, i)):
        event = events[i]
        start, end = shown_from(result, i), result.end[i]
        last = rows[-1] if rows else None
        mergeable = last is not None and last.op == event.op and (end - start) * scale < MERGE
        if last is not None and mergeable and (start - last.end) * scale < 1:
            last.end = max(last.end, end)
            last.count += 1
            last.work += end - start
            continue
        line = f"{event.line[0].split('/')[-1]}:{event.line[1]}"
        rows.append(Bar(start, end, event.name or event.op, line, _event_colour(event, result, lane), 1, end - start))
    return rows


def _event_colour(event: Event, result: Schedule, lane: int) -> str:
    if event.op in COLLECTIVES:
        return COLOURS["collective"]
    if event.engine == "dma":
        stores = bool(event.writes) and event.writes[0].space == "hbm"
        return COLOURS["store" if stores else "load"]
    return _colour(result.lanes[lane])


def _rows_of(rows: list[Bar]) -> list[tuple[Bar, int]]:
    """Overlapping bars (pipelined or parallel) go to sub-rows, at most three."""
    ends = [0.0, 0.0, 0.0]
    placed = []
    for bar in rows:
        row = next((r for r in range(3) if ends[r] <= bar.start), min(range(3), key=ends.__getitem__))
        ends[row] = bar.end
        placed.append((bar, row))
    return placed


def nice_step(span: float, parts: int = 8) -> float:
    """A round number of nanoseconds between axis marks."""
    raw = max(span / parts, 1e-9)
    power = 10.0 ** (len(str(int(raw))) - 1) if raw >= 1 else 1.0
    return next(power * m for m in (1, 2, 5, 10) if power * m >= raw)


def clock(ns: float) -> str:
    """Nanoseconds below 1 us, microseconds above, milliseconds above 10 ms."""
    if ns < 1e3:
        return f"{ns:,.0f} ns"
    return f"{ns / 1e3:,.2f} us" if ns < 1e7 else f"{ns / 1e6:,.2f} ms"


def draw(events: Sequence[Event], result: Schedule, core: int | None = None) -> str:
    """The SVG of one schedule, of all cores or of one."""
    latency = max(result.latency_ns, 1.0)
    scale = (WIDTH - LEFT - RIGHT) / latency
    order = [i for i in lane_order(result) if core is None or result.lanes[i].startswith(f"core {core} ")]
    height = TOP + (len(order) + 1) * (ROW + GAP) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img" '
        f'aria-label="simulated timeline">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    parts.append(f'<text x="10" y="{TOP - 16}" fill="#5c6670">simulated, no launch</text>')
    parts += axis(latency, scale, height)
    y = TOP
    parts += _critical(events, result, scale, y)
    for lane in order:
        y += ROW + GAP
        parts += _lane(events, result, lane, scale, y)
    parts.append("</svg>")
    return "\n".join(parts)


def axis(latency: float, scale: float, height: int) -> list[str]:
    """Marks of time, with lines down to `height`."""
    parts = []
    step, at = nice_step(latency), 0.0
    while at <= latency * 1.0001:
        x = LEFT + at * scale
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 10}" x2="{x:.1f}" y2="{height - 8}" stroke="#e3e6ea"/>')
        parts.append(f'<text x="{x:.1f}" y="{TOP - 16}" fill="#5c6670" text-anchor="middle">{clock(at)}</text>')
        at += step
    return parts


def label(text: str, y: float, bold: bool = False) -> str:
    """The name of a row."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{LEFT - 10}" y="{y + BAR * 0.7:.1f}" text-anchor="end" fill="#20262c"{weight}>{escape(text)}</text>'
    )


def rect(place: tuple[float, float, float, float], colour: str, title: str) -> str:
    """A bar at (x, y, width, height) with a title."""
    x, y, width, height = place
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.6):.2f}" height="{height:.1f}" '
        f'fill="{colour}" '
        f'stroke="#ffffff" stroke-width="0.3"><title>{escape(title)}</title></rect>'
    )


def _critical(events: Sequence[Event], result: Schedule, scale: float, y: float) -> list[str]:
    """The critical path as one row: each step in the colour of its engine, handoffs in red."""
    parts, at = [label("critical path", y, bold=True)], 0.0
    for step in result.critical:
        lane = result.lane_of[step.event]
        event = events[step.event]
        waits = [p for p in step.parts if p[0] == "semaphore"]
        local = [p for p in step.parts if p[0] != "semaphore"]
        for cause, time in waits + local:
            colour = COLOURS["semaphore"] if cause == "semaphore" else _event_colour(event, result, lane)
            if cause.startswith("waiting for"):
                colour = COLOURS["wait"]
            title = f"{event.op}: {cause}, {clock(time)} (simulated)"
            parts.append(rect((LEFT + at * scale, y, time * scale, BAR), colour, title))
            at += time
    return parts


def _lane(events: Sequence[Event], result: Schedule, lane: int, scale: float, y: float) -> list[str]:
    core, title = result.lanes[lane].split()[1], lane_title(result.lanes[lane])
    several = len({label.split()[1] for label in result.lanes}) > 1
    parts = [label(f"core {core} {title}" if several else title, y)]
    parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{BAR}" fill="#f6f7f9"/>')
    on_path = {step.event for step in result.critical}
    placed = _rows_of(bars(events, result, lane, scale))
    tall = BAR / (1 + max((row for _, row in placed), default=0))
    for bar, row in placed:
        many = f"{bar.count} x {bar.op}" if bar.count > 1 else bar.op
        title = f"{many} at {bar.line}, {clock(bar.start)} to {clock(bar.end)} (simulated)"
        x, width = LEFT + bar.start * scale, (bar.end - bar.start) * scale
        parts.append(rect((x, y + row * tall, width, tall), bar.colour, title))
    for i in sorted(on_path):
        if result.lane_of[i] == lane:
            start = shown_from(result, i)
            x, width = LEFT + start * scale, (result.end[i] - start) * scale
            parts.append(rect((x, y + BAR + 1, width, 3), COLOURS["semaphore"], "critical path"))
    return parts
