"""Instruction cards: what surrounds the numpy body of an instruction.

A card states the engine, the operands with the memories and dtypes they may have, the rules
between them, and the cost law. The machinery here checks, reads memory, calls the body with
numpy arrays under the public parameter names, rounds and writes what it returns, and records the
event. The body cannot see memory, raise, or tell the time.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np

from nkisim import access
from nkisim.context import Core, current, kernel_line
from nkisim.dtypes import TRN2, Array, to_fp32
from nkisim.enums import ENGINE_NAMES, engine
from nkisim.errors import (
    LawError,
    ShapeMismatch,
    WrongArgument,
    WrongDtype,
    WrongEngine,
    WrongSpace,
)
from nkisim.instruction import NkiInstruction
from nkisim.memory import check_start
from nkisim.objects import MemoryRegion
from nkisim.tensor import NkiTensor

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
    dtypes: frozenset[str] = TRN2
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
    # a rule checks what is read, because the instruction does not read all of the operand
    checked: bool = False


class Target(NamedTuple):
    """What the body learns of an output: (partitions, elements) and the dtype's name."""

    shape: tuple[int, int]
    dtype: str


class Masked(NamedTuple):
    """A result that reaches only some elements of the output; the others stay as they are."""

    values: Any
    where: Any


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

    def refuse(
        self, law: type[LawError], operand: str | None, found: str, allowed: str
    ) -> NoReturn:
        """Raise a law for this instruction."""
        raise law(self.card.op, operand, found, allowed)

    def who(self, operand: str) -> tuple[str, str]:
        """Return (instruction, operand) for a message."""
        return (self.card.op, operand)


Rule = Callable[[Call], None]
Finish = Callable[[Call, list[Any]], list[Any]]
Writer = Callable[[Call, str, NkiTensor, Array], None]


@dataclass(frozen=True, slots=True)
class Card:
    """The statement of one instruction."""

    op: str
    # engines that can run it, the first is the default
    engines: tuple[str, ...]
    operands: tuple[Operand, ...]
    body: Callable[..., Any]
    rules: tuple[Rule, ...] = ()
    # picks an engine when the kernel leaves it unknown
    pick: Callable[[Call], str] | None = None
    # runs after the body, for engine registers
    finish: Finish | None = None
    writer: Writer | None = None
    # "fp32" or "raw" for the operands marked "auto"
    math: Callable[[Call], str] | None = None
    work: Callable[[Call], Mapping[str, object]] | None = None
    names: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


def card(
    engines: str, *operands: Operand, rules: tuple[Rule, ...] = (), **parts: Any
) -> Callable[[Callable[..., Any]], Callable[..., NkiInstruction]]:
    """Turn a numpy body with the public signature into the instruction."""

    def decorate(body: Callable[..., Any]) -> Callable[..., NkiInstruction]:
        parameters = inspect.signature(body).parameters
        defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
        made = Card(
            body.__name__, tuple(engines.split()), operands, body, rules,
            names=tuple(parameters), defaults=defaults, **parts,
        )  # fmt: skip
        names, count = made.names, len(made.names)

        @functools.wraps(body)
        def instruction(*args: Any, **kwargs: Any) -> NkiInstruction:
            values = defaults.copy()
            values.update(zip(names, args, strict=False))
            values.update(kwargs)
            if len(values) != count or len(args) > count:
                bound = inspect.signature(body).bind(*args, **kwargs)
                bound.apply_defaults()
                values = dict(bound.arguments)
            return execute(made, values)

        instruction.card = made  # type: ignore[attr-defined]
        return instruction

    return decorate


def execute(card: Card, args: dict[str, Any]) -> NkiInstruction:
    """Run one instruction: check, read, compute, write, record."""
    core = current(card.op)
    call = Call(core, card, args)
    tensors = call.tensors
    for operand in card.operands:
        value = args[operand.name]
        if value.__class__ is NkiTensor:
            tensors[operand.name] = (
                value if value._dynamic is None else _settle(call, operand, value)
            )
        elif value is None:
            if not operand.optional:
                _missing(call, operand, value)
        elif not operand.scalar or not isinstance(value, (int, float, np.number)):
            _missing(call, operand, value)
    call.engine = _engine(call)
    reach = REACH[call.engine]
    for operand in card.operands:
        tensor = tensors.get(operand.name)
        if tensor is not None:
            _check(call, operand, tensor, reach)
    for rule in card.rules:
        rule(call)
    results = _compute(call)
    _write(call, results)
    return record(call)


def _settle(call: Call, operand: Operand, tensor: NkiTensor) -> NkiTensor:
    who = call.who(operand.name)
    note_index(call, tensor)
    settled = access.settle(call.core, tensor, who)
    if settled is None:
        raise access.out_of_range(call.core, tensor, who)
    return settled


def note_index(call: Call, tensor: NkiTensor) -> None:
    """Remember the tensor that an operand's run-time address comes from."""
    source = tensor._dynamic.source if tensor._dynamic is not None else None
    if source.__class__ is NkiTensor:
        call.indices.append(source)


def _missing(call: Call, operand: Operand, value: object) -> NoReturn:
    kinds = "a tensor" + (" or a number" if operand.scalar else "")
    call.refuse(WrongArgument, operand.name, f"is {value!r}", f"{kinds} is needed")


