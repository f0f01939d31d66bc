"""nki.collectives over simulated ranks in one process; see nkisim.ranks for launching them."""


from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nkisim import access
from nkisim.card import DMA, Call, Card, Operand, record
from nkisim.context import Core, current, kernel_line
from nkisim.cores import Wait
from nkisim.dtypes import INFO, to_fp32
from nkisim.errors import BadLaunch, NeedsNewerCore, NotSimulated, ShapeMismatch, WrongArgument
from nkisim.instruction import NkiInstruction
from nkisim.isa.copies import ANY
from nkisim.objects import NKIObject, VirtualRegister
from nkisim.tensor import NkiTensor
from nkisim.tokens import resolve


class ReplicaGroup(NKIObject):
    """Lists of ranks; a collective runs inside each list independently."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.groups = [list(g) for g in groups]


def _ring(core: Core, op: str, group: Any) -> list[int]:
    """Return the list of ranks that this core's rank belongs to."""
    if not isinstance(group, ReplicaGroup):
        found = f"is {group!r:.60}"
        raise WrongArgument(op, "replica_group", found, "a ReplicaGroup is needed")
    if core.programs != 1:
        raise NotSimulated(op, "lnc=2", "ranks of one core each are simulated")
    ranks = [r for g in group.groups for r in g]
    if len(set(ranks)) != len(ranks) or any(not 0 <= r < core.meeting.members for r in ranks):
        found = f"is {group.groups}"
        allowed = f"each of the {core.meeting.members} ranks appears at most once"
        raise WrongArgument(op, "replica_group", found, allowed)
    for ring in group.groups:
        if core.rank in ring:
            return ring
    raise BadLaunch(op, None, f"ran on rank {core.rank}, which is in no group", "add the rank")


def _meet(core: Core, op: str, ring: Sequence[int], payload: Any) -> dict[int, Any]:
    line = kernel_line()
    text = f"{op} at {line[0]}:{line[1]}"
    wait = Wait((op, tuple(ring)), tuple(ring), text, payload)
    return core.meeting.meet(core.number, wait)


def _start(op: str, srcs: Any, dsts: Any, priority: Any, one: bool = False) -> Call:
    """Check the tensor lists of a collective and return its call."""
    if priority is not None:
        raise NeedsNewerCore(f"{op} with priority")
    srcs, dsts = list(srcs), list(dsts)
    names = [f"dsts[{i}]" for i in range(len(dsts))] + [f"srcs[{i}]" for i in range(len(srcs))]
    operands = tuple(
        Operand(n, "out" if n.startswith("d") else "in", spaces=DMA, dtypes=ANY) for n in names
    )
    work = {"bytes": 0, "rows": 1, "row_bytes": 0, "dge": "none", "transpose": False,
            "issuer": "gpsimd", "collective": op}  # fmt: skip
    call = Call(current(op), Card(op, ("dma",), operands, _body, work=lambda _: work), {}, "dma")
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
        found = f"have {len(srcs)} and {len(dsts)} tensors"
        call.refuse(WrongArgument, "srcs and dsts", found, "equal counts; one each outside HBM")
    return call


def _body(**_: Any) -> None:
    """Ranks exchange data; there is no arithmetic body."""


def _pairs(call: Call) -> list[tuple[str, str]]:
    count = len(call.tensors) // 2
    return [(f"srcs[{i}]", f"dsts[{i}]") for i in range(count)]


def _read(call: Call, operand: str) -> Any:
    return access.read(call.core, call.tensors[operand], call.who(operand)).copy()


def _write(call: Call, operand: str, values: Any) -> None:
    tensor = call.tensors[operand]
    if values.size != tensor.size:
        found = f"has shape {tensor.shape}"
        call.refuse(ShapeMismatch, operand, found, f"{values.shape} arrives")
    same = values.dtype == tensor._numpy().dtype
    access.write(call.core, tensor, values if same else to_fp32(values), call.who(operand))


def _reducer(op: Any, name: str) -> Callable[[Any, Any], Any]:
    found = resolve(op, (name, "op"))
    if found.name not in ("add", "minimum", "maximum"):
        allowed = "nl.add, nl.minimum and nl.maximum are supported"
        raise WrongArgument(name, "op", f"is nl.{found.name}", allowed)
    return found.fn


def _dim(call: Call, dim: int, also: bool = False) -> None:
    sbuf = call.tensors["srcs[0]"].buffer.value == "sbuf"
    if dim != 0 and not (also and sbuf and dim == 1):
        call.refuse(WrongArgument, "collective_dim", f"is {dim}", "0 is supported (0 or 1 in SBUF)")


def _fold(parts: list[Any], fn: Callable[[Any, Any], Any]) -> Any:
    total = to_fp32(parts[0])
    for part in parts[1:]:
        total = fn(total, to_fp32(part))
    return total


