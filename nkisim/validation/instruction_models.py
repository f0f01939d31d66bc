"""Models published measurements of Trainium2 as short event lists for the timeline.

Each row is a short instruction sequence that a profiler screenshot in the manual shows. All
rows use the one chip description; nothing is tuned per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nkisim.dtypes import INFO
from nkisim.event import Event, Extent
from nkisim.timeline.schedule import Schedule, schedule


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measured quantity, its value and range, and the sequence that models it."""

    name: str
    unit: str
    measured: float
    low: float
    high: float
    source: str
    model: Callable[[], float]

    @property
    def ratio(self) -> float:
        """Modelled over measured."""
        return self.model() / self.measured


class EventBuilder:
    """Writes small event lists; every tile is a storage of its own unless it is reused."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._storages = 0

    def tile(self, space: str, count: int, dtype: str = "float32", stop: int = 128, start: int = 0) -> Extent:
        """A fresh contiguous tile of `count` elements per partition (full rows in HBM)."""
        self._storages += 1
        row = count * INFO[dtype].itemsize
        rows = stop - start
        hbm = space == "hbm"
        base = 0 if hbm else self._storages * (1 << 24)
        span = (base, base + (row * rows if hbm else row))
        where = (0, 1) if hbm else (start, stop)
        return Extent(space, self._storages, "t", 0, where, span, count * rows, dtype, row)

    def add(
        self,
        engine: str,
        op: str,
        reads: tuple[Extent, ...],
        writes: tuple[Extent, ...],
        /,
        **work: object,
    ) -> Event:
        """Append one event."""
        core = int(str(work.pop("core", 0)))
        position = len(self.events)
        index = sum(event.core == core for event in self.events)
        line = ("calibration", position)
        event = Event(index, core, engine, op, reads, writes, work, line, None)
        self.events.append(event)
        return event

    def matmul(self, fp32: bool, columns: int = 512, core: int = 0) -> Event:
        """[128 x 128] times [128 x columns], operands long there."""
        dtype = "float32" if fp32 else "bfloat16"
        reads = self.tile("sbuf", 128, dtype), self.tile("sbuf", columns, dtype)
        out = (self.tile("psum", columns),)
        sizes = {"rows": 128, "cols_stationary": 128, "cols_moving": columns}
        return self.add("tensor", "nc_matmul", reads, out, fp32=fp32, core=core, **sizes)

    def transfer(self, src: Extent, dst: Extent, dge: str = "none", core: int = 0) -> Event:
        """One dma_copy with a descriptor per row."""
        tile = dst if dst.space != "hbm" else src
        rows = tile.partitions[1] - tile.partitions[0]
        size = tile.elements * INFO[tile.dtype].itemsize
        issuer = "gpsimd" if dge == "swdge" else "sync"
        work = {
            "bytes": size,
            "rows": rows,
            "row_bytes": size // rows,
            "dge": dge,
            "issuer": issuer,
        }
        return self.add("dma", "dma_copy", (src,), (dst,), core=core, **work)

    def run(self) -> Schedule:
        """The nominal schedule."""
        return schedule(self.events, band=False)


def _matmul_steady() -> Schedule:
    tape = EventBuilder()
    for _ in range(12):
        tape.matmul(fp32=True)
    return tape.run()


def matmul_pitch(passes: int) -> float:
    """Steady pitch of fp32 multiplies, per pass."""
    s = _matmul_steady()
    return (s.free[-1] - s.free[-2]) / passes


def matmul_duration() -> float:
    """First column in to last result out of one fp32 pass in the steady state."""
    s = _matmul_steady()
    return s.end[-1] - s.free[-1] + (s.free[-1] - s.free[-2]) / 2


def matmul_isolated() -> float:
    """Weight load start to last result of an fp32 call after a pause, engine warm."""
    tape = EventBuilder()
    for _ in range(4):
        tape.matmul(True)
    late = tape.tile("sbuf", 128), tape.tile("sbuf", 512)
    # the pause: both operands arrive from a vector instruction that takes 1 us
    tape.add("vector", "tensor_tensor", (tape.events[-1].writes[0],), late, elements=800)
    sizes = {"rows": 128, "cols_stationary": 128, "cols_moving": 512}
    tape.add("tensor", "nc_matmul", late, (tape.tile("psum", 512),), fp32=True, **sizes)
    s = tape.run()
    return s.end[-1] - s.start[-1]


def matmul_cold(duration: bool) -> float:
    """bf16 multiplies of 512 columns in an idle engine: pitch, or duration of one."""
    tape = EventBuilder()
    for _ in range(3):
        tape.matmul(False)
    s = tape.run()
    pitch = s.free[-1] - s.free[-2]
    return s.end[-1] - s.free[-1] + pitch if duration else pitch


def instruction(op: str, count: int, spaces: str, dtypes: str = "", pitch: bool = False) -> float:
    """Latency or pitch of one engine instruction; `spaces` is 'in [in] out', one word each."""
    tape = EventBuilder()
    names = spaces.split()
    types = dtypes.split() or ["float32"] * len(names)
    engine = "scalar" if op.startswith("activation") else "vector"
    pointers = sum(name == "pointer" for name in names)
    for _ in range(2):
        tiles = [
            tape.tile("sbuf" if name == "pointer" else name, 1 if name == "pointer" else count, t)
            for name, t in zip(names, types, strict=True)
        ]
        work: dict[str, object] = {"elements": count, "scalar_operands": pointers}
        tape.add(engine, op, tuple(tiles[:-1]), (tiles[-1],), **work)
    s = tape.run()
    return s.start[1] - s.start[0] if pitch else s.end[0] - s.start[0]


def small_chain() -> float:
    """Mean step of a dependent (P, 1) chain of tensor_scalar with an operand and reciprocal."""
    tape = EventBuilder()
    tile, scale = tape.tile("sbuf", 1), tape.tile("sbuf", 1)
    for _ in range(4):
        out = tape.tile("sbuf", 1)
        tape.add("vector", "tensor_scalar", (tile, scale), (out,), elements=1, scalar_operands=1)
        tile = tape.tile("sbuf", 1)
        tape.add("vector", "reciprocal", (out,), (tile,), elements=1)
    return tape.run().latency_ns / 8


def kernel_v5_vector_ms() -> float:
    """Sum of instruction durations of the matmul tutorial's last version."""
    add = instruction("tensor_tensor", 512, "sbuf psum sbuf")
    copy = instruction("tensor_copy", 512, "sbuf sbuf")
    return (4096 * add + 512 * copy) * 1e-6


