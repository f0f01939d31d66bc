"""Collectives over whole tensors: reduce, gather, scatter, exchange."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nkisim.collectives.exchange import (
    ReplicaGroup,
    check_dim,
    done,
    fold,
    meet,
    one_hbm,
    only_hbm,
    pairs,
    put,
    reducer,
    ring_of,
    start,
    take,
)
from nkisim.dtypes import Array
from nkisim.errors import ShapeMismatch
from nkisim.isa.instruction import NkiInstruction
from nkisim.isa.statement import Call
from nkisim.isa.tokens import Token
from nkisim.memory.tensor import NkiTensor


def all_reduce(
    srcs: Sequence[NkiTensor],
    dsts: Sequence[NkiTensor],
    replica_group: ReplicaGroup,
    op: Token,
    priority: int | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Reduce tensors over the group; everybody gets the result. Ranks add in list order."""
    call, fn = start("all_reduce", srcs, dsts, priority), reducer(op, "all_reduce")
    one_hbm(call)
    ring = ring_of(call.core, "all_reduce", replica_group)
    got = meet(call, ring, [take(call, s) for s, _ in pairs(call)])
    for i, (_, dst) in enumerate(pairs(call)):
        put(call, dst, fold([got[r][i] for r in ring], fn))
    return done(call, name)


def all_gather(
    srcs: Sequence[NkiTensor],
    dsts: Sequence[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Concatenate the group's tensors along a dimension."""
    call = start("all_gather", srcs, dsts, priority)
    check_dim(call, collective_dim, also=True)
    one_hbm(call)
    ring = ring_of(call.core, "all_gather", replica_group)
    got = meet(call, ring, [take(call, s) for s, _ in pairs(call)])
    for i, (_, dst) in enumerate(pairs(call)):
        put(call, dst, np.concatenate([got[r][i] for r in ring], axis=collective_dim))
    return done(call, name)


def reduce_scatter(
    srcs: Sequence[NkiTensor],
    dsts: Sequence[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    op: Token,
    priority: int | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Reduce tensors over the group; each rank gets its slice of dimension 0."""
    call, fn = start("reduce_scatter", srcs, dsts, priority), reducer(op, "reduce_scatter")
    check_dim(call, collective_dim)
    ring = ring_of(call.core, "reduce_scatter", replica_group)
    got = meet(call, ring, [take(call, s) for s, _ in pairs(call)])
    for i, (src, dst) in enumerate(pairs(call)):
        parts = _split(call, src, fold([got[r][i] for r in ring], fn), len(ring))
        put(call, dst, parts[ring.index(call.core.rank)])
    return done(call, name)


def _split(call: Call, operand: str, values: Array, count: int) -> list[Array]:
    if values.shape[0] % count:
        found = f"has shape {values.shape}"
        call.refuse(ShapeMismatch, operand, found, f"dimension 0 divides into {count} ranks")
    return np.split(values, count, axis=0)


def all_to_all(
    srcs: Sequence[NkiTensor],
    dsts: Sequence[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Send the i-th slice of dimension 0 to the i-th rank of the group."""
    call = start("all_to_all", srcs, dsts, priority)
    check_dim(call, collective_dim)
    only_hbm(call)
    ring = ring_of(call.core, "all_to_all", replica_group)
    got = meet(call, ring, [take(call, s) for s, _ in pairs(call)])
    mine = ring.index(call.core.rank)
    for i, (src, dst) in enumerate(pairs(call)):
        parts = [_split(call, src, got[r][i], len(ring))[mine] for r in ring]
        put(call, dst, np.concatenate(parts, axis=0))
    return done(call, name)
