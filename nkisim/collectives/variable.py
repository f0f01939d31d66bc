"""Collectives whose chunks have run-time lengths; see the manual for the metadata rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nkisim.collectives.exchange import ReplicaGroup, deliver, done, meet, only_hbm, ring_of, start
from nkisim.core import access
from nkisim.dtypes import Array
from nkisim.errors import ShapeMismatch, WrongArgument
from nkisim.isa.instruction import NkiInstruction
from nkisim.isa.statement import Call
from nkisim.memory.tensor import NkiTensor


def _variable(op: str, call: Call, group: ReplicaGroup, metadata: NkiTensor, flags: tuple[bool, bool]) -> Any:
    """Read a metadata tensor; return (ring, rows, whether it is on chip)."""
    ring = ring_of(call.core, op, group)
    rows = 4 if flags[1] else 3
    if metadata.__class__ is not NkiTensor or metadata.dtype != "uint32":
        call.refuse(WrongArgument, "metadata_tensor", f"is {metadata!r:.60}", "a uint32 tensor")
    if metadata.size != rows * len(ring):
        found = f"has shape {metadata.shape}"
        call.refuse(ShapeMismatch, "metadata_tensor", found, f"({rows}, {len(ring)}) is needed")
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
            found = f"has {room} elements left for {len(chunk)} of rank {ring[i]}"
            call.refuse(ShapeMismatch, "dsts", found, "make the destination larger")
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
        found = f"has {src.size} elements"
        call.refuse(ShapeMismatch, "srcs", found, f"{count} from {start} are sent")
    if count == 0:
        return np.empty((0,), src._numpy().dtype)
    part = src.reshape((src.size,))[start : start + count]
    return access.read(call.core, part, call.who("srcs")).copy()


def all_gather_v(
    srcs: Sequence[NkiTensor],
    dsts: Sequence[NkiTensor],
    replica_group: ReplicaGroup,
    metadata_tensor: NkiTensor,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: int | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Gather one chunk of run-time length per rank; see the manual for the metadata rows."""
    call = start("all_gather_v", srcs, dsts, priority, one=True)
    only_hbm(call)
    ring, flat, view = _variable("all_gather_v", call, replica_group, metadata_tensor, (recv_counts_known, has_rdispls))
    mine = _chunk(call, int(flat[0, 0]), int(flat[1, 0]))
    got = meet(call, ring, mine)
    how = (flat, view, recv_counts_known, has_rdispls)
    _receive(call, ring, [got[r] for r in ring], how)
    return done(call, name)


def all_to_all_v(
    srcs: Sequence[NkiTensor],
    dsts: Sequence[NkiTensor],
    replica_group: ReplicaGroup,
    metadata_tensor: NkiTensor,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: int | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Send chunks of run-time length to every rank; see the manual for the metadata rows."""
    call = start("all_to_all_v", srcs, dsts, priority, one=True)
    only_hbm(call)
    ring, flat, view = _variable("all_to_all_v", call, replica_group, metadata_tensor, (recv_counts_known, has_rdispls))
    mine = [_chunk(call, int(flat[0, i]), int(flat[1, i])) for i in range(len(ring))]
    got = meet(call, ring, mine)
    me = ring.index(call.core.rank)
    how = (flat, view, recv_counts_known, has_rdispls)
    _receive(call, ring, [got[r][me] for r in ring], how)
    return done(call, name)