def all_reduce(
    srcs: Any, dsts: Any, replica_group: Any, op: Any, priority: int | None = None,
    name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Reduce tensors over the group; everybody gets the result. Ranks add in list order."""
    call, fn = _start("all_reduce", srcs, dsts, priority), _reducer(op, "all_reduce")
    ring = _ring(call.core, "all_reduce", replica_group)
    got = _meet(call.core, "all_reduce", ring, [_read(call, s) for s, _ in _pairs(call)])
    for i, (_, dst) in enumerate(_pairs(call)):
        _write(call, dst, _fold([got[r][i] for r in ring], fn))
    return _done(call, name)


def _done(call: Call, name: str | None) -> NkiInstruction:
    call.args["name"] = name
    return record(call)


def all_gather(
    srcs: Any, dsts: Any, replica_group: Any, collective_dim: int, priority: int | None = None,
    name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Concatenate the group's tensors along a dimension."""
    call = _start("all_gather", srcs, dsts, priority)
    _dim(call, collective_dim, also=True)
    ring = _ring(call.core, "all_gather", replica_group)
    got = _meet(call.core, "all_gather", ring, [_read(call, s) for s, _ in _pairs(call)])
    for i, (_, dst) in enumerate(_pairs(call)):
        _write(call, dst, np.concatenate([got[r][i] for r in ring], axis=collective_dim))
    return _done(call, name)


def reduce_scatter(
    srcs: Any, dsts: Any, replica_group: Any, collective_dim: int, op: Any,
    priority: int | None = None, name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Reduce tensors over the group; each rank gets its slice of dimension 0."""
    call, fn = _start("reduce_scatter", srcs, dsts, priority), _reducer(op, "reduce_scatter")
    _dim(call, collective_dim)
    ring = _ring(call.core, "reduce_scatter", replica_group)
    got = _meet(call.core, "reduce_scatter", ring, [_read(call, s) for s, _ in _pairs(call)])
    for i, (src, dst) in enumerate(_pairs(call)):
        parts = _split(call, src, _fold([got[r][i] for r in ring], fn), len(ring))
        _write(call, dst, parts[ring.index(call.core.rank)])
    return _done(call, name)


def _split(call: Call, operand: str, values: Any, count: int) -> list[Any]:
    if values.shape[0] % count:
        found = f"has shape {values.shape}"
        call.refuse(ShapeMismatch, operand, found, f"dimension 0 divides into {count} ranks")
    return np.split(values, count, axis=0)


def all_to_all(
    srcs: Any, dsts: Any, replica_group: Any, collective_dim: int, priority: int | None = None,
    name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Send the i-th slice of dimension 0 to the i-th rank of the group."""
    call = _start("all_to_all", srcs, dsts, priority)
    _dim(call, collective_dim)
    _only_hbm(call)
    ring = _ring(call.core, "all_to_all", replica_group)
    got = _meet(call.core, "all_to_all", ring, [_read(call, s) for s, _ in _pairs(call)])
    mine = ring.index(call.core.rank)
    for i, (src, dst) in enumerate(_pairs(call)):
        parts = [_split(call, src, got[r][i], len(ring))[mine] for r in ring]
        _write(call, dst, np.concatenate(parts, axis=0))
    return _done(call, name)


def _only_hbm(call: Call) -> None:
    if call.tensors["srcs[0]"].buffer.value == "sbuf":
        call.refuse(WrongArgument, "srcs", "are in SBUF", f"{call.card.op} takes HBM")


def collective_permute(
    srcs: Any, dsts: Any, source_target_pairs: Any, priority: int | None = None,
    name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Send between ranks by explicit (source, target) pairs."""
    call = _start("collective_permute", srcs, dsts, priority, one=True)
    _only_hbm(call)
    core = call.core
    if core.programs != 1:
        raise NotSimulated("collective_permute", "lnc=2", "ranks of one core each are simulated")
    pairs = [(int(a), int(b)) for a, b in source_target_pairs]
    if len({b for _, b in pairs}) != len(pairs):
        call.refuse(WrongArgument, "source_target_pairs", f"are {pairs}", "a target receives once")
    ranks = sorted({r for pair in pairs for r in pair})
    if core.rank in ranks:
        got = _meet(core, "collective_permute", ranks, _read(call, "srcs[0]"))
        for source, target in pairs:
            if target == core.rank:
                _write(call, "dsts[0]", got[source])
    return _done(call, name)


def _channels(op: str, ids: Any, *lists: Any) -> list[list[Any]]:
    if list(ids) != list(range(len(ids))) or any(len(item) != len(ids) for item in lists):
        found = f"are {list(ids)}"
        raise WrongArgument(op, "channel_ids", found, "consecutive from 0, one tensor list each")
    return [list(item) for item in lists]


def collective_permute_implicit(
    srcs_by_channel: Any, dsts_by_channel: Any, replica_group: Any, channel_ids: Any = [0],  # noqa: B006
    priority: int | None = None, name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Send to the next rank of the ring and receive from the one before."""
    op = "collective_permute_implicit"
    sources, targets = _channels(op, channel_ids, srcs_by_channel, dsts_by_channel)
    last: NkiInstruction | None = None
    for channel in range(len(sources)):
        call = _start(op, sources[channel], targets[channel], priority, one=True)
        _only_hbm(call)
        last = _shift(call, replica_group, _read(call, "srcs[0]"), name)
    assert last is not None
    return last


def _shift(call: Call, group: Any, payload: Any, name: str | None) -> NkiInstruction:
    ring = _ring(call.core, call.card.op, group)
    got = _meet(call.core, call.card.op, ring, payload)
    _write(call, "dsts[0]", got[ring[ring.index(call.core.rank) - 1]])
    return _done(call, name)


def collective_permute_implicit_reduce(
    srcs0_by_channel: Any, srcs1_by_channel: Any, dsts_by_channel: Any, replica_group: Any,
    op: Any, channel_ids: Any = [0], priority: int | None = None, name: str | None = None,  # noqa: B006
) -> NkiInstruction:  # fmt: skip
    """Reduce two local tensors, send the result on, receive the one of the rank before."""
    title = "collective_permute_implicit_reduce"
    fn = _reducer(op, title)
    lists = _channels(title, channel_ids, srcs0_by_channel, srcs1_by_channel, dsts_by_channel)
    last: NkiInstruction | None = None
    for first, second, target in zip(*lists, strict=False):
        call = _start(title, first, target, priority, one=True)
        _only_hbm(call)
        other = access.read(call.core, second[0], call.who("srcs1"))
        payload = fn(to_fp32(_read(call, "srcs[0]")), to_fp32(other))
        last = _shift(call, replica_group, payload, name)
    assert last is not None
    return last


def collective_permute_implicit_current_processing_rank_id(
    iteration_id: int, replica_group: Any, channel_id: int = 0, name: str | None = None
) -> VirtualRegister:
    """Return the rank whose data is processed in a step of the ring."""
    op = "collective_permute_implicit_current_processing_rank_id"
    core = current(op)
    ring = _ring(core, op, replica_group)
    return VirtualRegister(ring[(ring.index(core.rank) - int(iteration_id)) % len(ring)])


def rank_id(name: str | None = None) -> VirtualRegister:
    """Return this rank's number in a register."""
    return VirtualRegister(current("rank_id").rank)


def _variable(op: str, call: Call, group: Any, metadata: Any, flags: tuple[bool, bool]) -> Any:
    """Read a metadata tensor; return (ring, rows, whether it is on chip)."""
    ring = _ring(call.core, op, group)
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


def _receive(call: Call, ring: list[int], chunks: list[Any], how: tuple[Any, ...]) -> None:
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
            access.write(call.core, target[at : at + len(chunk)], chunk, call.who("dsts"))
    if not known:
        counts = np.array([len(c) for c in chunks], np.uint32)
        n = len(ring)
        row = view[2] if view.shape[0] != 1 else view[:, 2 * n : 3 * n]
        access.write(call.core, row, counts, call.who("metadata_tensor"))


def _chunk(call: Call, count: int, start: int) -> Any:
    src = call.tensors["srcs[0]"]
    if start + count > src.size:
        found = f"has {src.size} elements"
        call.refuse(ShapeMismatch, "srcs", found, f"{count} from {start} are sent")
    if count == 0:
        return np.empty((0,), src._numpy().dtype)
    part = src.reshape((src.size,))[start : start + count]
    return access.read(call.core, part, call.who("srcs")).copy()


def all_gather_v(
    srcs: Any, dsts: Any, replica_group: Any, metadata_tensor: Any, recv_counts_known: bool = False,
    has_rdispls: bool = False, priority: int | None = None, name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Gather one chunk of run-time length per rank; see the manual for the metadata rows."""
    call = _start("all_gather_v", srcs, dsts, priority, one=True)
    _only_hbm(call)
    ring, flat, view = _variable("all_gather_v", call, replica_group, metadata_tensor,
                                 (recv_counts_known, has_rdispls))  # fmt: skip
    mine = _chunk(call, int(flat[0, 0]), int(flat[1, 0]))
    got = _meet(call.core, "all_gather_v", ring, mine)
    how = (flat, view, recv_counts_known, has_rdispls)
    _receive(call, ring, [got[r] for r in ring], how)
    return _done(call, name)


def all_to_all_v(
    srcs: Any, dsts: Any, replica_group: Any, metadata_tensor: Any, recv_counts_known: bool = False,
    has_rdispls: bool = False, priority: int | None = None, name: str | None = None,
) -> NkiInstruction:  # fmt: skip
    """Send chunks of run-time length to every rank; see the manual for the metadata rows."""
    call = _start("all_to_all_v", srcs, dsts, priority, one=True)
    _only_hbm(call)
    ring, flat, view = _variable("all_to_all_v", call, replica_group, metadata_tensor,
                                 (recv_counts_known, has_rdispls))  # fmt: skip
    mine = [_chunk(call, int(flat[0, i]), int(flat[1, i])) for i in range(len(ring))]
    got = _meet(call.core, "all_to_all_v", ring, mine)
    me = ring.index(call.core.rank)
    how = (flat, view, recv_counts_known, has_rdispls)
    _receive(call, ring, [got[r][me] for r in ring], how)
    return _done(call, name)
