"""DMA: copies between HBM and SBUF, gathers and scatters, transposes, sums in flight."""


from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nkisim import access, gather
from nkisim.card import DMA, Call, Card, Operand, note_index, record
from nkisim.context import current
from nkisim.dtypes import INFO, PACKED, Array, to_fp32
from nkisim.enums import dge_mode, engine, oob_mode
from nkisim.errors import (
    IllegalView,
    NeedsNewerCore,
    NotSimulated,
    ShapeMismatch,
    WrongArgument,
    WrongDtype,
    WrongEngine,
    WrongSpace,
)
from nkisim.instruction import NkiInstruction
from nkisim.isa.copies import ANY
from nkisim.tensor import NkiTensor
from nkisim.tokens import resolve


def _body(**_: Any) -> None:
    """DMA moves data itself; there is no arithmetic body."""


def _transfer(op: str, names: tuple[str, ...]) -> Card:
    operands = tuple(
        Operand(n, "out" if n == "dst" else "in", spaces=DMA, dtypes=ANY) for n in names
    )
    return Card(op, ("dma",), operands, _body, work=_work)


def open_call(card: Card, args: dict[str, Any]) -> Call:
    """Check the operands of a transfer and return its call."""
    call = Call(current(card.op), card, args, "dma")
    for operand in card.operands:
        tensor = args[operand.name]
        if tensor.__class__ is not NkiTensor:
            call.refuse(WrongArgument, operand.name, f"is {tensor!r:.60}", "a tensor is needed")
        if tensor.buffer.value not in DMA:
            found = f"is in {tensor.buffer.value}"
            call.refuse(WrongSpace, operand.name, found, "DMA moves between HBM and SBUF only")
        call.tensors[operand.name] = tensor
        note_index(call, tensor)
    if args.get("priority") is not None:
        raise NeedsNewerCore(f"{card.op} with priority")
    if not isinstance(args.get("oob_mode", oob_mode.error), oob_mode):
        call.refuse(WrongArgument, "oob_mode", f"is {args['oob_mode']!r}", "pass a nisa.oob_mode")
    return call


