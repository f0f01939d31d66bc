"""Compares a graph's HLO proto, its border and its instructions, with the plan.

A loader knows parameters, results and aliases by their order alone, and a collective with groups that are not
the caller's never ends or sums the wrong ranks: without this check, a fault appears only when a device runs the graph.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from google.protobuf.message import DecodeError

from model.graph_key import Stage
from model.graph_spec import GraphSpec, TensorSpec
from model.nki.launches import TARGET, from_text
from trnspec.bundle import border, hlo
from trnspec.bundle.refusals import ELEMENT, of_instruction, tensor
from trnspec.bundle.spec import BundleSpec

# rotary frequencies are the largest constant of a graph; a weight of any real model is larger
CONSTANT_BYTES = 1024
_S32, _S64 = 4, 5
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# rounds of a loop: attention has one for each tile of the longest sequence's keys
MAX_TRIPS = 1 << 13
# instructions that an execution runs, loops unrolled
MAX_EXECUTED = 1 << 28
_DRAFT = "draft_model."
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Declared:
    """Parameters and results in order as (name, shape, dtype); result -> parameter of each alias, and whether all must
    be; results that are a parameter or another result; how often each collective runs with which groups, inside of a
    launch too, and how often each kernel is launched; parameters that nothing reads; bytes of the largest constant; how
    often each opcode is written; those that Trainium's compiler does not take."""

    parameters: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    aliases: dict[int, int]
    must_alias: bool
    shared: tuple[int, ...]
    collectives: Counter[tuple[str, Groups]]
    launches: Counter[str]
    unread: frozenset[int]
    largest_constant: int
    opcodes: Counter[str]
    refused: tuple[str, ...]


def declared(proto: bytes) -> Declared:
    """Read a graph's proto. ValueError if it cannot be determined how often a collective runs."""
    module = hlo.parse(proto)
    walk = _Walk(module)
    entry = walk.bodies[module.entry_computation_id]
    parameters = sorted((i for i in entry.values() if i.opcode == "parameter"), key=lambda i: i.parameter_number)
    root = entry[walk.roots[module.entry_computation_id]]
    names, results = border.output_names(root), list(root.operand_ids)
    constants = [i.shape for body in walk.bodies.values() for i in body.values() if i.opcode == "constant"]
    read, runs = walk.read(module.entry_computation_id), walk.runs(module.entry_computation_id)
    return Declared(
        tuple(tensor(border.input_name(p), p.shape) for p in parameters),
        tuple(tensor(name or "", shape) for name, shape in zip_longest(names, root.shape.tuple_shapes) if shape),
        {
            (e.output_shape_index[0] if e.output_shape_index else 0): e.parameter_number
            for e in module.input_output_alias.entries
        },
        all(e.kind == border.MUST_ALIAS for e in module.input_output_alias.entries),
        tuple(at for at, i in enumerate(results) if entry[i].opcode == "parameter" or i in results[:at]),
        Counter({(op, groups): n for (op, groups), n in runs.items() if op in _COLLECTIVES}),
        Counter({kernel: n for (kernel, _), n in runs.items() if kernel not in _COLLECTIVES}),
        frozenset(p.parameter_number for p in parameters) - read,
        max((_bytes(shape) for shape in constants), default=0),
        Counter(i.opcode for body in walk.bodies.values() for i in body.values()),
        tuple(sorted({*walk.refused(), *walk.too_long(module.entry_computation_id)})),
    )


def _bytes(shape: Any) -> int:
    return math.prod(shape.dimensions) * ELEMENT.get(shape.element_type, ("", 8))[1]


