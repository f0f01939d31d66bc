"""Sending from rank to rank: explicit pairs, rings, and who one is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nkisim.collectives.exchange import ReplicaGroup, done, meet, only_hbm, put, reducer, ring_of, start, take
from nkisim.core import access
from nkisim.core.context import current, register
from nkisim.dtypes import to_fp32
from nkisim.errors import WrongArgument
from nkisim.isa.instruction import NkiInstruction
from nkisim.isa.statement import Call
from nkisim.isa.tokens import Token
from nkisim.memory.tensor import NkiTensor
from nkisim.objects import VirtualRegister

__all__ = [
    "collective_permute", "collective_permute_implicit", "collective_permute_implicit_current_processing_rank_id",
    "collective_permute_implicit_reduce", "rank_id",
]  # fmt: skip


def collective_permute(
    srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], source_target_pairs: Sequence[tuple[int, int]],
    priority: int | None = None, name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Send between ranks by explicit (source, target) pairs."""
    call = start("collective_permute", srcs, dsts, priority, one=True)
    only_hbm(call)
    core = call.core
    pairs = [(int(a), int(b)) for a, b in source_target_pairs]
    if len({b for _, b in pairs}) != len(pairs):
        call.refuse(WrongArgument, "source_target_pairs", f"are {pairs}", "a target receives once")
    ranks = sorted({r for pair in pairs for r in pair})
    if core.rank in ranks:
        got = meet(call, ranks, take(call, "srcs[0]"))
        for source, target in pairs:
            if target == core.rank:
                put(call, "dsts[0]", got[source])
    return done(call, name)


def _channels(op: str, ids: Any, *lists: Any) -> list[list[Any]]:
    if list(ids) != list(range(len(ids))) or any(len(item) != len(ids) for item in lists):
        raise WrongArgument(op, "channel_ids", f"are {list(ids)}", "consecutive from 0, one tensor list each")
    return [list(item) for item in lists]


def collective_permute_implicit(
    srcs_by_channel: Sequence[Sequence[NkiTensor]], dsts_by_channel: Sequence[Sequence[NkiTensor]],
    replica_group: ReplicaGroup, channel_ids: Sequence[int] = [0], priority: int | None = None, name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Send to the next rank of the ring and receive from the one before."""
    op = "collective_permute_implicit"
    sources, targets = _channels(op, channel_ids, srcs_by_channel, dsts_by_channel)
    last: NkiInstruction | None = None
    for channel in range(len(sources)):
        call = start(op, sources[channel], targets[channel], priority, one=True)
        only_hbm(call)
        last = _shift(call, replica_group, take(call, "srcs[0]"), name)
    assert last is not None
    return last


def _shift(call: Call, group: ReplicaGroup, payload: Any, name: str | None) -> NkiInstruction:
    ring = ring_of(call.core, call.card.op, group)
    got = meet(call, ring, payload)
    put(call, "dsts[0]", got[ring[ring.index(call.core.rank) - 1]])
    return done(call, name)


def collective_permute_implicit_reduce(
    srcs0_by_channel: Sequence[Sequence[NkiTensor]], srcs1_by_channel: Sequence[Sequence[NkiTensor]],
    dsts_by_channel: Sequence[Sequence[NkiTensor]], replica_group: ReplicaGroup, op: Token,
    channel_ids: Sequence[int] = [0], priority: int | None = None, name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Reduce two local tensors, send the result on, receive the one of the rank before."""
    title = "collective_permute_implicit_reduce"
    fn = reducer(op, title)
    lists = _channels(title, channel_ids, srcs0_by_channel, srcs1_by_channel, dsts_by_channel)
    last: NkiInstruction | None = None
    for first, second, target in zip(*lists, strict=False):
        call = start(title, first, target, priority, one=True)
        only_hbm(call)
        call.tensors["srcs1[0]"] = second[0]
        other = access.read(call.core, second[0], call.who("srcs1"))
        payload = fn(to_fp32(take(call, "srcs[0]")), to_fp32(other))
        last = _shift(call, replica_group, payload, name)
    assert last is not None
    return last


def collective_permute_implicit_current_processing_rank_id(
    iteration_id: int, replica_group: ReplicaGroup, channel_id: int = 0, name: str | None = None
) -> VirtualRegister:
    """Return the rank whose data is processed in a step of the ring."""
    op = "collective_permute_implicit_current_processing_rank_id"
    core = current(op)
    ring = ring_of(core, op, replica_group)
    return register(core, ring[(ring.index(core.rank) - int(iteration_id)) % len(ring)])


def rank_id(name: str | None = None) -> VirtualRegister:
    """Return this rank's number in a register."""
    core = current("rank_id")
    return register(core, core.rank)
