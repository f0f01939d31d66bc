"""DMA: copies between HBM and SBUF, gathers and scatters, transposes, sums in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nkisim.core import access
from nkisim.dtypes import INFO, PACKED, WIDE, to_fp32
from nkisim.enums import dge_mode, engine, oob_mode
from nkisim.errors import IllegalView, Relaxed, ShapeMismatch, WrongArgument, WrongDtype, WrongEngine, WrongSpace
from nkisim.isa.card import record
from nkisim.isa.instruction import NkiInstruction
from nkisim.isa.statement import Call
from nkisim.isa.tokens import Token, resolve
from nkisim.isa.transfer import deliver, differ, fetch, hwdge_transposes, open_call, spread, transfer
from nkisim.memory.tensor import NkiTensor


def _descriptor_rules(call: Call) -> None:
    mode, requested = call.args["dge_mode"], call.args["engine"]
    dynamics = [t._dynamic for t in call.tensors.values() if t._dynamic is not None]
    if differ(call) and any(t.dtype in PACKED | WIDE for t in call.tensors.values()):
        actual = f"is {call.tensors['dst'].dtype} and src is {call.tensors['src'].dtype}"
        call.refuse(WrongDtype, "dst", actual, "packed and 64-bit types copy as they are")
    if mode is dge_mode.hwdge and differ(call):
        call.refuse(WrongDtype, "dge_mode", "is hwdge between different dtypes", "hwdge copies equal dtypes")
    may_issue = mode is dge_mode.hwdge and requested in (engine.sync, engine.scalar)
    if requested is not engine.unknown and not may_issue:
        actual = f"is {requested.name} with dge_mode.{mode.name}"
        call.refuse(WrongEngine, "engine", actual, "sync or scalar may issue hwdge copies")
    if any(d.vector for d in dynamics) and mode not in (dge_mode.unknown, dge_mode.swdge):
        actual = f"is {mode.name} with a vector_offset"
        call.refuse(WrongArgument, "dge_mode", actual, "gathers and scatters need swdge")
    if dynamics and mode is dge_mode.none:
        actual = "is none with a run-time offset"
        call.refuse(WrongArgument, "dge_mode", actual, "run-time addresses need swdge or hwdge")
    if call.args["oob_mode"] is oob_mode.skip and not dynamics:
        call.refuse(WrongArgument, "oob_mode", "is skip without a run-time index", "use error")


def _skips(call: Call) -> bool:
    return call.args["oob_mode"] is oob_mode.skip


_COPY = transfer("dma_copy", ("dst", "src"))


def dma_copy(
    dst: NkiTensor, src: NkiTensor, priority: int | None = None, oob_mode: oob_mode = oob_mode.error,
    dge_mode: dge_mode = dge_mode.unknown, engine: engine = engine.unknown, name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Copy between HBM and SBUF; through fp32 where dtypes differ."""
    call = open_call(_COPY, {"dst": dst, "src": src, "priority": priority, "oob_mode": oob_mode,
                             "dge_mode": dge_mode, "engine": engine, "name": name})  # fmt: skip
    if dst.size != src.size:
        actual = f"has shape {src.shape}, {src.size} elements"
        call.refuse(ShapeMismatch, "src", actual, f"dst has {dst.shape}, {dst.size} elements")
    _descriptor_rules(call)
    skip = _skips(call)
    fetched = fetch(call, "src", src, skip)
    if fetched is not None:
        values, valid = fetched
        deliver(call, values, None if valid is None else spread(valid, values.shape), skip)
    return record(call)


