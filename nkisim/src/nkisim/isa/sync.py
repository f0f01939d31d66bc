"""Two cores of one launch: exchange of tiles and barriers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nkisim.core import access, races
from nkisim.core.context import Core, current, since
from nkisim.core.cores import Wait
from nkisim.dtypes import ANY, INFO, MOVED, to_fp32
from nkisim.enums import ENGINE_NAMES, dma_engine, engine
from nkisim.errors import BadLaunch, Relaxed, ShapeMismatch, TileTooLarge, WrongArgument, WrongDtype, WrongSpace
from nkisim.isa import ambiguities
from nkisim.isa.card import record
from nkisim.isa.instruction import NkiInstruction
from nkisim.isa.rules import per_partition
from nkisim.isa.statement import DMA, SBUF, Call, Card, Operand
from nkisim.isa.tokens import Token, resolve
from nkisim.lines import kernel_line
from nkisim.memory.tensor import NkiTensor

_SENDRECV = Card(
    "sendrecv",
    ("dma",),
    (Operand("dst", "out", spaces=SBUF, dtypes=MOVED), Operand("src", "in", spaces=SBUF, dtypes=MOVED)),
)
_BARRIER = Card("core_barrier", ("gpsimd",), (Operand("data", "inout", spaces=DMA, dtypes=ANY),))


def _two_cores(core: Core, op: str) -> None:
    if core.programs != 2:
        raise BadLaunch(op, None, f"ran on a launch of {core.programs} core", "launch the kernel as kernel[2]")


def partners(core: Core) -> tuple[int, int]:
    """Return the members of the launch that share this core's HBM."""
    first = core.number - core.program
    return first, first + 1