def _work(call: Call) -> Mapping[str, object]:
    args = call.args
    runs = [access.extent(t)[7] for t in call.tensors.values()]
    sizes = [t.size * INFO[t.dtype].itemsize for t in call.tensors.values()]
    row = max(1, min(runs))
    vector = any(t._dynamic is not None and t._dynamic.vector for t in call.tensors.values())
    mode = args.get("dge_mode", dge_mode.unknown)
    asked = args.get("engine", engine.unknown)
    return {
        "bytes": max(sizes),
        "rows": -(-max(sizes) // row),
        "row_bytes": row,
        "dge": "swdge" if vector else ("hwdge" if mode is dge_mode.unknown else mode.name),
        "transpose": call.card.op == "dma_transpose",
        "issuer": "gpsimd"
        if vector or mode is dge_mode.swdge
        else ("scalar" if asked is engine.scalar else "sync"),
    }


def fetch(call: Call, operand: str, tensor: NkiTensor, skip: bool) -> tuple[Array, Any] | None:
    """Read a source; return its elements and, for a gather, which rows are valid.

    None means that a run-time start is out of range and the transfer is skipped.
    """
    who = call.who(operand)
    dynamic = tensor._dynamic
    if dynamic is None:
        return access.read(call.core, tensor, who), None
    if dynamic.vector:
        rows = gather.resolve(call.core, tensor, who, skip)
        values = gather.read(call.core, rows, who)
        return values, None if rows.valid.all() else rows.valid
    settled = access.settle(call.core, tensor, who)
    if settled is None:
        if skip:
            return None
        raise access.out_of_range(call.core, tensor, who)
    call.tensors[operand] = settled
    return access.read(call.core, settled, who), None


def deliver(call: Call, values: Array, valid: Any, skip: bool) -> None:
    """Write to dst; with `valid`, only the rows that a gather could read."""
    tensor, who, core = call.tensors["dst"], call.who("dst"), call.core
    dynamic = tensor._dynamic
    if _differ(call):
        values = to_fp32(values)
    if dynamic is not None and dynamic.vector:
        if valid is not None:
            why = "gather with skipped rows into a scatter"
            raise NotSimulated(call.card.op, "oob_mode", why)
        gather.write(core, gather.resolve(core, tensor, who, skip), values, who)
        return
    if dynamic is not None:
        settled = access.settle(core, tensor, who)
        if settled is None:
            if skip:
                return
            raise access.out_of_range(core, tensor, who)
        tensor = call.tensors["dst"] = settled
    if valid is None:
        access.write(core, tensor, values, who)
        return
    if tensor.shape[0] != len(valid):
        found = f"has {tensor.shape[0]} rows for {len(valid)} indices"
        call.refuse(ShapeMismatch, "dst", found, "oob_mode.skip needs one dst row per index")
    full = np.zeros(tensor.shape, values.dtype)
    full[valid] = values.reshape((-1, *tensor.shape[1:]))
    mask = np.zeros(tensor.shape, bool)
    mask[valid] = True
    access.write_where(core, tensor, (full, mask), who)


def _differ(call: Call) -> bool:
    return any(t.dtype != call.tensors["dst"].dtype for t in call.tensors.values())


def _descriptor_rules(call: Call) -> None:
    mode, asked = call.args["dge_mode"], call.args["engine"]
    dynamics = [t._dynamic for t in call.tensors.values() if t._dynamic is not None]
    if not isinstance(mode, dge_mode):
        call.refuse(WrongArgument, "dge_mode", f"is {mode!r}", "pass a nisa.dge_mode")
    if _differ(call) and any(t.dtype in PACKED for t in call.tensors.values()):
        call.refuse(WrongDtype, "dst", "is packed and src is not alike", "packed types copy as is")
    if mode is dge_mode.hwdge and _differ(call):
        found = "is hwdge between different dtypes"
        call.refuse(WrongDtype, "dge_mode", found, "hwdge copies equal dtypes")
    if asked is not engine.unknown and (
        mode is not dge_mode.hwdge or asked not in (engine.sync, engine.scalar)
    ):
        found = f"is {asked.name} with dge_mode.{mode.name}"
        call.refuse(WrongEngine, "engine", found, "sync or scalar may issue hwdge copies")
    if any(d.vector for d in dynamics) and mode not in (dge_mode.unknown, dge_mode.swdge):
        found = f"is {mode.name} with a vector_offset"
        call.refuse(WrongArgument, "dge_mode", found, "gathers and scatters need swdge")
    if dynamics and mode is dge_mode.none:
        found = "is none with a run-time offset"
        call.refuse(WrongArgument, "dge_mode", found, "run-time addresses need swdge or hwdge")
    if call.args["oob_mode"] is oob_mode.skip and not dynamics:
        call.refuse(WrongArgument, "oob_mode", "is skip without a run-time index", "use error")


_COPY = _transfer("dma_copy", ("dst", "src"))


def dma_copy(
    dst: Any, src: Any, priority: int | None = None, oob_mode: Any = oob_mode.error,
    dge_mode: Any = dge_mode.unknown, engine: Any = engine.unknown, name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Copy between HBM and SBUF; through fp32 where dtypes differ."""
    call = open_call(_COPY, {"dst": dst, "src": src, "priority": priority, "oob_mode": oob_mode,
                             "dge_mode": dge_mode, "engine": engine, "name": name})  # fmt: skip
    if dst.size != src.size:
        found = f"has shape {src.shape}, {src.size} elements"
        call.refuse(ShapeMismatch, "src", found, f"dst has {dst.shape}, {dst.size} elements")
    _descriptor_rules(call)
    skip = oob_mode.name == "skip"
    fetched = fetch(call, "src", src, skip)
    if fetched is not None:
        deliver(call, *fetched, skip)
    return record(call)


_TRANSPOSE = _transfer("dma_transpose", ("dst", "src"))
_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def dma_transpose(
    dst: Any, src: Any, axes: Any = None, priority: int | None = None,
    dge_mode: Any = dge_mode.unknown, oob_mode: Any = oob_mode.error, name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Transpose by DMA into SBUF, or gather rows and transpose them."""
    call = open_call(_TRANSPOSE, {"dst": dst, "src": src, "axes": axes, "priority": priority,
                                  "dge_mode": dge_mode, "oob_mode": oob_mode, "name": name})  # fmt: skip
    order = _transpose_rules(call)
    skip = oob_mode.name == "skip"
    fetched = fetch(call, "src", src, skip)
    if fetched is not None:
        values, valid = fetched
        if valid is not None:
            raise NotSimulated("dma_transpose", "oob_mode", "skipped rows of a gather")
        deliver(call, values.transpose(order), None, skip)
    return record(call)


def _transpose_rules(call: Call) -> tuple[int, ...]:
    dst, src = call.tensors["dst"], call.tensors["src"]
    order = _AXES.get(src.ndim)
    if order is None or (call.args["axes"] is not None and tuple(call.args["axes"]) != order):
        found = f"is {call.args['axes']} for {src.ndim} dimensions"
        call.refuse(WrongArgument, "axes", found, "(1,0), (2,1,0) and (3,1,2,0) exist")
    if dst.buffer.value != "sbuf":
        call.refuse(WrongSpace, "dst", f"is in {dst.buffer.value}", "it must be in SBUF")
    if dst.dtype != src.dtype:
        call.refuse(WrongDtype, "dst", f"is {dst.dtype}", f"a transpose keeps {src.dtype}")
    shape = tuple(src.shape[i] for i in order)
    if dst.shape != shape:
        call.refuse(ShapeMismatch, "dst", f"has shape {dst.shape}", f"the transpose is {shape}")
    if src._dynamic is not None and src._dynamic.vector:
        _indirect_rules(call, src)
    elif call.args["dge_mode"] is dge_mode.hwdge:
        _hwdge_rules(call, src)
    elif call.args["dge_mode"] is not dge_mode.unknown:
        found = f"is {call.args['dge_mode'].name}"
        call.refuse(WrongArgument, "dge_mode", found, "a direct transpose takes unknown or hwdge")
    return order


def _hwdge_rules(call: Call, src: NkiTensor) -> None:
    rows = (16,) if src.ndim == 2 else (1, 2, 4, 8, 16)
    wrong = src.shape[0] not in rows or src.shape[-1] > 128 or INFO[src.dtype].itemsize != 2
    if wrong or (src.ndim > 2 and src.shape[0] * src.shape[-2] % 16):
        found = f"is {src.dtype} {src.shape} with hwdge"
        call.refuse(ShapeMismatch, "src", found, f"2-byte types, shape[0] in {rows}, "
                    "shape[-1] <= 128, shape[0] * shape[-2] a multiple of 16")  # fmt: skip


def _indirect_rules(call: Call, src: NkiTensor) -> None:
    assert src._dynamic is not None
    index: NkiTensor = src._dynamic.source
    if call.args["dge_mode"] not in (dge_mode.unknown, dge_mode.swdge):
        found = f"is {call.args['dge_mode'].name} with indices"
        call.refuse(WrongArgument, "dge_mode", found, "an indirect transpose takes swdge")
    if src.ndim == 4 and 1 not in src.shape[1:3]:
        call.refuse(ShapeMismatch, "src", f"has shape {src.shape}", "dim 1 or dim 2 must be 1")
    if src.shape[-1] > 128 or INFO[src.dtype].itemsize != 2 or src.shape[0] % 16:
        found = f"is {src.dtype} {src.shape}"
        allowed = "2-byte types, shape[-1] <= 128, shape[0] a multiple of 16"
        call.refuse(ShapeMismatch, "src", found, allowed)
    rows = index.shape[0]
    wide = index.ndim == 2 and index.shape[1] > 1
    if index.ndim != 2 or not 16 <= rows <= 128 or rows % 16 or (wide and rows != 128):
        found = f"are {index.shape}"
        call.refuse(ShapeMismatch, "src indices", found, "(16..128, 1) or (128, n) is needed")
    if index.dtype != "uint32":
        call.refuse(WrongDtype, "src indices", f"are {index.dtype}", "they are uint32")


def dma_compute(
    dst: Any, srcs: Any, reduce_op: Any, scales: Any = None, unique_indices: bool = True,
    oob_mode: Any = oob_mode.error, name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Add up to 16 tensors in flight, in fp32; with indices, read-modify-write of rows."""
    names = tuple(f"srcs[{i}]" for i in range(len(srcs)))
    args = {"dst": dst, **dict(zip(names, srcs, strict=False)), "oob_mode": oob_mode, "name": name}
    call = open_call(_transfer("dma_compute", ("dst", *names)), args)
    _compute_rules(call, names, (reduce_op, scales, unique_indices))
    skip = oob_mode.name == "skip"
    total: Any = None
    for operand in names:
        fetched = fetch(call, operand, call.tensors[operand], skip)
        if fetched is None or fetched[1] is not None:
            raise NotSimulated("dma_compute", "oob_mode", "skipped rows")
        values = to_fp32(fetched[0]).reshape(dst.shape)
        total = values.copy() if total is None else total + values
    deliver(call, total, None, skip)
    return record(call)


def _compute_rules(call: Call, names: tuple[str, ...], how: tuple[Any, Any, bool]) -> None:
    reduce_op, scales, unique = how
    if resolve(reduce_op, call.who("reduce_op")).name != "add":
        call.refuse(WrongArgument, "reduce_op", f"is {reduce_op!r}", "only nl.add is supported")
    if scales is not None and any(float(s) != 1.0 for s in scales):
        call.refuse(WrongArgument, "scales", f"are {scales}", "every scale must be 1.0")
    if not 1 <= len(names) <= 16:
        call.refuse(WrongArgument, "srcs", f"has {len(names)} tensors", "1 to 16 are allowed")
    dst = call.tensors["dst"]
    for operand in names:
        tensor = call.tensors[operand]
        if tensor.size != dst.size:
            found = f"has shape {tensor.shape}"
            call.refuse(ShapeMismatch, operand, found, f"dst has {dst.shape}")
        if tensor._dynamic is not None and not tensor._dynamic.vector:
            found = "has a run-time start"
            call.refuse(IllegalView, operand, found, "addresses are static or vector_offset")
    indirect = [n for n in names if call.tensors[n].is_indirect()]
    if indirect or dst.is_indirect():
        if len(names) != 2 or not unique:
            found = f"has {len(names)} tensors, unique_indices={unique}"
            allowed = "an indexed sum takes 2 tensors and unique indices"
            call.refuse(WrongArgument, "srcs", found, allowed)
        if dst.is_indirect():
            _unique(call, dst)


def _unique(call: Call, dst: NkiTensor) -> None:
    assert dst._dynamic is not None
    index = access.indices(call.core, dst._dynamic, call.who("dst"))[: dst.shape[0]]
    if len(np.unique(index)) != len(index):
        call.refuse(WrongArgument, "dst indices", "repeat", "an indexed sum needs unique indices")
