"""EngineCost laws of the tensor, vector and scalar engines: how long an instruction takes.

A law reads an event's operands and work, and the plain numbers of one case of the chip. It
returns a EngineCost: after `pitch` the engine can start its next instruction, after `latency` the
result is there, `stream` is the part of the pitch that grows with the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nkisim.dtypes import INFO
from nkisim.event import Event, Extent
from nkisim.timeline.chip import ResolvedSpec


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Nanoseconds on the engine; `table` names the function set that must be resident."""

    pitch: float
    latency: float
    stream: float
    table: str = ""


@dataclass(frozen=True, slots=True)
class MatmulCost:
    """A tensor engine call: `passes` pairs of weight load and multiply.

    `stream` is one pass at full clock; `load` is the weight load of one pass.
    """

    passes: int
    stream: float
    load: float
    flops: float
    peak_tflops: float
    # rows of the array that take part, which the power throttle counts
    rows_share: float = 1.0
    # the first column of the part of the array that a column-tiled product keeps busy, -1 for the full array
    group: int = -1


Law = Callable[[Event, ResolvedSpec], "EngineCost | MatmulCost"]

# functions that every function set of the scalar engine is taken to hold
PLAIN_FUNCTIONS = frozenset({"copy", "identity", "abs", "square", "relu", "sign", "add", "multiply", ""})
# rows of the tensor engine
ARRAY_ROWS = 128
# operations that have performance modes of one operand (architecture guide)
COPY_LIKE = frozenset({"tensor_copy", "tensor_scalar"})


def words(text: str) -> frozenset[str]:
    """A set of names, written as one line."""
    return frozenset(text.split())


def number(event: Event, key: str, default: float = 0.0) -> float:
    """One number of the event's work."""
    value = event.work.get(key, default)
    return float(value) if isinstance(value, (int, float)) else default


def per_partition(extent: Extent) -> int:
    """Elements of one operand in one partition."""
    return extent.elements // max(1, extent.partitions[1] - extent.partitions[0])


def elements(event: Event) -> float:
    """Elements per partition that the instruction streams."""
    stated = number(event, "elements", -1.0)
    if stated >= 0:
        return stated
    operands = event.reads + event.writes
    return float(max((per_partition(x) for x in operands if x.space != "hbm"), default=1))


def _tiles(event: Event, count: float) -> list[Extent]:
    """The operands that stream, without (P, 1) scalar operands."""
    operands = (*event.reads, *event.writes)
    return [x for x in operands if count <= 1 or per_partition(x) > 1]


def _is_strided(extent: Extent, limit_bytes: float) -> bool:
    size = INFO[extent.dtype].itemsize
    count = per_partition(extent)
    if extent.row_bytes != size or count < 2:
        return False
    return (extent.span[1] - extent.span[0] - size) / (count - 1) >= limit_bytes


def vector_rate(event: Event, n: ResolvedSpec, count: float) -> float:
    """Elements per cycle per partition of the vector engine (its performance modes)."""
    tiles = _tiles(event, count)
    wide = all(INFO[x.dtype].itemsize == 2 for x in tiles)
    psum = any(x.space == "psum" for x in tiles)
    contiguous = all(x.row_bytes >= per_partition(x) * INFO[x.dtype].itemsize for x in tiles)
    rate: float = n.vector_base_elements
    if event.op in COPY_LIKE and not psum:
        if wide:
            rate = n.vector_wide_elements if contiguous else n.vector_half_wide_elements
        elif contiguous:
            rate = n.vector_sbuf_elements
    elif (event.op in COPY_LIKE and wide and contiguous) or (
        event.op == "tensor_tensor" and wide and all(x.space == "sbuf" for x in event.reads)
    ):
        rate = n.vector_half_wide_elements
    pointers = number(event, "scalar_operands")
    if rate > n.vector_base_elements and pointers:
        # each (P, 1) operand takes its bytes from those that the mode reads in a cycle
        left = n.vector_mode_bytes - pointers * n.vector_pointer_bytes
        streamed = max([INFO[x.dtype].itemsize for x in event.reads if x in tiles], default=4)
        rate = max(n.vector_base_elements, min(rate, left / streamed))
    if any(_is_strided(x, n.vector_strided_bytes) for x in tiles):
        rate /= 2
    return rate


