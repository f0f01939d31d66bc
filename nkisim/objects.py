"""NKIObject, the memory regions, and the virtual register: the plain objects of the language."""

from __future__ import annotations

from enum import Enum

from nkisim.errors import RegisterMisuse


class NKIObject:
    """Base of the objects that a kernel may define and pass around."""

    def __init__(self, **kwargs: object) -> None:
        for key, value in kwargs.items():
            setattr(self, key, value)


class MemoryRegion(Enum):
    """The memories a tensor can live in."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"


class VirtualRegister(NKIObject):
    """A 32-bit scalar of the engine sequencers, known only at run time.

    Python arithmetic, int(), range() and comparisons raise TypeError, as they would while a
    kernel is traced. `while register:` is the deprecated spelling of nl.while_loop and works.
    """

    def __init__(self, state: int | None = None, frozen: bool = False) -> None:
        self.state = state
        self.frozen = frozen

    def value(self, op: str) -> int:
        """Return the run-time value for an instruction.

        Raises:
            RegisterMisuse: the register was never set.
        """
        if self.state is None:
            raise RegisterMisuse(op, "register", "was never set", "load or move a value first")
        return self.state

    def set(self, value: int, op: str) -> None:
        """Store a 32-bit value.

        Raises:
            RegisterMisuse: the register is the counter of a loop.
        """
        if self.frozen:
            allowed = "a loop counter is read-only, copy it with register_move"
            raise RegisterMisuse(op, "register", "is the counter of a dynamic loop", allowed)
        self.state = (int(value) + 2**31) % 2**32 - 2**31 if not 0 <= value < 2**32 else int(value)

    def __bool__(self) -> bool:
        return self.value("while") != 0

    def __int__(self) -> int:
        raise TypeError(
            "a VirtualRegister has no value while a kernel is traced; use it as scalar_offset or with register_store"
        )

    __index__ = __int__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, VirtualRegister):
            return self is other
        raise TypeError(
            "a VirtualRegister cannot be compared while a kernel is traced; "
            "compute the condition in SBUF and load it into a register"
        )

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"VirtualRegister({self.state})"
