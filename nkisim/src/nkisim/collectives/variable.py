"""Collectives whose chunks have run-time lengths; see the manual for the metadata rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nkisim.collectives.exchange import ReplicaGroup, deliver, done, meet, only_hbm, ring_of, start
from nkisim.core import access
from nkisim.core.context import current, since
from nkisim.dtypes import ANY, Array
from nkisim.errors import LoopMisuse, NkiSimWarning, ShapeMismatch, WrongArgument
from nkisim.isa import ambiguities
from nkisim.isa.card import record
from nkisim.isa.instruction import NkiInstruction
from nkisim.isa.statement import DMA, Call, Card, Operand
from nkisim.memory.tensor import NkiTensor

__all__ = [
    "all_gather_v", "all_gather_v_prepare", "all_gather_v_trigger",
    "all_to_all_v", "all_to_all_v_prepare", "all_to_all_v_trigger",
]  # fmt: skip


def _variable(op: str, call: Call, group: ReplicaGroup, metadata: NkiTensor, flags: tuple[bool, bool]) -> Any:
    """Read a metadata tensor; return (ring, rows, whether it is on chip)."""
    ring = ring_of(call.core, op, group)
    rows = 4 if flags[1] else 3
    if metadata.__class__ is not NkiTensor or metadata.dtype != "uint32":
        call.refuse(WrongArgument, "metadata_tensor", f"is {metadata!r:.60}", "a uint32 tensor")
    if metadata.size != rows * len(ring):
        call.refuse(ShapeMismatch, "metadata_tensor", f"has shape {metadata.shape}", f"({rows}, {len(ring)}) is needed")
    # row 2 is an output, so the rows that are inputs are checked one by one
    used = (0, 1, 3) if flags[1] else (0, 1)
    flat = metadata._numpy().reshape(rows, len(ring)).astype(np.int64)
    view = metadata if metadata.ndim == 2 else metadata.reshape((1, rows * len(ring)))
    for row in used:
        part = view[row] if metadata.ndim == 2 else view[:, row * len(ring) : (row + 1) * len(ring)]
        access.read(call.core, part, call.who("metadata_tensor"))
    return ring, flat, view


def _receive(call: Call, ring: list[int], chunks: list[Array], how: tuple[Any, ...]) -> None:
    """Place one chunk per source rank into dst, and the counts into row 2."""
    flat, view, known, placed = how
    dst = call.tensors["dsts[0]"]
    slot = dst.size // len(ring)
    target = dst.reshape((dst.size,))
    for i, chunk in enumerate(chunks):
        at = int(flat[3, i]) if placed else slot * i
        room = dst.size - at if placed else slot
        if len(chunk) > room:
            actual = f"has {room} elements left for {len(chunk)} of rank {ring[i]}"
            call.refuse(ShapeMismatch, "dsts", actual, "make the destination larger")
        if len(chunk):
            deliver(call, target[at : at + len(chunk)], chunk, "dsts")
    if not known:
        counts = np.array([len(c) for c in chunks], np.uint32)
        n = len(ring)
        row = view[2] if view.shape[0] != 1 else view[:, 2 * n : 3 * n]
        deliver(call, row, counts, "metadata_tensor")


def _chunk(call: Call, count: int, start: int) -> Array:
    src = call.tensors["srcs[0]"]
    if start + count > src.size:
        call.refuse(ShapeMismatch, "srcs", f"has {src.size} elements", f"{count} from {start} are sent")
    if count == 0:
        return np.empty((0,), src._numpy().dtype)
    part = src.reshape((src.size,))[start : start + count]
    return access.read(call.core, part, call.who("srcs")).copy()


@dataclass(eq=False)
class _Prepared:
    """A collective whose metadata was read and whose data waits for the trigger."""

    instruction: NkiInstruction
    op: str
    tensors: tuple[Sequence[NkiTensor], Sequence[NkiTensor]]
    # ring, rows of metadata, its view, recv_counts_known, has_rdispls
    how: tuple[Any, ...]


def _exchange(call: Call, how: tuple[Any, ...], name: str | None) -> NkiInstruction:
    """Send one chunk to everybody, or one to each rank; place those that arrive."""
    ring, flat = how[:2]
    gathers = call.card.op == "all_gather_v"
    mine = [_chunk(call, int(flat[0, i]), int(flat[1, i])) for i in range(1 if gathers else len(ring))]
    got = meet(call, ring, mine)
    at = 0 if gathers else ring.index(call.core.rank)
    _receive(call, ring, [got[r][at] for r in ring], how[1:])
    return done(call, name)


def _prepare(op: str, how: tuple[Any, ...], tensors: tuple[Any, Any], name: str | None) -> NkiInstruction:
    """Take the one slot for a collective whose metadata, how[2], was read."""
    title, core = f"{op}_prepare", current(op)
    if core.prepared is not None:
        actual = f"follows {core.prepared.op}_prepare without its trigger"
        raise LoopMisuse(title, None, actual, f"call {core.prepared.op}_trigger first, prepares share one slot")
    operand = Operand("metadata_tensor", "in", spaces=DMA, dtypes=ANY)
    work = {"elements": 1, "inputs": 0, "scalar_operands": 0, "function": "register"}
    card = Card(title, ("sync",), (operand,), work=lambda _: work)
    call = Call(core, card, {"name": name}, "sync", {"metadata_tensor": how[2]})
    if core.recording:
        ambiguities.warn_ambiguous(call, "the trigger has the time of a collective", "how much the metadata takes")
    instruction = record(call)
    core.prepared = _Prepared(instruction, op, tensors, how)
    return instruction


def _collective(op: str, text: str, prepares: bool = False) -> Callable[..., NkiInstruction]:
    """Return the function of a collective, or of its first half."""

    def collective(
        srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, metadata_tensor: NkiTensor,
        recv_counts_known: bool = False, has_rdispls: bool = False, priority: int | None = None,
        name: str | None = None,
    ) -> NkiInstruction:  # fmt: skip
        if prepares:
            since(f"{op}_prepare", f"use {op}")
        call, flags = start(op, srcs, dsts, priority, one=True), (recv_counts_known, has_rdispls)
        only_hbm(call)
        if call.core.policy.traced and has_rdispls and op == "all_to_all_v":
            actual = f"{op}: has_rdispls works between nodes only (0.7); each rank here represents a node"
            call.core.warn(f"{op} has_rdispls", actual, NkiSimWarning)
        how = (*_variable(op, call, replica_group, metadata_tensor, flags), *flags)
        return _prepare(op, how, (srcs, dsts), name) if prepares else _exchange(call, how, name)

    collective.__name__ = collective.__qualname__ = f"{op}_prepare" if prepares else op
    collective.__doc__ = f"{text}; see the manual for the metadata rows."
    return collective


def _trigger(op: str, text: str) -> Callable[..., NkiInstruction]:
    """Return the function of a split collective's second half."""

    def trigger(prepare_instr: NkiInstruction, name: str | None = None) -> NkiInstruction:
        core = since(f"{op}_trigger", f"use {op}")
        waiting = core.prepared
        if waiting is None or waiting.instruction is not prepare_instr or waiting.op != op:
            actual = "is no prepare that waits" if waiting is None else f"is not the {waiting.op}_prepare that waits"
            raise LoopMisuse(f"{op}_trigger", "prepare_instr", actual, f"pass what {op}_prepare returned, once")
        core.prepared, (srcs, dsts) = None, waiting.tensors
        return _exchange(start(op, srcs, dsts, None, one=True), waiting.how, name)

    trigger.__name__ = trigger.__qualname__ = f"{op}_trigger"
    trigger.__doc__ = text
    return trigger


all_gather_v = _collective("all_gather_v", "Gather one chunk of run-time length per rank")
all_to_all_v = _collective("all_to_all_v", "Send chunks of run-time length to every rank")
all_gather_v_prepare = _collective("all_gather_v", "Read the metadata; srcs may be filled until the trigger", True)
all_to_all_v_prepare = _collective("all_to_all_v", "Read the metadata; srcs may be filled until the trigger", True)
all_gather_v_trigger = _trigger("all_gather_v", "Complete a split all_gather_v: read srcs and write dsts.")
all_to_all_v_trigger = _trigger("all_to_all_v", "Complete a split all_to_all_v: read srcs and write dsts.")
