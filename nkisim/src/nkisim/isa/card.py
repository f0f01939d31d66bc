"""Instruction cards: the code around the numpy body of an instruction.

A card states the engine, the operands with the memories and dtypes they may have, the rules
between them, and the cost law. The machinery here checks, reads memory, calls the body with
numpy arrays under the public parameter names, rounds and writes its results, and records the
event. The body cannot see memory, raise, or see the time.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from nkisim.core import access
from nkisim.core.context import Core, current
from nkisim.dtypes import to_fp32
from nkisim.enums import engine
from nkisim.isa import ambiguities, plan
from nkisim.isa.instruction import NkiInstruction
from nkisim.isa.statement import Call, Card, Masked, Operand, Rule, bound_to
from nkisim.lines import kernel_line


def card(
    engines: str, *operands: Operand, rules: tuple[Rule, ...] = (), **parts: Any
) -> Callable[[Callable[..., Any]], Callable[..., NkiInstruction]]:
    """Turn a numpy body with the public signature into the instruction."""

    def decorate(body: Callable[..., Any]) -> Callable[..., NkiInstruction]:
        parameters = inspect.signature(body).parameters
        defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
        by_name = {o.name: o for o in operands}
        keyed = tuple((n, by_name.get(n)) for n in parameters if n != "name")
        stated = Card(
            body.__name__,
            tuple(engines.split()),
            operands,
            body,
            rules,
            names=tuple(parameters),
            defaults=defaults,
            keyed=keyed,
            enums=tuple((n, type(d)) for n, d in defaults.items() if isinstance(d, Enum)),
            **parts,
        )
        names, known = stated.names, frozenset(stated.names)
        signature = inspect.signature(body)

        @functools.wraps(body)
        def instruction(*args: Any, **kwargs: Any) -> NkiInstruction:
            values = {**defaults, **kwargs}
            if args:
                values.update(zip(names, args, strict=False))
            if values.keys() != known or len(args) > len(names) or not kwargs.keys().isdisjoint(names[: len(args)]):
                bound_to(stated.op, signature, args, kwargs)
            return execute(stated, values)

        instruction.card = stated  # type: ignore[attr-defined]
        return instruction

    return decorate


def execute(card: Card, args: dict[str, Any]) -> NkiInstruction:
    """Run one instruction: check, read, compute, write, record."""
    call = Call(current(card.op), card, args)
    if card.enums:
        call.members(card.enums)
    decided = _planned(call)
    call.engine = decided.engine
    if decided.resolved:
        args.update(decided.resolved)
    for rule in card.always:
        rule(call)
    ambiguities.of_copies(call)
    ambiguities.of_addresses(call, [call.tensors[name] for name, _ in decided.writes if name in call.tensors])
    if call.core.numerics or access.computed(call.tensors.values()):
        for rule in card.values:
            rule(call)
        _write(call, decided, _compute(call, decided))
    else:
        _touch(call, decided)
    return record(call, decided)


def _touch(call: Call, decided: plan.ResolvedRules) -> None:
    """Check the elements that an instruction reads and mark those that it writes, without values."""
    core, writer = call.core, call.card.writer
    for name, who, _, _, unchecked in decided.reads:
        if not unchecked:
            access.read(core, call.tensors[name], who)
    for name, who in decided.writes:
        tensor = call.tensors.get(name)
        if tensor is None:
            continue
        tensor._storage.unknown = True
        if writer is not None:
            writer(call, name, tensor, None)
        else:
            access.write_unknown(core, tensor, who)


def _planned(call: Call) -> plan.ResolvedRules:
    """Return the rules' decisions about this execution, from an earlier one like it if there was one."""
    key, plans = plan.cache_key(call), call.card.plans
    try:
        decided: plan.ResolvedRules | None = plans.get(key)
    except TypeError:
        # a list among the arguments
        return plan.make(call)
    if decided is None:
        decided = plan.make(call)
        if len(plans) >= plan.MOST:
            plans.clear()
        plans[key] = decided
    return decided


def _compute(call: Call, decided: plan.ResolvedRules) -> list[Any]:
    card, core, tensors = call.card, call.core, call.tensors
    arrays = call.args | decided.targets
    for name, who, raw, flat, unchecked in decided.reads:
        tensor = tensors[name]
        values = tensor._numpy() if unchecked else access.read(core, tensor, who)
        if not raw:
            values = to_fp32(values)
        arrays[name] = values if flat else values.reshape(values.shape[0], -1)
    results = card.body(**arrays)
    listed = list(results) if type(results) is tuple else [results]
    return card.finish(call, listed) if card.finish is not None else listed


def _write(call: Call, decided: plan.ResolvedRules, results: list[Any]) -> None:
    writer, core = call.card.writer, call.core
    for (name, who), result in zip(decided.writes, results, strict=False):
        tensor = call.tensors.get(name)
        if tensor is None or result is None:
            continue
        if writer is not None:
            writer(call, name, tensor, result)
        elif result.__class__ is Masked:
            access.write_where(core, tensor, result, who)
        else:
            access.write(core, tensor, result, who)


def record(call: Call, decided: plan.ResolvedRules | None = None) -> NkiInstruction:
    """Count the instruction and, when recording, keep the facts that its event needs."""
    core = call.core
    if core.recording:
        reads, writes = [], []
        for operand in call.card.operands:
            tensor = call.tensors.get(operand.name)
            if tensor is not None:
                if operand.role != "out":
                    reads.append(tensor._extent or access.extent(tensor))
                if operand.role != "in":
                    writes.append(tensor._extent or access.extent(tensor))
        # after the data: a cost law takes the first extents for the moved data
        reads += [access.extent(t) for t in call.indices]
        log(core, (call.engine, call.card.op, reads, writes, _work(call, decided)), call.args.get("name"))
    if core.unwritten:
        core.unwritten.clear()
    index = core.clock
    core.clock = index + 1
    return NkiInstruction((core, index))


def _work(call: Call, decided: plan.ResolvedRules | None) -> Mapping[str, object]:
    """Return the work of an instruction; it follows from the plan where there is one."""
    law = call.card.work if call.card.work is not None else elementwise
    if decided is None:
        return law(call)
    if decided.work is None:
        decided.work = law(call)
    return decided.work


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
    work = {"elements": elements, "inputs": inputs, "scalar_operands": columns, "function": name}
    if args.get("engine") is engine.unknown:
        # the compiler chooses
        work["engine"] = "unknown"
    return work
