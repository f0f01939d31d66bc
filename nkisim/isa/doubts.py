"""What no document settles: a launch warns once, with the question that a device would answer."""

from __future__ import annotations

import numpy as np

from nkisim.core import access
from nkisim.dtypes import Array
from nkisim.errors import AmbiguousManual
from nkisim.isa.statement import Call
from nkisim.memory.tensor import NkiTensor

COPIES = frozenset({"tensor_copy", "dma_copy"})


def doubt(call: Call, about: str, question: str) -> None:
    """Warn once in a launch."""
    text = f"{call.card.op}: {about}; no document says {question}: ask a device"
    call.core.warn(f"{call.card.op} {question}", text, AmbiguousManual)


def of_operands(call: Call) -> None:
    """Doubts about the operands' start partitions; those of one look share them."""
    inputs = [call.tensors[o.name] for o in call.card.operands if o.role != "out" and o.name in call.tensors]
    wide = [t for t in inputs if t.buffer.value == "sbuf" and t.size > t.shape[0] and call.engine != "dma"]
    if len({_start(t) for t in wide}) > 1 and call.engine != "tensor":
        doubt(call, "two SBUF inputs start at different partitions", "whether an engine reads both")


def of_addresses(call: Call, writes: list[NkiTensor]) -> None:
    """Doubts about where results go: several to one place, or over what is still to be read."""
    for target in writes:
        if 0 in target.strides and any(n > 1 for step, n in zip(target.strides, target.shape, strict=True) if not step):
            doubt(call, "dst has a step of 0", "which of its elements stays")
        source = call.tensors.get("src")
        if source is None or call.card.op not in COPIES or source._storage is not target._storage:
            continue
        if _meet(source, target):
            doubt(call, "src and dst overlap", "whether all of src is read before dst is written")


def of_rows(call: Call, rows: Array) -> None:
    """A doubt about a scatter's rows."""
    if len(np.unique(rows)) < len(rows):
        doubt(call, "two rows of a scatter go to one place", "which of them stays")


def of_largest(call: Call, results: list[Array]) -> list[Array]:
    """A doubt about NaN among the largest values; returns the results as they are."""
    if np.isnan(results[0]).any():
        doubt(call, "src holds NaN", "whether NaN is larger than every number, as it is here")
    return results


def _start(tensor: NkiTensor) -> int:
    return int(access.extent(tensor)[1])


def _meet(a: NkiTensor, b: NkiTensor) -> bool:
    """Whether two different views of a storage can touch the same bytes."""
    if a._layout() == b._layout():
        return False
    (_, p, q, low, high, *_), (_, r, s, first, last, *_) = access.extent(a), access.extent(b)
    return bool(p < s and r < q and low < last and first < high)