class _Walk:
    """A module's computations by id, and the collectives and instructions that one execution of each runs."""

    def __init__(self, module: Any) -> None:
        self.bodies = {c.id: {i.id: i for i in c.instructions} for c in module.computations}
        self.roots = {c.id: c.root_id for c in module.computations}
        # a layer is called many times and read once
        self.runs = functools.cache(self._runs)
        self.read = functools.cache(lambda computation: frozenset(self._read(computation)))
        self.executed = functools.cache(self._executed)

    def _runs(self, computation: int) -> Counter[tuple[str, Groups]]:
        """How often each collective and each kernel, without groups, runs: calls followed, loops counted."""
        total: Counter[tuple[str, Groups]] = Counter()
        for instruction in self.bodies[computation].values():
            inner = [self.runs(c) for c in instruction.called_computation_ids]
            if instruction.opcode in _COLLECTIVES:
                total[instruction.opcode, _groups(instruction)] += 1
            elif instruction.custom_call_target == TARGET:
                total.update(_of_launch(instruction))
            elif instruction.opcode == "while" and any(inner):
                times = self._trips(computation, instruction)
                for part in inner:
                    total.update({key: count * times for key, count in part.items()})
            else:
                for part in inner:
                    total.update(part)
        return total

    def refused(self) -> Iterator[str]:
        """The names of the operations that no compiler of the SDK takes."""
        for computation, body in self.bodies.items():
            for instruction in body.values():
                yield from of_instruction(instruction, body, self.bodies, self.roots)
                if instruction.opcode == "while":
                    try:
                        if (trips := self._trips(computation, instruction)) > MAX_TRIPS:
                            yield f"while of {trips} rounds"
                    except ValueError:
                        yield "while of unknown length"

    def too_long(self, computation: int) -> Iterator[str]:
        """Whether an execution would run too long for any graph of ours."""
        with contextlib.suppress(ValueError):
            if (count := self.executed(computation)) > MAX_EXECUTED:
                yield f"run of {count} instructions"

    def _executed(self, computation: int) -> int:
        """Instructions that one execution runs, calls followed and loops counted."""
        total = 0
        for instruction in self.bodies[computation].values():
            inner = sum(self.executed(c) for c in instruction.called_computation_ids)
            total += 1 + inner * (self._trips(computation, instruction) if instruction.opcode == "while" else 1)
        return total

    def _trips(self, computation: int, loop: Any) -> int:
        """Rounds of a counted loop as jax writes it: from a constant 0, by a constant 1, below a constant."""
        body, condition = (self.bodies[c] for c in loop.called_computation_ids)
        stop = condition[self.roots[loop.called_computation_ids[1]]]
        step = body[self.roots[loop.called_computation_ids[0]]]
        first = self.bodies[computation][loop.operand_ids[0]]
        if (stop.opcode, stop.comparison_direction, first.opcode, step.opcode) == ("compare", "LT", "tuple", "tuple"):
            counter, end = (condition[i] for i in stop.operand_ids)
            at = counter.tuple_index
            begin, following = self.bodies[computation][first.operand_ids[at]], body[step.operand_ids[at]]
            counts = _is_item(condition, counter, at) and _is_next(body, following, at)
            if counts and _value(begin) == 0 and (times := _value(end)) is not None:
                return times
        raise ValueError(f"{loop.name} runs a number of times that cannot be determined")

    def _read(self, computation: int) -> Iterator[int]:
        """The parameters of a computation that an instruction reads, calls followed."""
        body = self.bodies[computation]
        numbers = {i.id: i.parameter_number for i in body.values() if i.opcode == "parameter"}
        for instruction in body.values():
            called = self.read(instruction.called_computation_ids[0]) if instruction.opcode == "call" else None
            for at, operand in enumerate(instruction.operand_ids):
                if operand in numbers and (called is None or at in called):
                    yield numbers[operand]


def _of_launch(call: Any) -> Counter[tuple[str, Groups]]:
    """A launch and the sums over ranks inside of it; nothing where its text is none, which `refusals` names."""
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError, AttributeError):
        launch = from_text(call.backend_config.decode())[0]
        count, groups = launch.sums
        return Counter({(str(launch.kernel), ()): 1} | ({("all-reduce", groups): count} if count else {}))
    return Counter()


def _groups(instruction: Any) -> Groups:
    return tuple(tuple(group.replica_ids) for group in instruction.replica_groups)


def _is_item(body: dict[int, Any], found: Any, at: int) -> bool:
    """Whether an instruction is this item of its computation's parameter."""
    item = (found.opcode, found.tuple_index) == ("get-tuple-element", at)
    return item and body[found.operand_ids[0]].opcode == "parameter"


def _is_next(body: dict[int, Any], found: Any, at: int) -> bool:
    """Whether an instruction adds 1 to this item of its computation's parameter."""
    terms = [body[i] for i in found.operand_ids]
    added = found.opcode == "add" and len(terms) == 2
    return added and any(_is_item(body, a, at) and _value(b) == 1 for a, b in (terms, terms[::-1]))