def table_load() -> float:
    """The time that the first use of a function set adds."""
    tape = EventBuilder()
    tile = tape.tile("sbuf", 128)
    tape.add("scalar", "activation", (tile,), (tape.tile("sbuf", 128),), function="exp", elements=128)
    tape.add("scalar", "activation", (tile,), (tape.tile("sbuf", 128),), function="exp", elements=128)
    s = tape.run()
    return (s.free[0] - s.start[0]) - (s.free[1] - s.start[1])


def load_to_consumer(partitions: int, count: int, part: str) -> float:
    """A load through the software queue, then an activation; total or data phase only."""
    tape = EventBuilder()
    tile = tape.tile("sbuf", count, "bfloat16", stop=partitions)
    tape.transfer(tape.tile("hbm", count, "bfloat16", stop=partitions), tile, "swdge")
    out = tape.tile("sbuf", count, "bfloat16", stop=partitions)
    tape.add("scalar", "activation", (tile,), (out,), elements=count)
    s = tape.run()
    # the profile's trigger bar ends where descriptor generation starts to act
    trigger = s.free[0] - s.start[0]
    data = sum(time for cause, time in s.critical[0].parts if cause == "dma data")
    return data if part == "data" else s.start[1] - trigger


def store() -> float:
    """Trigger to end of a store of [128, 128] bf16."""
    tape = EventBuilder()
    tape.transfer(tape.tile("sbuf", 128, "bfloat16"), tape.tile("hbm", 128, "bfloat16"), "swdge")
    s = tape.run()
    return s.end[0] - s.free[0]


def queue_rate(row_bytes: int, dge: str, partitions: int = 128, cores: int = 1) -> float:
    """Steady bytes per nanosecond and core of loads into one tile, with one row per partition."""
    tape = EventBuilder()
    count = 12
    tiles = [tape.tile("sbuf", count * row_bytes, "uint8", stop=partitions) for _ in range(cores)]
    for i in range(count):
        for core, tile in enumerate(tiles):
            src = tape.tile("hbm", row_bytes, "uint8", stop=partitions)
            low = tile.span[0] + i * row_bytes
            elements = row_bytes * partitions
            part = replace(tile, span=(low, low + row_bytes), elements=elements, row_bytes=row_bytes)
            tape.transfer(src, part, dge, core)
    s = tape.run()
    first, last = s.end[0], s.end[-1]
    return row_bytes * partitions * (count - 1) / (last - first)


def relative_rate(row_bytes: int) -> float:
    """Throughput of one software queue relative to rows of 32 KiB."""
    return queue_rate(row_bytes, "swdge") / queue_rate(32768, "swdge")


def mixed_rate() -> float:
    """Bytes per nanosecond and engine when a fifth of the bytes come in 512 B rows."""
    small, large = queue_rate(512, "none") / 16, queue_rate(2048, "none") / 16
    return 1 / (0.2 / small + 0.8 / large)