_TRANSPOSE = transfer("dma_transpose", ("dst", "src"))
_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def dma_transpose(
    dst: NkiTensor, src: NkiTensor, axes: Sequence[int] | None = None, priority: int | None = None,
    dge_mode: dge_mode = dge_mode.unknown, oob_mode: oob_mode = oob_mode.error, name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Transpose by DMA into SBUF, or gather rows and transpose them."""
    call = open_call(_TRANSPOSE, {"dst": dst, "src": src, "axes": axes, "priority": priority,
                                  "dge_mode": dge_mode, "oob_mode": oob_mode, "name": name})  # fmt: skip
    order = _transpose_rules(call)
    skip = _skips(call)
    fetched = fetch(call, "src", src, skip)
    if fetched is not None:
        values, valid = fetched
        where = None if valid is None else spread(valid, values.shape).transpose(order)
        unwritten = call.core.unwritten
        unwritten[:] = [mask.transpose(order) if mask.shape == values.shape else mask for mask in unwritten]
        deliver(call, values.transpose(order), where, skip)
    return record(call)


def _transpose_rules(call: Call) -> tuple[int, ...]:
    dst, src = call.tensors["dst"], call.tensors["src"]
    order = _AXES.get(src.ndim)
    if order is None or (call.args["axes"] is not None and tuple(call.args["axes"]) != order):
        actual = f"is {call.args['axes']} for {src.ndim} dimensions"
        call.refuse(WrongArgument, "axes", actual, "(1,0), (2,1,0) and (3,1,2,0) exist")
    if dst.buffer.value != "sbuf":
        call.refuse(WrongSpace, "dst", f"is in {dst.buffer.value}", "it must be in SBUF")
    if dst.dtype != src.dtype:
        call.refuse(WrongDtype, "dst", f"is {dst.dtype}", f"a transpose keeps {src.dtype}")
    shape = tuple(src.shape[i] for i in order)
    if dst.shape != shape:
        call.refuse(ShapeMismatch, "dst", f"has shape {dst.shape}", f"the transpose is {shape}")
    if call.args["oob_mode"] is oob_mode.skip and not src.is_indirect():
        call.refuse(WrongArgument, "oob_mode", "is skip without a run-time index", "use error")
    if src._dynamic is not None and src._dynamic.vector:
        _indirect_rules(call, src)
    elif call.args["dge_mode"] is dge_mode.hwdge:
        _hwdge_rules(call, src)
    elif call.args["dge_mode"] is dge_mode.none and call.core.policy.enums == "integers":
        text = "dma_transpose: dge_mode.none is taken as unknown; the manual has unknown and hwdge for it"
        call.core.warn("dma_transpose with dge_mode.none", text, Relaxed)
        call.args["dge_mode"] = dge_mode.unknown
    elif call.args["dge_mode"] is not dge_mode.unknown:
        actual = f"is {call.args['dge_mode'].name}"
        call.refuse(WrongArgument, "dge_mode", actual, "a direct transpose takes unknown or hwdge")
    return order


def _hwdge_rules(call: Call, src: NkiTensor) -> None:
    if not hwdge_transposes(src):
        rows = (16,) if src.ndim == 2 else (1, 2, 4, 8, 16)
        actual = f"is {src.dtype} {src.shape} with hwdge"
        call.refuse(ShapeMismatch, "src", actual, f"2-byte types, shape[0] in {rows}, "
                    "shape[-1] <= 128, shape[0] * shape[-2] a multiple of 16")  # fmt: skip


def _indirect_rules(call: Call, src: NkiTensor) -> None:
    assert src._dynamic is not None
    index: NkiTensor = src._dynamic.source
    if call.args["dge_mode"] not in (dge_mode.unknown, dge_mode.swdge):
        actual = f"is {call.args['dge_mode'].name} with indices"
        call.refuse(WrongArgument, "dge_mode", actual, "an indirect transpose takes swdge")
    if src.ndim == 4 and 1 not in src.shape[1:3]:
        call.refuse(ShapeMismatch, "src", f"has shape {src.shape}", "dim 1 or dim 2 must be 1")
    if src.shape[-1] > 128 or INFO[src.dtype].itemsize != 2 or src.shape[0] % 16:
        allowed = "2-byte types, shape[-1] <= 128, shape[0] a multiple of 16"
        call.refuse(ShapeMismatch, "src", f"is {src.dtype} {src.shape}", allowed)
    rows = index.shape[0]
    wide = index.ndim == 2 and index.shape[1] > 1
    if index.ndim != 2 or not 16 <= rows <= 128 or rows % 16 or (wide and rows != 128):
        call.refuse(ShapeMismatch, "src indices", f"are {index.shape}", "(16..128, 1) or (128, n) is needed")
    if index.dtype != "uint32":
        call.refuse(WrongDtype, "src indices", f"are {index.dtype}", "they are uint32")


def dma_compute(
    dst: NkiTensor, srcs: Sequence[NkiTensor], reduce_op: Token, scales: Sequence[float] | None = None,
    unique_indices: bool = True, oob_mode: oob_mode = oob_mode.error, name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Add up to 16 tensors in flight, in fp32; with indices, read-modify-write of rows."""
    names = tuple(f"srcs[{i}]" for i in range(len(srcs)))
    args = {"dst": dst, **dict(zip(names, srcs, strict=False)), "oob_mode": oob_mode, "name": name}
    call = open_call(transfer("dma_compute", ("dst", *names)), args)
    _compute_rules(call, names, (reduce_op, scales, unique_indices))
    skip = _skips(call)
    total: Any = None
    where: Any = None
    for operand in names:
        values, valid = fetch(call, operand, call.tensors[operand], skip)  # type: ignore[misc]
        if valid is not None:
            where = spread(valid, values.shape).reshape(dst.shape)
        if call.core.numerics or access.computed(call.tensors.values()):
            values = to_fp32(values).reshape(dst.shape)
            total = values.copy() if total is None else total + values
        else:
            total = values.reshape(dst.shape)
    deliver(call, total, where, skip)
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
            call.refuse(ShapeMismatch, operand, f"has shape {tensor.shape}", f"dst has {dst.shape}")
        if tensor._dynamic is not None and not tensor._dynamic.vector:
            call.refuse(IllegalView, operand, "has a run-time start", "addresses are static or vector_offset")
    indirect = [n for n in names if call.tensors[n].is_indirect()]
    if indirect or dst.is_indirect():
        if len(names) != 2 or not unique:
            allowed = "an indexed sum takes 2 tensors and unique indices"
            call.refuse(WrongArgument, "srcs", f"has {len(names)} tensors, unique_indices={unique}", allowed)
        _modify_rules(call, dst, [call.tensors[n] for n in names])
        if dst.is_indirect():
            _unique(call, dst)


def _modify_rules(call: Call, dst: NkiTensor, srcs: list[NkiTensor]) -> None:
    """An indexed sum is dst[rows] += tile, or tile += src[rows]; one source is dst itself."""
    others = [s for s in srcs if not _same(s, dst)]
    if len(others) != 1:
        actual = f"has {len(srcs) - len(others)} sources that are dst"
        call.refuse(WrongArgument, "srcs", actual, "exactly one source of an indexed sum is dst")
    tile = others[0] if dst.is_indirect() else dst
    if tile.buffer.value != "sbuf" or tile.is_indirect():
        call.refuse(WrongSpace, "srcs", f"add a tile in {tile.buffer.value}", "it is a tile in SBUF")


def _same(a: NkiTensor, b: NkiTensor) -> bool:
    """Return whether two views name the same elements, by the same indices."""
    if a is b:
        return True
    sources = [t._dynamic.source if t._dynamic is not None else None for t in (a, b)]
    alike = a._storage is b._storage and a._layout() == b._layout()
    return alike and (sources[0] is sources[1] or (
        isinstance(sources[0], NkiTensor) and isinstance(sources[1], NkiTensor)
        and sources[0]._storage is sources[1]._storage
        and sources[0]._layout() == sources[1]._layout()
    ))  # fmt: skip


def _unique(call: Call, dst: NkiTensor) -> None:
    assert dst._dynamic is not None
    index = access.indices(call.core, dst._dynamic, call.who("dst"))[: dst.shape[0]]
    if len(np.unique(index)) != len(index):
        call.refuse(WrongArgument, "dst indices", "repeat", "an indexed sum needs unique indices")
