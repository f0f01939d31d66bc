"""Collectives over full tensors: reduce, gather, scatter, exchange."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nkisim.collectives import exchange
from nkisim.collectives.exchange import ReplicaGroup, check_dim, done, fold, gathered, put, reducer, start
from nkisim.dtypes import Array
from nkisim.errors import ShapeMismatch
from nkisim.isa.instruction import NkiInstruction
from nkisim.isa.statement import Call
from nkisim.isa.tokens import Token
from nkisim.memory.tensor import NkiTensor

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]


def all_reduce(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, op: Token,
    priority: int | None = None, name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Reduce tensors over the group; every rank receives the result. Ranks add in list order."""
    call, fn = start("all_reduce", srcs, dsts, priority), reducer(op, "all_reduce")
    exchange.one_hbm(call)
    for _, dst, parts in gathered(call, replica_group)[1]:
        put(call, dst, fold(parts, fn))
    return done(call, name)


def all_gather(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, collective_dim: int,
    priority: int | None = None, name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Concatenate the group's tensors along a dimension."""
    call = start("all_gather", srcs, dsts, priority)
    check_dim(call, collective_dim, also=True)
    exchange.one_hbm(call)
    for _, dst, parts in gathered(call, replica_group)[1]:
        put(call, dst, np.concatenate(parts, axis=collective_dim))
    return done(call, name)


def reduce_scatter(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, collective_dim: int, op: Token,
    priority: int | None = None, name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Reduce tensors over the group; each rank gets its slice of dimension 0."""
    call, fn = start("reduce_scatter", srcs, dsts, priority), reducer(op, "reduce_scatter")
    check_dim(call, collective_dim)
    ring, exchanged = gathered(call, replica_group)
    for src, dst, parts in exchanged:
        put(call, dst, _split(call, src, fold(parts, fn), len(ring))[ring.index(call.core.rank)])
    return done(call, name)


def _split(call: Call, operand: str, values: Array, count: int) -> list[Array]:
    if values.shape[0] % count:
        call.refuse(ShapeMismatch, operand, f"has shape {values.shape}", f"dimension 0 divides into {count} ranks")
    return np.split(values, count, axis=0)


def all_to_all(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], replica_group: ReplicaGroup, collective_dim: int,
    priority: int | None = None, name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Send the i-th slice of dimension 0 to the i-th rank of the group."""
    call = start("all_to_all", srcs, dsts, priority)
    check_dim(call, collective_dim)
    exchange.only_hbm(call)
    ring, exchanged = gathered(call, replica_group)
    for src, dst, parts in exchanged:
        received = [_split(call, src, part, len(ring))[ring.index(call.core.rank)] for part in parts]
        put(call, dst, np.concatenate(received, axis=0))
    return done(call, name)
