"""The steps of every collective: find its ring of ranks, meet them, check, read and write tensors."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from nkisim.core import access, races
from nkisim.core.context import Core, current, running, since
from nkisim.core.cores import Wait
from nkisim.dtypes import ANY, INFO, Array, to_fp32
from nkisim.errors import BadLaunch, NeedsNewerCore, ShapeMismatch, WrongArgument
from nkisim.isa.card import record
from nkisim.isa.instruction import NkiInstruction
from nkisim.isa.operators import Fn
from nkisim.isa.statement import DMA, Call, Card, Operand
from nkisim.isa.tokens import Token, resolve
from nkisim.lines import kernel_line
from nkisim.memory.tensor import NkiTensor
from nkisim.objects import NKIObject


class rg_partition_op(Enum):
    """How the number of a rank gives the number of its list."""

    bitwise_and = "bitwise_and"
    div = "div"
    mod = "mod"


_LISTS: dict[rg_partition_op, Callable[[int, int], int]] = {
    rg_partition_op.bitwise_and: operator.and_,
    rg_partition_op.div: operator.floordiv,
    rg_partition_op.mod: operator.mod,
}


class ReplicaGroup(NKIObject):
    """Lists of ranks; a collective runs inside each list independently."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.groups = [list(g) for g in groups]

    @staticmethod
    def from_partition_op(world_size: int, op: rg_partition_op, operand: int) -> ReplicaGroup:
        """Put the ranks below world_size with equal op(rank, operand) into one list; lists and ranks ascend."""
        title = "ReplicaGroup.from_partition_op"
        if running() is not None:
            since(title, "list the ranks")
        if op not in _LISTS:
            raise WrongArgument(title, "op", f"is {op!r:.60}", "a member of rg_partition_op is needed")
        minimum = 0 if op is rg_partition_op.bitwise_and else 1
        if world_size < 1 or operand < minimum:
            actual = f"are {world_size} and {operand}"
            raise WrongArgument(title, "world_size and operand", actual, f"1 and {minimum} are the least")
        lists: dict[int, list[int]] = {}
        for rank in range(world_size):
            lists.setdefault(_LISTS[op](rank, operand), []).append(rank)
        return ReplicaGroup([lists[key] for key in sorted(lists)])


def ring_of(core: Core, op: str, group: ReplicaGroup) -> list[int]:
    """Return the list of ranks that this core's rank belongs to."""
    if not isinstance(group, ReplicaGroup):
        raise WrongArgument(op, "replica_group", f"is {group!r:.60}", "a ReplicaGroup is needed")
    ranks, world = [r for g in group.groups for r in g], core.policy.ranks or core.meeting.members // core.programs
    if len(set(ranks)) != len(ranks) or any(not 0 <= r < world for r in ranks):
        allowed = f"each of the {world} ranks appears at most once"
        raise WrongArgument(op, "replica_group", f"is {group.groups}", allowed)
    for ring in group.groups:
        if core.rank in ring:
            return ring
    raise BadLaunch(op, None, f"ran on rank {core.rank}, which is in no group", "add the rank")


def meet(call: Call, ring: Sequence[int], payload: Any) -> dict[int, Any]:
    """Exchange a payload with every rank of the ring; return the payloads by rank.

    Both cores of a rank issue a collective, which is one operation: it orders their accesses to its tensors, as
    a core_barrier does. Tensors that are on chip or private are exchanged with the cores of the same number.
    A rank that represents others (`Policy.ranks`) meets only itself, and they bring what it brings.
    """
    line = kernel_line()
    text = f"{call.card.op} at {line[0]}:{line[1]}"
    core, count = call.core, call.core.programs
    call.args["cores"] = len(ring) * count
    present = [core.rank] if core.policy.ranks else ring
    members = tuple(rank * count + program for rank in present for program in range(count))
    wait = Wait((call.card.op, members), members, text, (payload, [t._storage for t in call.tensors.values()]))
    answer = core.meeting.arrive(core.number, wait, _ordered)
    there = {rank: answer[rank * count + core.program][0] for rank in present}
    return {rank: there.get(rank, payload) for rank in ring}


def _ordered(payloads: dict[int, Any]) -> None:
    for _, storages in payloads.values():
        for storage in storages:
            races.clear(storage)