def _engine(call: Call) -> str:
    engines = call.card.engines
    asked = call.args.get("engine", engine.unknown)
    if asked is engine.unknown:
        return call.card.pick(call) if call.card.pick else engines[0]
    name = ENGINE_NAMES.get(asked)
    if name is None:
        call.refuse(WrongArgument, "engine", f"is {asked!r}", "pass a member of nki.isa.engine")
    if name not in engines:
        call.refuse(WrongEngine, "engine", f"is {name}", f"it runs on {', '.join(engines)}")
    return name


def _check(call: Call, operand: Operand, tensor: NkiTensor, reach: frozenset[str]) -> None:
    # the attribute behind Enum.value, without its descriptor
    space = tensor.buffer._value_
    if space not in operand.spaces or space not in reach:
        allowed = ", ".join(sorted(operand.spaces & reach))
        found = f"is in {space}"
        call.refuse(WrongSpace, operand.name, found, f"{call.engine} takes it from {allowed}")
    if tensor.dtype not in operand.dtypes:
        allowed = f"it can be {', '.join(sorted(operand.dtypes))}"
        call.refuse(WrongDtype, operand.name, f"is {tensor.dtype}", allowed)
    if tensor.offset and call.engine != "dma" and tensor._on_chip:
        start = tensor.offset // tensor._row() + tensor._storage.info.start_partition
        if start:
            check_start(start, tensor.shape[0], call.core.geometry, call.who(operand.name))
    if operand.column and tensor.size != tensor.shape[0]:
        found = f"has shape {tensor.shape}"
        call.refuse(ShapeMismatch, operand.name, found, "one element per partition is needed")


def _compute(call: Call) -> list[Any]:
    card, core = call.card, call.core
    auto = card.math(call) if card.math is not None else "fp32"
    arrays = call.args.copy()
    for operand in card.operands:
        tensor = call.tensors.get(operand.name)
        if tensor is None:
            continue
        if operand.role == "out":
            shape = tensor.shape
            arrays[operand.name] = Target((shape[0], tensor.size // shape[0]), tensor.dtype)
            continue
        values = (
            tensor._numpy()
            if operand.checked
            else access.read(core, tensor, (card.op, operand.name))
        )
        if operand.math == "fp32" or (operand.math == "auto" and auto == "fp32"):
            values = to_fp32(values)
        if values.ndim != 2 and not operand.shaped:
            values = values.reshape(values.shape[0], -1)
        arrays[operand.name] = values
    results = card.body(**arrays)
    listed = list(results) if type(results) is tuple else [results]
    return card.finish(call, listed) if card.finish is not None else listed


def _write(call: Call, results: list[Any]) -> None:
    at = 0
    for operand in call.card.operands:
        if operand.role == "in":
            continue
        tensor = call.tensors.get(operand.name)
        if tensor is not None and at < len(results) and results[at] is not None:
            result, who = results[at], (call.card.op, operand.name)
            if call.card.writer is not None:
                call.card.writer(call, operand.name, tensor, result)
            elif result.__class__ is Masked:
                access.write_where(call.core, tensor, result, who)
            else:
                access.write(call.core, tensor, result, who)
        at += 1


def record(call: Call, engine_name: str = "") -> NkiInstruction:
    """Count the instruction and, when recording, keep what its event needs."""
    core = call.core
    if core.policy.recording:
        reads, writes = [], []
        for operand in call.card.operands:
            tensor = call.tensors.get(operand.name)
            if tensor is not None:
                if operand.role != "out":
                    reads.append(access.extent(tensor))
                if operand.role != "in":
                    writes.append(access.extent(tensor))
        # after the data: a cost law takes the first extents for what is moved
        reads += [access.extent(t) for t in call.indices]
        work = call.card.work(call) if call.card.work is not None else elementwise(call)
        log(core, (engine_name or call.engine, call.card.op, reads, writes, work),
            call.args.get("name"))  # fmt: skip
    index = core.clock
    core.clock = index + 1
    return NkiInstruction((core, index))


def log(core: Core, what: tuple[Any, ...], name: str | None) -> None:
    """Keep a raw event: (engine, op, reads, writes, work)."""
    if core.ordered_depth:
        if core.previous is not None:
            core.edges.setdefault(core.clock, []).append((core.number, core.previous))
        core.previous = core.clock
    core.log.append((core.clock, *what, kernel_line(), name))


def elementwise(call: Call) -> Mapping[str, object]:
    """Return the work of an instruction that streams its tensors once."""
    inputs = columns = elements = 0
    for operand in call.card.operands:
        tensor = call.tensors.get(operand.name)
        if tensor is None:
            continue
        size = tensor.size // tensor.shape[0]
        elements = max(elements, size)
        if operand.role != "out":
            if operand.column:
                columns += 1
            else:
                inputs += 1
    args = call.args
    token = args.get("op", args.get("op0"))
    name = getattr(token, "name", call.card.op)
    return {"elements": elements, "inputs": inputs, "scalar_operands": columns, "function": name}


def is_psum(tensor: NkiTensor | None) -> bool:
    """Tell whether a tensor operand is in PSUM."""
    return tensor is not None and tensor.buffer is MemoryRegion.psum
