"""The traces of an executed instruction: extents of memory, events, and the recording.

Execution emits these values and never reads them; the timeline schedules them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Extent:
    """One operand as memory: the bytes of a storage that an instruction touches."""

    # "sbuf" | "psum" | "hbm"
    space: str
    # storage id, unique per launch; hbm shared between cores keeps one id
    tensor: int
    name: str
    # owning core, -1 for shared hbm
    core: int
    # [start, stop) for on-chip memory, (0, 1) for hbm
    partitions: tuple[int, int]
    # [start, stop) bytes: absolute within the partition on chip, within the tensor for hbm
    span: tuple[int, int]
    elements: int
    dtype: str
    # contiguous bytes: of the innermost run per partition on chip, in whatever order they are walked in hbm
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Event:
    """One instruction in program order of its core, with the facts that a cost law needs."""

    index: int
    core: int
    # "tensor" | "vector" | "scalar" | "gpsimd" | "sync" | "dma"
    engine: str
    op: str
    reads: tuple[Extent, ...]
    writes: tuple[Extent, ...]
    work: Mapping[str, object]
    line: tuple[str, int]
    name: str | None
    # positions in the launch-wide list of events that must end before this one starts
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest number of bytes that were live at once in one memory of one core."""

    core: int
    space: str
    peak_bytes_per_partition: int
    capacity_bytes_per_partition: int
    # (tensor name, bytes per partition, kernel line) of what was live at the peak
    live: tuple[tuple[str, int, tuple[str, int]], ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """A launch as values: its events in launch-wide order and its memory peaks."""

    events: list[Event] = field(default_factory=list)
    peaks: tuple[Peak, ...] = ()
    instructions: int = 0