def start(
    op: str, srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor], priority: int | None, one: bool = False
) -> Call:
    """Check the tensor lists of a collective and return its call."""
    if priority is not None and current(op).geometry.generation < 4:
        raise NeedsNewerCore(f"{op} with priority")
    srcs, dsts = list(srcs), list(dsts)
    names = [f"dsts[{i}]" for i in range(len(dsts))] + [f"srcs[{i}]" for i in range(len(srcs))]
    operands = tuple(Operand(n, "out" if n.startswith("d") else "in", spaces=DMA, dtypes=ANY) for n in names)
    work: dict[str, object] = {"bytes": 0, "rows": 1, "row_bytes": 0, "dge": "none", "transpose": False,
                               "issuer": "gpsimd", "collective": op}  # fmt: skip
    card = Card(op, ("dma",), operands, work=lambda call: work | {"cores": call.args["cores"]})
    call = Call(current(op), card, {"cores": 1}, "dma")
    spaces = set()
    for name, tensor in zip(names, dsts + srcs, strict=False):
        if tensor.__class__ is not NkiTensor or tensor._dynamic is not None:
            call.refuse(WrongArgument, name, f"is {tensor!r:.60}", "a static tensor is needed")
        call.tensors[name] = tensor
        spaces.add(tensor.buffer.value == "sbuf")
        work["bytes"] += tensor.size * INFO[tensor.dtype].itemsize  # type: ignore[operator]
        if tensor.buffer.value == "psum":
            call.refuse(WrongArgument, name, "is in psum", "collectives take HBM or SBUF")
    work["row_bytes"] = work["bytes"]
    if len(spaces) > 1:
        call.refuse(WrongArgument, "srcs and dsts", "mix HBM and SBUF", "use one memory")
    if len(srcs) != len(dsts) or not srcs or ((one or True in spaces) and len(srcs) != 1):
        actual = f"have {len(srcs)} and {len(dsts)} tensors"
        call.refuse(WrongArgument, "srcs and dsts", actual, "equal counts; one each outside HBM")
    return call


def one_hbm(call: Call) -> None:
    """Refuse what the pages of 0.7 refuse of HBM: both kinds in one list, and on one core shared HBM.

    A kernel's arguments are in either, as the launch needs them.
    """
    core = call.core
    if not core.policy.traced:
        return
    given = {id(storage) for storage in core.memory.shared.inputs}
    for side in ("srcs", "dsts"):
        result = {t.buffer.value for n, t in call.tensors.items() if n.startswith(side) and id(t._storage) not in given}
        if len(result) > 1:
            call.refuse(WrongArgument, side, "are in private_hbm and in shared_hbm", "one kind of HBM is needed")
        allowed = side == "dsts" and os.environ.get("NKI_LNC1_SHARED_HBM") == "1"
        if core.programs == 1 and "shared_hbm" in result and not allowed:
            way = "use private_hbm, or NKI_LNC1_SHARED_HBM=1 for dsts"
            call.refuse(WrongArgument, side, "are in shared_hbm on one core", way)


def pairs(call: Call) -> list[tuple[str, str]]:
    """Return the names of each source with its destination."""
    return [(f"srcs[{i}]", f"dsts[{i}]") for i in range(len(call.tensors) // 2)]


def gathered(call: Call, group: ReplicaGroup) -> tuple[list[int], list[tuple[str, str, list[Array]]]]:
    """Exchange all sources; return the ring and, per pair, (source, destination, every rank's array in its order)."""
    ring, names = ring_of(call.core, call.card.op, group), pairs(call)
    got = meet(call, ring, [take(call, src) for src, _ in names])
    return ring, [(src, dst, [got[rank][i] for rank in ring]) for i, (src, dst) in enumerate(names)]


def take(call: Call, operand: str) -> Array:
    """Read a tensor; the other ranks receive the copy."""
    return access.read(call.core, call.tensors[operand], call.who(operand)).copy()


def put(call: Call, operand: str, values: Array) -> None:
    """Write the tensor that arrived; equal dtypes bit for bit, others through fp32."""
    tensor = call.tensors[operand]
    if values.size != tensor.size:
        call.refuse(ShapeMismatch, operand, f"has shape {tensor.shape}", f"{values.shape} arrives")
    same = values.dtype == tensor._numpy().dtype
    deliver(call, tensor, values if same else to_fp32(values), operand)


def deliver(call: Call, tensor: NkiTensor, values: Array, operand: str) -> None:
    """Write a collective's result; the two cores of a rank bring the same."""
    access.write(call.core, tensor, values, call.who(operand), together=True)


def reducer(op: Token, name: str) -> Fn:
    """Return the function of a reduction operator."""
    result = resolve(op, (name, "op"))
    if result.name not in ("add", "minimum", "maximum"):
        raise WrongArgument(name, "op", f"is nl.{result.name}", "nl.add, nl.minimum and nl.maximum are supported")
    return result.fn


def check_dim(call: Call, dim: int, also: bool = False) -> None:
    """Check collective_dim: 0, in SBUF also 1 where the collective allows it."""
    sbuf = call.tensors["srcs[0]"].buffer.value == "sbuf"
    if dim != 0 and not (also and sbuf and dim == 1):
        call.refuse(WrongArgument, "collective_dim", f"is {dim}", "0 is supported (0 or 1 in SBUF)")


def fold(parts: list[Array], fn: Fn) -> Array:
    """Reduce the ranks' parts in fp32, in the order of the ring."""
    total = to_fp32(parts[0])
    for part in parts[1:]:
        total = fn(total, to_fp32(part))
    return total


def done(call: Call, name: str | None) -> NkiInstruction:
    """Record the collective under its label."""
    call.args["name"] = name
    return record(call)


def only_hbm(call: Call) -> None:
    """Refuse tensors in SBUF."""
    if call.tensors["srcs[0]"].buffer.value == "sbuf":
        call.refuse(WrongArgument, "srcs", "are in SBUF", f"{call.card.op} takes HBM")