def sendrecv(
    src: NkiTensor, dst: NkiTensor, send_to_rank: int, recv_from_rank: int, pipe_id: int,
    dma_engine: dma_engine = dma_engine.dma, name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Send a tile to the other core while receiving its tile."""
    core = current("sendrecv")
    _two_cores(core, "sendrecv")
    call = Call(core, _SENDRECV, {"src": src, "dst": dst, "name": name}, "dma")
    _exchange_rules(call, (send_to_rank, recv_from_rank), dma_engine)
    values = access.read(core, src, call.who("src")).copy()
    line = kernel_line()
    text = f"sendrecv(pipe_id={pipe_id}, {line[0]}:{line[1]})"
    key = ("sendrecv", pipe_id, dma_engine.name, partners(core))
    answer = core.meeting.arrive(core.number, Wait(key, partners(core), text, (values, src)))
    received, sender = answer[partners(core)[int(recv_from_rank)]]
    if sender.dtype != dst.dtype or sender.shape != dst.shape:
        call.refuse(ShapeMismatch, "dst", f"is {dst.dtype} {dst.shape}", f"{sender.dtype} {sender.shape} arrives")
    access.write(core, dst, received, call.who("dst"), together=True)
    return record_pair(call, ("sendrecv", pipe_id), src, dma_engine.name)


_COMPUTE = Card(
    "sendrecv_compute",
    ("dma",),
    (Operand("dst", "out", spaces=DMA, dtypes=MOVED), Operand("src", "in", spaces=DMA, dtypes=MOVED)),
)


def sendrecv_compute(
    src: NkiTensor, dst: NkiTensor, send_to_rank: int, recv_from_rank: int, reduce_op: Token, name: str | None = None
) -> NkiInstruction:
    """Send a tile to the other core, receive its tile, and write reduce_op of both; in fp32, as dma_compute adds."""
    core = since("sendrecv_compute", "use sendrecv and tensor_tensor")
    _two_cores(core, "sendrecv_compute")
    call = Call(core, _COMPUTE, {"src": src, "dst": dst, "name": name}, "dma")
    _exchange_rules(call, (send_to_rank, recv_from_rank), dma_engine.dma, ("sbuf", "private_hbm"))
    op = resolve(reduce_op, call.who("reduce_op"))
    if op.name not in ("add", "maximum", "minimum"):
        call.refuse(WrongArgument, "reduce_op", f"is nl.{op.name}", "nl.add, nl.maximum and nl.minimum are supported")
    if src.buffer is not dst.buffer:
        actual = f"is in {dst.buffer.value} and src in {src.buffer.value}"
        call.refuse(WrongSpace, "dst", actual, "both are in SBUF or both in private HBM")
    if core.recording:
        ambiguities.warn_ambiguous(call, "its time is that of sendrecv", "what the reduction takes")
    mine = access.read(core, src, call.who("src")).copy()
    line = kernel_line()
    text = f"sendrecv_compute({line[0]}:{line[1]})"
    answer = core.meeting.arrive(core.number, Wait(("sendrecv_compute", partners(core)), partners(core), text, mine))
    incoming = answer[partners(core)[int(recv_from_rank)]]
    if incoming.dtype != mine.dtype or incoming.shape != mine.shape:
        call.refuse(ShapeMismatch, "dst", f"has shape {dst.shape}", f"{incoming.dtype} {incoming.shape} arrives")
    access.write(core, dst, op.fn(to_fp32(mine), to_fp32(incoming)), call.who("dst"), together=True)
    return record_pair(call, ("sendrecv_compute",), src, "dma")


def record_pair(call: Call, key: object, src: NkiTensor, way: str) -> NkiInstruction:
    """Record an exchange with the facts that its cost needs."""
    size = src.size * INFO[src.dtype].itemsize
    work = {"bytes": size, "rows": src.shape[0], "row_bytes": size // src.shape[0],
            "dge": "none", "transpose": False, "issuer": "gpsimd", "meets": key, "dma_engine": way}  # fmt: skip
    call.card = Card(call.card.op, call.card.engines, call.card.operands, work=lambda _: work)
    return record(call)


def _exchange_rules(call: Call, ranks: tuple[Any, Any], how: Any, spaces: tuple[str, ...] = ("sbuf",)) -> None:
    src, dst = call.args["src"], call.args["dst"]
    for operand, tensor in (("src", src), ("dst", dst)):
        if tensor.__class__ is not NkiTensor or tensor._dynamic is not None:
            call.refuse(WrongArgument, operand, f"is {tensor!r:.60}", "a static tile is needed")
        call.tensors[operand] = tensor
        if tensor.buffer.value not in spaces:
            call.refuse(WrongSpace, operand, f"is in {tensor.buffer.value}", f"both are in {' or in '.join(spaces)}")
    if src.dtype != dst.dtype:
        call.refuse(WrongDtype, "dst", f"is {dst.dtype}", f"src is {src.dtype}")
    if src.shape != dst.shape:
        call.refuse(ShapeMismatch, "dst", f"has shape {dst.shape}", f"src has {src.shape}")
    for operand, rank in zip(("send_to_rank", "recv_from_rank"), ranks, strict=False):
        if rank not in (0, 1):
            call.refuse(WrongArgument, operand, f"is {rank!r}", "the two cores are 0 and 1")
    if how is dma_engine.gpsimd_dma:
        width = INFO[src.dtype].itemsize
        size, limit = per_partition(src) * width, 256 * width
        if size > limit:
            actual = f"has {size} B per partition"
            call.refuse(TileTooLarge, "src", actual, f"gpsimd_dma takes {limit} B of {width} B types")


def core_barrier(
    data: NkiTensor, cores: Sequence[int], engine: engine = engine.gpsimd, name: str | None = None
) -> NkiInstruction:
    """Wait until both cores reach this barrier; accesses to `data` are then ordered."""
    core = current("core_barrier")
    _two_cores(core, "core_barrier")
    call = Call(core, _BARRIER, {"data": data, "name": name}, ENGINE_NAMES.get(engine, "gpsimd"))
    if data.__class__ is not NkiTensor or data.buffer.value != "shared_hbm":
        where = data.buffer.value if data.__class__ is NkiTensor else repr(data)
        call.refuse(WrongSpace, "data", f"is in {where}", "it must be in shared_hbm")
    if tuple(cores) != (0, 1):
        call.refuse(WrongArgument, "cores", f"is {cores}", "only (0, 1) is supported")
    call.tensors["data"] = data
    line = kernel_line()
    text = f"core_barrier(data={data.name}, {line[0]}:{line[1]})"
    key = ("barrier", data._storage.info.number, partners(core))

    def joined(_: object) -> None:
        scope = [data._storage]
        if core.policy.barrier_scope == "all":
            others = [*core.memory.shared.shared.values(), *core.memory.shared.inputs]
            if any(o is not data._storage and o.history is not None and o.history.marks is not None for o in others):
                actual = f"core_barrier: is taken to order every tensor in shared HBM; the manual says {data.name} only"
                core.warn("barrier scope", actual, Relaxed)
            scope += others
        for storage in scope:
            races.clear(storage)

    core.meeting.arrive(core.number, Wait(key, partners(core), text, None), joined)
    data._storage.info.touch(core.clock)
    work = {"elements": 1, "inputs": 0, "scalar_operands": 0, "function": "core_barrier",
            "meets": ("barrier", data._storage.info.number)}  # fmt: skip
    call.card = Card("core_barrier", ("gpsimd",), _BARRIER.operands, work=lambda _: work)
    return record(call)
