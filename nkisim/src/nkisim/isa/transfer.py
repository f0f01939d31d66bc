"""The steps of every DMA instruction: check, read, write, with rows that a run-time index may skip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from nkisim.core import access, gather
from nkisim.core.context import current
from nkisim.dtypes import ANY, INFO, WIDE, Array, Flags, to_fp32
from nkisim.enums import dge_mode, engine, oob_mode
from nkisim.errors import NeedsNewerCore, ShapeMismatch, WrongArgument, WrongDtype, WrongSpace
from nkisim.isa import ambiguities
from nkisim.isa.plan import note_index
from nkisim.isa.statement import DMA, Call, Card, Operand
from nkisim.memory.tensor import NkiTensor


def transfer(op: str, names: tuple[str, ...]) -> Card:
    """Return the card of a DMA instruction with these operands."""
    operands = tuple(Operand(n, "out" if n == "dst" else "in", spaces=DMA, dtypes=ANY) for n in names)
    return Card(op, ("dma",), operands, work=_work)


_ENUMS = (("oob_mode", oob_mode), ("dge_mode", dge_mode), ("engine", engine))


def open_call(card: Card, args: dict[str, Any]) -> Call:
    """Check the operands of a transfer and return its call."""
    call = Call(current(card.op), card, args, "dma")
    for operand in card.operands:
        tensor = args[operand.name]
        if tensor.__class__ is not NkiTensor:
            call.refuse(WrongArgument, operand.name, f"is {tensor!r:.60}", "a tensor is needed")
        if tensor.buffer.value not in DMA:
            call.refuse(WrongSpace, operand.name, f"is in {tensor.buffer.value}", "DMA moves between HBM and SBUF only")
        if tensor.dtype in WIDE and card.op != "dma_copy":
            call.refuse(WrongDtype, operand.name, f"is {tensor.dtype}", "dma_copy moves 64 bits, nothing computes them")
        tensor._judge()
        call.tensors[operand.name] = tensor
        note_index(call, tensor)
    ambiguities.of_copies(call)
    priority = args.get("priority")
    if priority is not None and call.core.geometry.generation < 4:
        raise NeedsNewerCore(f"{card.op} with priority")
    enums = tuple((n, kind) for n, kind in _ENUMS if n in args)
    call.members(enums)
    for name, kind in enums:
        if not isinstance(args[name], kind):
            call.refuse(WrongArgument, name, f"is {args[name]!r}", f"pass a nisa.{name}")
    return call


def _work(call: Call) -> Mapping[str, object]:
    args = call.args
    runs = [access.extent(t)[7] for t in call.tensors.values()]
    sizes = [t.size * INFO[t.dtype].itemsize for t in call.tensors.values()]
    row = max(1, min(runs))
    generation = descriptors(call)
    requested = args.get("engine", engine.unknown)
    issuer = "gpsimd" if generation == "swdge" else ("scalar" if requested is engine.scalar else "sync")
    return _shared_work(max(sizes), row, generation, call.card.op == "dma_transpose", issuer)


@lru_cache(maxsize=4096)
def _shared_work(size: int, row: int, generation: str, transposes: bool, issuer: str) -> Mapping[str, object]:
    """One mapping for all transfers that look alike: the timeline knows them by it."""
    return {"bytes": size, "rows": -(-size // row), "row_bytes": row, "dge": generation, "transpose": transposes,
            "issuer": issuer}  # fmt: skip


def descriptors(call: Call) -> str:
    """Return who makes the descriptors: the kernel's choice, or `unknown` where it leaves that to the compiler.

    Gathers and scatters need swdge; dma_compute has static descriptors.
    """
    if any(t._dynamic is not None and t._dynamic.vector for t in call.tensors.values()):
        return "swdge"
    mode = call.args.get("dge_mode", dge_mode.unknown)
    if mode is not dge_mode.unknown:
        return str(mode.name)
    return "none" if call.card.op == "dma_compute" else "unknown"


def hwdge_transposes(src: NkiTensor) -> bool:
    """Return whether the hardware's descriptors can transpose this source (0.6 manual)."""
    rows = (16,) if src.ndim == 2 else (1, 2, 4, 8, 16)
    fits = src.shape[0] in rows and src.shape[-1] <= 128 and INFO[src.dtype].itemsize == 2
    return fits and (src.ndim == 2 or src.shape[0] * src.shape[-2] % 16 == 0)


def fetch(call: Call, operand: str, tensor: NkiTensor, skip: bool) -> tuple[Array, Flags | None] | None:
    """Read a source; return its elements and, where a gather skipped rows, which rows it read.

    None means that a run-time start is out of range and the transfer is skipped.
    """
    who = call.who(operand)
    dynamic = tensor._dynamic
    if dynamic is None:
        return access.read(call.core, tensor, who), None
    if dynamic.vector:
        rows = gather.resolve(call.core, tensor, who, skip)
        ambiguities.of_skipped(call, rows.valid)
        return gather.read(call.core, rows, who), None if rows.valid.all() else rows.valid
    settled = access.resolve_dynamic_offset(call.core, tensor, who)
    if settled is None:
        if skip:
            return None
        raise access.out_of_range(call.core, tensor, who)
    call.tensors[operand] = settled
    return access.read(call.core, settled, who), None


def spread(valid: Flags, shape: tuple[int, ...]) -> Flags:
    """Return one flag per element from one flag per row."""
    return np.broadcast_to(valid.reshape(-1, *(1,) * (len(shape) - 1)), shape)


def deliver(call: Call, values: Array, where: Flags | None, skip: bool) -> None:
    """Write to dst; with `where` (one flag per element of `values`), only those elements."""
    tensor, who, core = call.tensors["dst"], call.who("dst"), call.core
    dynamic = tensor._dynamic
    tensor._storage.info.loading = core.clock
    unknown = not core.numerics and not access.computed(call.tensors.values())
    if unknown:
        tensor._storage.unknown = True
    elif differ(call):
        values = to_fp32(values)
    if dynamic is not None and dynamic.vector:
        rows = gather.resolve(core, tensor, who, skip)
        ambiguities.of_rows(call, rows.index[rows.valid])
        ambiguities.of_skipped(call, rows.valid)
        if where is not None:
            rows = replace(rows, valid=rows.valid & _complete_rows(call, where, len(rows.index)))
        gather.write(core, rows, values, who)
        return
    if dynamic is not None:
        settled = access.resolve_dynamic_offset(core, tensor, who)
        if settled is None:
            if skip:
                return
            raise access.out_of_range(core, tensor, who)
        tensor = call.tensors["dst"] = settled
    if where is None and unknown:
        access.write_unknown(core, tensor, who)
    elif where is None:
        access.write(core, tensor, values, who)
    else:
        access.write_where(core, tensor, (values, np.ascontiguousarray(where)), who)


def _complete_rows(call: Call, where: Flags, count: int) -> Flags:
    """Return which rows of a scatter arrive, from flags per element."""
    flags = where.reshape(count, -1)
    arrives: Flags = np.any(flags, axis=1)
    if not np.array_equal(arrives, flags.all(axis=1)):
        actual = f"scatters {count} rows, and a gather skipped parts of them"
        call.refuse(ShapeMismatch, "dst", actual, "oob_mode.skip needs one dst row per src row")
    return arrives


def differ(call: Call) -> bool:
    """Return whether the transfer converts."""
    return any(t.dtype != call.tensors["dst"].dtype for t in call.tensors.values())