def _value(instruction: Any) -> int | None:
    """The number that a constant is; None for anything else."""
    literal, kind = instruction.literal, instruction.shape.element_type
    held = list({_S32: literal.s32s, _S64: literal.s64s}.get(kind, ()))
    return held[0] if instruction.opcode == "constant" and len(held) == 1 else None


def unsupported_sentence(what: str) -> str:
    """The clause for a graph that holds an operation which the SDK refuses."""
    return f"it holds a {what}, which the Neuron SDK does not take"


def violations(graph: GraphSpec, proto: bytes | bytearray, spec: BundleSpec) -> list[str]:
    """One clause for each way in which a proto is not the graph that the plan of a spec describes."""
    try:
        found = declared(bytes(proto))
    except (ValueError, KeyError, IndexError, RecursionError, DecodeError) as error:
        return [f"it cannot be followed ({error})"]
    refused = [unsupported_sentence(what) for what in found.refused]
    return [
        *_interface(graph, found),
        *_collectives(graph, found, spec.tp),
        *_folded(graph, found, spec),
        *refused,
    ]


def _interface(graph: GraphSpec, found: Declared) -> Iterator[str]:
    wanted = _renamed((*graph.weights, *graph.inputs, *graph.state), border.parameter_names(graph))
    results = _renamed(graph.outputs + graph.state, border.result_names(graph))
    first_state = len(graph.weights) + len(graph.inputs)
    aliases = {len(graph.outputs) + i: first_state + i for i in range(len(graph.state))}
    yield from _differences("parameter", found.parameters, wanted)
    yield from _differences("result", found.results, results)
    if found.aliases != aliases:
        yield f"its aliases, result to parameter, are {found.aliases}, expected {aliases}"
    if not found.must_alias:
        yield "its aliases may be dropped, and state stays in one place"
    for at in found.shared:
        yield f"result {at} is a parameter or another result, and no copy of it"


def _renamed(tensors: tuple[TensorSpec, ...], names: list[str]) -> list[TensorSpec]:
    return [replace(t, name=name) for t, name in zip(tensors, names, strict=True)]


def _collectives(graph: GraphSpec, found: Declared, tp: int) -> Iterator[str]:
    counted = Counter[str]()
    for (opcode, _), times in found.collectives.items():
        counted[opcode] += times
    if counted != Counter({opcode: times for opcode, times in graph.collectives.items() if times}):
        yield f"it runs the collectives {dict(counted)}, expected {graph.collectives}"
    for opcode, groups in found.collectives:
        if sorted(rank for group in groups for rank in group) != list(range(tp)):
            yield f"an {opcode} has the groups {groups}, which do not share out {tp} ranks"


def _folded(graph: GraphSpec, found: Declared, spec: BundleSpec) -> Iterator[str]:
    for at, weight in enumerate(graph.weights):
        # a parameter that is not a `.weight`, such as a rank, may be for the loader alone
        if at in found.unread and weight.name.endswith(".weight") and not _may_be_unread(graph, weight.name, spec):
            yield f"nothing reads {weight.name}"
    if found.largest_constant > CONSTANT_BYTES:
        yield f"a constant of {found.largest_constant} bytes is folded in, the largest may have {CONSTANT_BYTES}"


def _may_be_unread(graph: GraphSpec, name: str, spec: BundleSpec) -> bool:
    """Whether a graph need not read a weight: a half of a step omits some of the draft, and a drafter names others."""
    if spec.kind.model is None or not name.startswith(_DRAFT):
        return False
    halved = graph.key.stage in (Stage.DRAFT, Stage.VERIFY)
    return halved or spec.kind.model.unread(graph.key, name.removeprefix(_DRAFT))


def _differences(what: str, found: tuple[TensorSpec, ...], wanted: list[TensorSpec]) -> Iterator[str]:
    if len(found) != len(wanted):
        yield f"it has {len(found)} {what}s, expected {len(wanted)}"
    for i, (one, other) in enumerate(zip(found, wanted, strict=False)):
        if one != other:
            yield f"{what} {i} is {one.name} {one.dtype} {one.shape}, expected {other.name} {other.dtype} {other.shape}"
