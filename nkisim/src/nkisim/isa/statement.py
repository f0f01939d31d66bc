"""The statement of an instruction: engine, operands, rules, cost law; and one execution of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from inspect import BoundArguments, Signature
from typing import Any, NamedTuple, NoReturn

from nkisim.core.context import Core
from nkisim.dtypes import COMPUTED, Array, Flags
from nkisim.enums import dge_mode
from nkisim.errors import LawError, Relaxed, WrongCall
from nkisim.memory.tensor import NkiTensor
from nkisim.objects import MemoryRegion

ON_CHIP = frozenset({"sbuf", "psum"})
SBUF = frozenset({"sbuf"})
PSUM = frozenset({"psum"})
DMA = frozenset({"sbuf", "private_hbm", "shared_hbm"})
# GpSimd has no path to PSUM (architecture guide); the others reach both
REACH = {"gpsimd": SBUF, "vector": ON_CHIP, "scalar": ON_CHIP, "tensor": ON_CHIP, "dma": DMA}


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor parameter of an instruction."""

    name: str
    # "in" | "out" | "inout"
    role: str
    spaces: frozenset[str] = ON_CHIP
    dtypes: frozenset[str] = COMPUTED
    # may be None
    optional: bool = False
    # may be a Python number instead of a tensor
    scalar: bool = False
    # one element per partition
    column: bool = False
    # how the body sees it: "fp32", "raw", "auto" (the card decides per call)
    math: str = "fp32"
    # the body sees all dimensions instead of (partitions, elements)
    shaped: bool = False
    # a rule checks the elements that are read, because the instruction does not read all of the operand
    checked: bool = False


class Target(NamedTuple):
    """The facts of an output that the body gets: (partitions, elements) and the dtype's name."""

    shape: tuple[int, int]
    dtype: str


class Masked(NamedTuple):
    """A result that reaches only some elements of the output; the others stay as they are."""

    values: Array
    where: Flags


@dataclass(slots=True, eq=False)
class Call:
    """One execution of a card."""

    core: Core
    card: Card
    args: dict[str, Any]
    engine: str = ""
    tensors: dict[str, NkiTensor] = field(default_factory=dict)
    # tensors that hold run-time addresses of operands
    indices: list[NkiTensor] = field(default_factory=list)
    # part of an address is known only at run time
    dynamic: bool = False

    def refuse(self, law: type[LawError], operand: str | None, actual: str, allowed: str) -> NoReturn:
        """Raise a law for this instruction."""
        raise law(self.card.op, operand, actual, allowed)

    def who(self, operand: str) -> tuple[str, str]:
        """Return (instruction, operand) for a message."""
        return (self.card.op, operand)

    def members(self, kinds: tuple[tuple[str, type[Enum]], ...]) -> None:
        """Where the policy takes values for members of enumerations, replace them by the members.

        The compiler takes an integer `dge_mode`, so every policy does.
        """
        for name, kind in kinds:
            value = self.args[name]
            allowed = kind is dge_mode or self.core.policy.enums == "integers"
            if allowed and type(value) in (int, str) and value in kind._value2member_map_:
                self.args[name] = member = kind(value)
                text = f"{self.card.op}: {name}={value!r} is taken as {kind.__name__}.{member.name}; name the member"
                self.core.warn("value for an enumeration", text, Relaxed)


Rule = Callable[[Call], None]
# a body's result, per output: an array, a Masked, or None for nothing to write
Results = list[Any]
Finish = Callable[[Call, Results], Results]
# writes a result; None without numerics
Writer = Callable[[Call, str, NkiTensor, Array | None], None]


def bound_to(op: str, signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundArguments:
    """Return the arguments of a call by name, with their defaults.

    Raises:
        WrongCall: they do not fit the signature.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        text = str(error).removeprefix("got ")
        verb = "is" if text.startswith("missing") else "got"
        raise WrongCall(op, None, f"{verb} {text}", f"its arguments are {', '.join(signature.parameters)}") from None
    bound.apply_defaults()
    return bound


def no_body(**_: Any) -> None:
    """The body of an instruction that moves data by itself, without arithmetic."""


@dataclass(frozen=True, slots=True, eq=False)
class Card:
    """The statement of one instruction."""

    op: str
    # engines that can run it, the first is the default
    engines: tuple[str, ...]
    operands: tuple[Operand, ...]
    body: Callable[..., Any] = no_body
    rules: tuple[Rule, ...] = ()
    # picks an engine when the kernel leaves it unknown
    pick: Callable[[Call], str] | None = None
    # runs after the body, for engine registers
    finish: Finish | None = None
    writer: Writer | None = None
    # "fp32" or "raw" for the operands marked "auto"
    math: Callable[[Call], str] | None = None
    work: Callable[[Call], Mapping[str, object]] | None = None
    # rules that look at more than shapes, dtypes, memories and arguments: at addresses, at the elements read
    always: tuple[Rule, ...] = ()
    # rules that look at values and reduction registers; without numerics there are none
    values: tuple[Rule, ...] = ()
    # the NeuronCore that it came with
    generation: int = 3
    names: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # (name, its operand or None) of everything that the rules may depend on: every argument but the label
    keyed: tuple[tuple[str, Operand | None], ...] = ()
    # arguments that are enumerations
    enums: tuple[tuple[str, type[Enum]], ...] = ()
    # the rules' decisions, by the values that they depend on
    plans: dict[Any, Any] = field(default_factory=dict)


def is_psum(tensor: NkiTensor | None) -> bool:
    """Return whether a tensor operand is in PSUM."""
    return tensor is not None and tensor.buffer is MemoryRegion.psum
