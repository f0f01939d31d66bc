"""One error class per law. Each message is one sentence: operation, actual, allowed, kernel line."""

from __future__ import annotations

Line = tuple[str, int]


class NkiValidationError(Exception):
    """Raised when a hardware constraint is violated; the base of every law here."""


class LawError(NkiValidationError):
    """A kernel broke a law of the machine or of the language."""

    def __init__(self, op: str, operand: str | None, actual: str, allowed: str) -> None:
        self.op, self.operand, self.actual, self.allowed = op, operand, actual, allowed
        self.line: Line | None = None
        super().__init__(op, operand, actual, allowed)

    def __str__(self) -> str:
        subject = f"{self.op}: {self.operand}" if self.operand else self.op
        where = f" [{self.line[0]}:{self.line[1]}]" if self.line else ""
        return f"{subject} {self.actual}; {self.allowed}{where}"


class NotSimulated(LawError):
    """The operation or argument exists in the manual and is not modelled here."""

    def __init__(self, op: str, argument: str, why: str = "") -> None:
        super().__init__(op, f"argument {argument!r}", "is not simulated", why or "rewrite it")


class NotComputed(LawError):
    """A launch without numerics needs a value as an address."""


class NeedsNewerCore(LawError):
    """The operation exists only on a later NeuronCore than the target."""

    def __init__(self, op: str, generation: int = 4, target: str = "trn2") -> None:
        super().__init__(op, None, f"needs NeuronCore-v{generation}", f"the target {target} does not have it")


class OutsideKernel(LawError):
    """A device operation ran while no kernel was running."""


class NoDevice(LawError):
    """A kernel was called for hardware, and there is none."""


class KernelInsideKernel(LawError):
    """A jitted kernel was called from inside another kernel."""


class BadLaunch(LawError):
    """The launch grid, the target or the way of calling is not one that exists."""


class BadInput(LawError):
    """A kernel argument is of a kind that kernels do not accept."""


class BadOutput(LawError):
    """A kernel returned something that cannot leave the device."""


class ShapeMismatch(LawError):
    """Operands of one instruction do not have matching partitions or elements."""


class TooManyPartitions(LawError):
    """An on-chip tensor has more partitions than the memory."""


class TileTooLarge(LawError):
    """An operand exceeds the size that the instruction can process."""


class WrongSpace(LawError):
    """An operand lives in a memory that the engine cannot reach."""


class BothInPsum(LawError):
    """Two inputs of a Vector Engine instruction are in PSUM together."""


class WrongDtype(LawError):
    """An operand's dtype is not allowed for the instruction."""


class WrongOperator(LawError):
    """An operator token is not allowed in this place."""


class WrongEngine(LawError):
    """The chosen engine cannot execute the instruction."""


class WrongCall(LawError, TypeError):
    """An argument of a call is missing, unknown or given twice."""


class WrongArgument(LawError):
    """A scalar argument has a value that the instruction does not accept."""


class StartPartition(LawError):
    """An access starts at a partition from which that many partitions cannot be reached."""


class Misaligned(LawError):
    """An address is not aligned as the memory requires."""


class PsumBankCrossed(LawError):
    """An access that must stay in one PSUM bank crosses its boundary."""


class UnwrittenRead(LawError):
    """An instruction read unwritten elements."""


class ReplacedRead(LawError):
    """A tensor was read after a different tensor took its address."""


class OutOfRange(LawError):
    """A static index or slice leaves the tensor."""


class DynamicOutOfRange(LawError):
    """A run-time index leaves the tensor."""


class IllegalView(LawError):
    """A view cannot be expressed by the hardware's access patterns."""


class SbufFull(LawError):
    """The live tensors do not fit SBUF."""


class PsumFull(LawError):
    """The live tensors do not fit PSUM."""


class HbmFull(LawError):
    """The tensors do not fit HBM."""


class AddressTaken(LawError):
    """An explicit address leaves the memory or cannot be used."""


class DuplicateName(LawError):
    """Two tensors of one core carry the same explicit name."""


class AccumulateMisuse(LawError):
    """A matmul accumulates on PSUM data that no overwriting matmul wrote."""


class AccumulatorUndefined(LawError):
    """An engine's reduction registers were used in an undefined state."""


class HbmRace(LawError):
    """Two cores accessed the same shared HBM element without order between them."""


class Deadlock(LawError):
    """Every core waits and none can proceed."""


class CoresDiverge(LawError):
    """The cores of one launch disagree on shared values."""


class ReportedFault(LawError):
    """A kernel does what is reported to go wrong on a device."""


class RegisterMisuse(LawError):
    """A register was used as a Python value, unset, or written while frozen."""


class OtherVersion(LawError):
    """A name, an argument or a construct is not in the version of the language that the launch has."""


class LoopMisuse(LawError):
    """A dynamic loop or a scheduling scope was used against its rules."""


class NkiSimWarning(UserWarning):
    """The simulator did something that the kernel's author should know."""


class AmbiguousManual(NkiSimWarning):
    """The kernel depends on a point where the documents disagree."""


class Relaxed(NkiSimWarning):
    """The policy let something pass that the default refuses."""


class Reported(NkiSimWarning):
    """The kernel does what is reported to go wrong on a device, and no document says so."""


class Deprecated(NkiSimWarning):
    """The kernel uses a spelling that the manual has deprecated."""
