"""Happens-before race detection on HBM that two cores share.

A core_barrier is the only order between the cores' accesses to its tensor. Accesses since the
last barrier on a tensor are remembered exactly, per byte, so that interleaved columns written by
two cores are no race. The verdict does not depend on which core ran first.
"""

from __future__ import annotations

import numpy as np

from nkisim.core.context import Core
from nkisim.errors import HbmRace
from nkisim.lines import kernel_line
from nkisim.memory.storage import Access, Shadow, Storage
from nkisim.memory.tensor import NkiTensor


def note(core: Core, tensor: NkiTensor, write: bool, who: tuple[str, str]) -> None:
    """Remember an access and compare it with those of the other core.

    Raises:
        HbmRace: the other core accessed the same byte since they last met, and one wrote.
    """
    storage = tensor._storage
    shadow = storage.shadow
    assert shadow is not None
    with shadow.lock:
        if write and shadow.marks is None:
            _materialize(storage, shadow)
        if shadow.marks is not None:
            marks = tensor._marks(shadow.marks)
            enemy = _bits(1 - core.program, True)
            if write:
                enemy |= _bits(1 - core.program, False)
            wide = np.array(_spread(enemy, marks.itemsize), marks.dtype)
            if np.any(marks & wide):
                raise _race(core, tensor, write, who)
            marks |= np.array(_spread(_bits(core.program, write), marks.itemsize), marks.dtype)
        shadow.accesses.append(Access(core.program, write, kernel_line(), who[0], tensor))


def clear(storage: Storage) -> None:
    """Forget the accesses of a tensor: its cores have met."""
    shadow = storage.shadow
    if shadow is not None:
        shadow.accesses.clear()
        if shadow.marks is not None:
            shadow.marks.fill(0)


def _bits(program: int, write: bool) -> int:
    return 1 << (2 * program + write)


def _spread(bits: int, width: int) -> int:
    return int.from_bytes(bytes([bits]) * width, "little")


def _materialize(storage: Storage, shadow: Shadow) -> None:
    """Start per-byte marks at the first write, from the reads remembered so far."""
    shadow.marks = np.zeros(storage.data.shape, np.uint8)
    for access in shadow.accesses:
        view = access.tensor._marks(shadow.marks)
        bits = _bits(access.core, access.write)
        view |= np.array(_spread(bits, view.itemsize), view.dtype)


def _race(core: Core, tensor: NkiTensor, write: bool, who: tuple[str, str]) -> HbmRace:
    shadow = tensor._storage.shadow
    assert shadow is not None
    mine = np.zeros(tensor._storage.data.shape, np.uint8)
    tensor._marks(mine)[...] = 1
    verb = "writes" if write else "reads"
    for access in shadow.accesses:
        if access.core == core.program or not (write or access.write):
            continue
        if np.any(access.tensor._marks(mine)):
            other = f"core {access.core} {'writes' if access.write else 'reads'} it in {access.op}"
            where = f"{access.line[0]}:{access.line[1]}"
            found = f"{verb} {tensor.name} on core {core.program} while {other} at {where}"
            allowed = f"put core_barrier(data={tensor.name}, cores=(0, 1)) between them"
            return HbmRace(*who, found, allowed)
    raise AssertionError("a race without a partner")
