"""The decisions of an instruction's rules, made once for all executions that look alike to them.

Two executions look alike when every operand has the same shape, dtype, memory and start partition and
every other argument is equal. A plan holds the consequences: the engine, resolved operators, how
operands are read, the work. Rules that look at contents or registers are not part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from nkisim.core import access
from nkisim.enums import ENGINE_NAMES, engine
from nkisim.errors import IllegalView, NeedsNewerCore, ShapeMismatch, WrongArgument, WrongDtype, WrongEngine, WrongSpace
from nkisim.isa import ambiguities
from nkisim.isa.statement import REACH, Call, Operand, Target
from nkisim.memory.memory import check_start
from nkisim.memory.tensor import NkiTensor
from nkisim.memory.views import MOST_DIMS, MOST_STRIDE

# plans cached per instruction before it starts anew
MOST = 4096


@dataclass(slots=True, eq=False)
class ResolvedRules:
    """The outcome of an instruction's rules."""

    engine: str
    # arguments that the rules replaced
    resolved: dict[str, Any]
    # (name, who, as it is, all dimensions, unchecked) of each operand that is read
    reads: tuple[tuple[str, tuple[str, str], bool, bool, bool], ...]
    # (name, who) of each operand that may be written
    writes: tuple[tuple[str, tuple[str, str]], ...]
    # the facts of outputs that the body gets
    targets: dict[str, Target]
    work: Mapping[str, object] | None = None


def cache_key(call: Call) -> tuple[Any, ...]:
    """Settle run-time addresses, collect the tensors, and return the values that the rules may depend on."""
    args, tensors = call.args, call.tensors
    key: list[Any] = [call.core.rules_key, call.core.hardware_gaps]
    for name, operand in call.card.keyed:
        value = args[name]
        if value.__class__ is NkiTensor:
            if operand is not None:
                if value._dynamic is not None:
                    value = _settle(call, name, value)
                tensors[name] = value
            key.append(value._signature or value._read_signature())
        else:
            key.append(value.__class__)
            key.append(value)
    return tuple(key)


def _settle(call: Call, name: str, tensor: NkiTensor) -> NkiTensor:
    who = call.who(name)
    note_index(call, tensor)
    settled = access.resolve_dynamic_offset(call.core, tensor, who)
    if settled is None:
        raise access.out_of_range(call.core, tensor, who)
    return settled


def note_index(call: Call, tensor: NkiTensor) -> None:
    """Remember the tensor that an operand's run-time address comes from."""
    if tensor._dynamic is not None:
        call.dynamic = True
        if tensor._dynamic.source.__class__ is NkiTensor:
            call.indices.append(tensor._dynamic.source)


def make(call: Call) -> ResolvedRules:
    """Run every check and rule, and note their decisions.

    Raises:
        LawError: the instruction breaks a law, named by the subclass.
    """
    card, args = call.card, call.args
    if card.generation > call.core.geometry.generation:
        raise NeedsNewerCore(card.op)
    before = args.copy()
    for operand in card.operands:
        value = args[operand.name]
        optional = value is None and operand.optional
        number = operand.scalar and isinstance(value, (int, float, np.number))
        if value.__class__ is not NkiTensor and not optional and not number:
            _missing(call, operand, value)
    call.engine = _engine(call)
    for operand in card.operands:
        tensor = call.tensors.get(operand.name)
        if tensor is not None:
            _check(call, operand, tensor)
    for rule in card.rules:
        rule(call)
    ambiguities.of_operands(call)
    auto = card.math(call) if card.math is not None else "fp32"
    return _noted(call, before, auto)


def _noted(call: Call, before: dict[str, Any], auto: str) -> ResolvedRules:
    reads, writes, targets = [], [], {}
    for operand in call.card.operands:
        name, tensor = operand.name, call.tensors.get(operand.name)
        if operand.role != "in":
            writes.append((name, call.who(name)))
        if tensor is None:
            continue
        if operand.role == "out":
            shape = tensor.shape
            targets[name] = Target((shape[0], tensor.size // shape[0]), tensor.dtype)
        else:
            raw = (auto if operand.math == "auto" else operand.math) != "fp32"
            flat = operand.shaped or tensor.ndim == 2
            reads.append((name, call.who(name), raw, flat, operand.checked))
    resolved = {n: v for n, v in call.args.items() if v is not before[n]}
    return ResolvedRules(call.engine, resolved, tuple(reads), tuple(writes), targets)


def _missing(call: Call, operand: Operand, value: object) -> NoReturn:
    kinds = "a tensor" + (" or a number" if operand.scalar else "")
    call.refuse(WrongArgument, operand.name, f"is {value!r}", f"{kinds} is needed")


def _engine(call: Call) -> str:
    engines = call.card.engines
    requested = call.args.get("engine", engine.unknown)
    if requested is engine.unknown:
        return call.card.pick(call) if call.card.pick else engines[0]
    name = ENGINE_NAMES.get(requested)
    if name is None:
        call.refuse(WrongArgument, "engine", f"is {requested!r}", "pass a member of nki.isa.engine")
    if name not in engines:
        call.refuse(WrongEngine, "engine", f"is {name}", f"it runs on {', '.join(engines)}")
    return name


def _check(call: Call, operand: Operand, tensor: NkiTensor) -> None:
    space, reach = tensor.buffer.value, REACH[call.engine]
    if space not in operand.spaces or space not in reach:
        allowed = ", ".join(sorted(operand.spaces & reach))
        call.refuse(WrongSpace, operand.name, f"is in {space}", f"{call.engine} takes it from {allowed}")
    # OCP's e4m3 came with NeuronCore-v4, in the places of the older one
    newer = tensor.dtype == "float8_e4m3fn" and "float8_e4m3" in operand.dtypes and call.core.geometry.generation > 3
    if tensor.dtype not in operand.dtypes and not newer:
        call.refuse(WrongDtype, operand.name, f"is {tensor.dtype}", f"it can be {', '.join(sorted(operand.dtypes))}")
    if tensor.offset and call.engine != "dma" and tensor._on_chip:
        start = tensor.offset // tensor._row() + tensor._storage.info.start_partition
        if start:
            check_start(start, tensor.shape[0], call.core.geometry, call.who(operand.name))
    beyond = (tensor._signature or tensor._read_signature())[4]
    if beyond and call.engine != "dma":
        allowed = f"an engine walks {MOST_DIMS} dimensions with steps up to {MOST_STRIDE} elements"
        call.refuse(IllegalView, operand.name, beyond, allowed)
    if operand.column and tensor.size != tensor.shape[0]:
        call.refuse(ShapeMismatch, operand.name, f"has shape {tensor.shape}", "one element per partition is needed")