def vector(event: Event, n: ResolvedSpec) -> EngineCost:
    """One element per cycle and partition, faster in the performance modes, plus a fixed part."""
    count = elements(event)
    stream = count / vector_rate(event, n, count) / n.vector_ghz
    return _vector_cost(stream, event, n)


def _vector_cost(stream: float, event: Event, n: ResolvedSpec) -> EngineCost:
    pointer = n.vector_pointer_ns if number(event, "scalar_operands") else 0.0
    pitch = max(n.vector_min_cycles / n.vector_ghz, stream + n.vector_gap_ns + pointer)
    return EngineCost(pitch, stream + n.vector_latency_ns + pointer, stream)


def vector_cycles(cycles_name: str) -> Law:
    """A vector law with a fixed number of cycles per element, named by its constant."""

    def law(event: Event, n: ResolvedSpec) -> EngineCost:
        stream = elements(event) * getattr(n, cycles_name) / n.vector_ghz
        return _vector_cost(stream, event, n)

    return law


def vector_scan(event: Event, n: ResolvedSpec) -> EngineCost:
    """A running sum: one cycle an element in fp32, and as many more for data that have to be cast to it."""
    cycles = n.vector_scan_cycles
    if any(INFO[x.dtype].itemsize < 4 for x in event.reads):
        cycles += n.vector_scan_cast_cycles
    return _vector_cost(elements(event) * cycles / n.vector_ghz, event, n)


def vector_eight(event: Event, n: ResolvedSpec) -> EngineCost:
    """The searches for eight values at once, which read them out at the end."""
    cost = vector(event, n)
    return EngineCost(cost.pitch + n.vector_eight_ns, cost.latency + n.vector_eight_ns, cost.stream)


def scalar(event: Event, n: ResolvedSpec) -> EngineCost:
    """One element per cycle; function, scale and bias are free; reading the sums out is not."""
    stream = elements(event) / n.scalar_ghz
    readout = n.scalar_read_cycles / n.scalar_ghz if len(event.writes) > 1 else 0.0
    name = str(event.work.get("function", ""))
    table = "" if name in PLAIN_FUNCTIONS or not event.op.startswith("activation") else name
    return EngineCost(stream + n.scalar_gap_ns + readout, stream + n.scalar_latency_ns + readout, stream, table)


def matmul(event: Event, n: ResolvedSpec) -> MatmulCost:
    """max(N, 64) cycles per pass; fp32 takes two passes of two cycles per column."""
    transpose = bool(event.work.get("transpose"))
    fp32 = bool(event.work.get("fp32")) or event.work.get("dtype") == "float32"
    rows = number(event, "rows", 128)
    columns = number(event, "cols_moving", 128)
    weights = number(event, "cols_stationary", 128)
    halved = transpose or bool(event.work.get("onezero"))
    passes = int(n.tensor_fp32_passes) if fp32 and not halved else 1
    cycles = n.tensor_fp32_cycles_per_column if fp32 else 1.0
    stream = max(columns, n.tensor_min_cycles) * cycles + n.tensor_issue_cycles
    load = weights * cycles / n.tensor_load_columns_per_cycle
    if event.reads and _is_strided(event.reads[0], n.vector_strided_bytes):
        # columns that are apart in memory come at half of the rate at which a product streams
        load = weights * cycles / n.tensor_strided_columns_per_cycle
    double = event.work.get("perf_mode") not in (None, "none", False)
    flops = 0.0 if transpose else 2.0 * rows * columns * weights * (2 if double else 1)
    peak = n.tensor_fp32_tflops if fp32 else n.tensor_bf16_tflops
    peak = n.tensor_fp8_tflops if double else peak
    # an fp32 product in one pass takes half of the time
    peak *= 2 if fp32 and halved else 1
    share = min(1.0, rows / ARRAY_ROWS)
    return MatmulCost(passes, stream / n.tensor_ghz, load / n.tensor_ghz, flops, peak, share, _group(event))


def _group(event: Event) -> int:
    """The first column of a product that is tiled by columns, or -1."""
    position, size = event.work.get("tile_position"), event.work.get("tile_size")
    if not isinstance(position, tuple) or not isinstance(size, tuple) or not size or size[1] == ARRAY_ROWS:
        return -1
    return int(position[1])
