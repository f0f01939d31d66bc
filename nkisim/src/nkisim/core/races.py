"""Happens-before race detection on HBM that two cores share.

A core_barrier is the only order between the cores' accesses to its tensor. Accesses since the
last barrier on a tensor are remembered exactly, per byte, so that interleaved columns written by
two cores are no race, nor are equal bytes. The verdict does not depend on which core ran first.

With Policy(races="outcome") bytes that both cores write several times are judged at the next barrier, or at the end:
where each core's last bytes are the same and nobody reads them before, no order changes the result.
"""

from __future__ import annotations

import numpy as np

from nkisim.core.context import Core
from nkisim.dtypes import Array
from nkisim.errors import HbmRace, Relaxed
from nkisim.lines import kernel_line
from nkisim.memory.storage import Access, AccessHistory, Storage
from nkisim.memory.tensor import NkiTensor


def note(
    core: Core, tensor: NkiTensor, who: tuple[str, str], values: Array | None = None, together: bool = False
) -> None:
    """Remember a read, or the write of `values`, and compare it with the other core's accesses.

    Cores that write the same bytes do no harm in any order: that warns, and a core may read bytes that it wrote.

    Raises:
        HbmRace: the other core accessed the same byte since they last met, and one wrote something else.
    """
    storage, write = tensor._storage, values is not None
    history = storage.history
    assert history is not None
    with history.lock:
        if write and history.marks is None:
            _materialize(storage, history)
        if history.marks is not None:
            marks = tensor._marks(history.marks)
            conflicts = _conflicts(core, tensor, marks, values)
            if np.any(conflicts):
                race = _race(core, tensor, write, who)
                if core.policy.races != "outcome" or not _of_writes_only(core, tensor, marks, conflicts):
                    raise race
                history.race = history.race or (race, core)
            if values is None:
                _read_of_race(tensor, history)
            elif history.last is not None:
                tensor._marks(history.last[core.program])[...] = _bits_of(values, marks)
            if write and not together and np.any(marks & _wide(1 - core.program, True, marks)):
                text = (
                    f"both cores write the same bytes of {tensor.name} without order; let one write, or split the work"
                )
                core.warn(f"equal writes to {tensor.name}", text)
            mine = marks & _wide(core.program, True, marks)
            # a core that reads its own writes depends on no other core
            read = _wide(core.program, False, marks) & ~(mine >> marks.dtype.type(1))
            marks |= _wide(core.program, True, marks) if write else read
        history.accesses.append(Access(core.program, write, kernel_line(), who[0], tensor))


def _conflicts(core: Core, tensor: NkiTensor, marks: Array, values: Array | None) -> Array:
    """Return the marks of the other core's accesses that this one collides with, per element."""
    other = 1 - core.program
    wrote = marks & _wide(other, True, marks)
    if values is None:
        mine = marks & _wide(core.program, True, marks)
        # a write mark of core 1 lies two bits above one of core 0
        return wrote & ~(mine >> marks.dtype.type(2) if other == 0 else mine << marks.dtype.type(2))
    conflicts = marks & _wide(other, False, marks)
    if wrote.any():
        # every bit of a byte that the other core wrote
        bytes_of = (wrote >> marks.dtype.type(2 * other + 1)) * marks.dtype.type(0xFF)
        history = tensor._storage.history
        last = history.last[other] if history is not None and history.last is not None else tensor._storage.data
        unequal = (_bits_of(values, marks) ^ tensor._marks(last)) & bytes_of
        conflicts = np.where(unequal != 0, wrote, conflicts)
    return conflicts


def _bits_of(values: Array, marks: Array) -> Array:
    return np.ascontiguousarray(values).view(marks.dtype).reshape(marks.shape)


def _of_writes_only(core: Core, tensor: NkiTensor, marks: Array, conflicts: Array) -> bool:
    """Whether a conflict is of two writes whose bytes nobody reads; note it, to be judged when the cores meet."""
    storage = tensor._storage
    history = storage.history
    assert history is not None
    if np.any(conflicts & _wide(1 - core.program, False, marks)):
        return False
    if history.last is None or history.differed is None:
        history.last = storage.data.copy(), storage.data.copy()
        history.differed = np.zeros(storage.data.shape, np.uint8)
    differed = tensor._marks(history.differed)
    differed[conflicts != 0] = np.iinfo(differed.dtype).max
    return not any(np.any(a.tensor._marks(history.differed)) for a in history.accesses if not a.write)


def _read_of_race(tensor: NkiTensor, history: AccessHistory) -> None:
    if history.race is not None and np.any(tensor._marks(history.differed)):
        raise history.race[0]


def judge(storage: Storage) -> None:
    """Judge a race of writes: its cores have met, or ended.

    Raises:
        HbmRace: the two cores end with different bytes.
    """
    history = storage.history
    if history is None or history.race is None or history.last is None:
        return
    race, core = history.race
    if np.any((history.last[0] != history.last[1]) & (history.differed != 0)):
        raise race
    text = f"{race}, or let one core write: each core ends with the same bytes, so that no order changes the result"
    core.warn(f"race of equal results {storage.info.number}", text, Relaxed)
    history.race = history.last = history.differed = None


def clear(storage: Storage) -> None:
    """Forget the accesses of a tensor: its cores have met."""
    judge(storage)
    history = storage.history
    if history is not None:
        history.accesses.clear()
        if history.marks is not None:
            history.marks.fill(0)


def _bits(program: int, write: bool) -> int:
    return 1 << (2 * program + write)


def _wide(program: int, write: bool, marks: Array) -> Array:
    """Return the mark of an access, in every byte of an element."""
    return np.array(int.from_bytes(bytes([_bits(program, write)]) * marks.itemsize, "little"), marks.dtype)


def _materialize(storage: Storage, history: AccessHistory) -> None:
    """Start per-byte marks at the first write, from the reads remembered so far."""
    history.marks = np.zeros(storage.data.shape, np.uint8)
    for access in history.accesses:
        view = access.tensor._marks(history.marks)
        view |= _wide(access.core, access.write, view)


def _race(core: Core, tensor: NkiTensor, write: bool, who: tuple[str, str]) -> HbmRace:
    history = tensor._storage.history
    assert history is not None
    mine = np.zeros(tensor._storage.data.shape, np.uint8)
    tensor._marks(mine)[...] = 1
    verb = "writes" if write else "reads"
    for access in history.accesses:
        if access.core == core.program or not (write or access.write):
            continue
        if np.any(access.tensor._marks(mine)):
            other = f"core {access.core} {'writes' if access.write else 'reads'} it in {access.op}"
            where = f"{access.line[0]}:{access.line[1]}"
            allowed = f"put core_barrier(data={tensor.name}, cores=(0, 1)) between them"
            return HbmRace(*who, f"{verb} {tensor.name} on core {core.program} while {other} at {where}", allowed)
    raise AssertionError("a race without a partner")
