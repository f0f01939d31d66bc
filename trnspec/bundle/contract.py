"""Compares a graph's HLO proto, its I/O signature and its instructions, with the plan.

A build and the doctor check all of it (`violations`): a runtime finds parameters, results and aliases by their order,
and a collective with wrong groups never ends or sums the wrong ranks. A load checks the signature and that builds write
such instructions (`load_violations`). Source of the codes: compiler/error-codes of the SDK's documents, 2.32 and 2.33.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from model.graph_key import Stage
from model.graph_spec import GraphSpec, TensorSpec
from model.nki.launches import API_VERSION, LNC, TARGET, filled, from_text
from model.nki.table import KERNELS
from trnspec.bundle import border, hlo
from trnspec.bundle.spec import BundleSpec

# the operations that builds write
_OPCODES = """
    abs add all-gather all-reduce and broadcast call compare concatenate constant convert copy cosine custom-call divide
    dot exponential gather get-tuple-element iota log maximum minimum multiply negate not or pad parameter power reduce
    remainder reshape rsqrt scatter select shift-left shift-right-arithmetic sign sine slice subtract transpose tuple
    while xor
"""
OPCODES = frozenset(_OPCODES.split())
COLLECTIVES = ("all-reduce", "all-gather")
# operations on integers that the hardware does not have, with --implicit-integer-downcast=none
_NO_INTEGERS = {"dot": "NCC_EVRF035", "scatter": "NCC_EVRF060", "all-reduce": "NCC_EVRF061"}
# source: enum PrimitiveType of xla/xla_data.proto (openxla/xla)
_ELEMENTS = {1: ("pred", 1), 4: ("int32", 4), 8: ("uint32", 4), 11: ("float32", 4), 16: ("bfloat16", 2)}
_INTEGERS, _TUPLE = frozenset(range(1, 10)), 13
# rotary frequencies are the largest constant of a graph; a weight of any real model is larger
CONSTANT_BYTES = 1024
# rounds of a loop: attention has one for each tile of the longest sequence's keys
MAX_TRIPS = 1 << 13
_MALFORMED = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, DecodeError)
Groups = tuple[tuple[int, ...], ...]


class Signature(NamedTuple):
    """Parameters and results in order; result -> parameter of each alias, and whether all must be; the results that are
    a parameter or another result."""

    parameters: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    aliases: dict[int, int]
    must_alias: bool
    repeated: tuple[int, ...]


@dataclass(frozen=True)
class HloSummary:
    """A graph's signature; how often an execution runs each collective with which groups, launches' included, and each
    kernel; parameters that nothing reads; bytes of the largest constant."""

    signature: Signature
    collectives: Counter[tuple[str, Groups]]
    launches: Counter[str]
    unread: frozenset[int]
    largest_constant: int


def violations(graph: GraphSpec, proto: bytes | bytearray, spec: BundleSpec) -> list[str]:
    """One clause for each way in which a proto is not the graph that the plan of a spec describes."""
    if found := load_violations(graph, proto, spec):
        return found
    try:
        summary = summarize(bytes(proto))
        return [*_collectives(graph, summary, spec.tp), *_folded(graph, summary, spec)]
    except _MALFORMED as error:
        return [f"it cannot be followed ({error})"]


def load_violations(graph: GraphSpec, proto: bytes | bytearray, spec: BundleSpec) -> list[str]:
    """The same of its signature and of the kinds of its instructions."""
    try:
        module = hlo.parse(bytes(proto))
        faults = sorted(set(_instruction_faults(module, spec.kernels != "reference")))
        return faults or list(_interface(graph, _signature(module)))
    except (*_MALFORMED, StopIteration) as error:
        return [f"it cannot be followed ({error})"]


def signature(proto: bytes) -> Signature:
    """The I/O signature of a proto."""
    return _signature(hlo.parse(proto))


def summarize(proto: bytes) -> HloSummary:
    """Read a graph's proto. ValueError if it cannot be determined how often a collective runs."""
    module = hlo.parse(proto)
    walk, signature_ = _Walk(module), _signature(module)
    read, runs = walk.read(module.entry_computation_id), walk.runs(module.entry_computation_id)
    constants = [i.shape for c in module.computations for i in c.instructions if i.opcode == "constant"]
    return HloSummary(
        signature_,
        Counter({(op, groups): n for (op, groups), n in runs.items() if op in COLLECTIVES}),
        Counter({kernel: n for (kernel, _), n in runs.items() if kernel not in COLLECTIVES}),
        frozenset(range(len(signature_.parameters))) - read,
        max((math.prod(s.dimensions) * _ELEMENTS.get(s.element_type, ("", 8))[1] for s in constants), default=0),
    )


def _tensor(name: str, shape: Any) -> TensorSpec:
    kind = _ELEMENTS.get(shape.element_type, (f"element type {shape.element_type}", 0))[0]
    return TensorSpec(name, tuple(shape.dimensions), kind)


def _signature(module: Any) -> Signature:
    entry = {i.id: i for i in hlo.entry(module).instructions}
    parameters = sorted((i for i in entry.values() if i.opcode == "parameter"), key=lambda i: i.parameter_number)
    root = entry[hlo.entry(module).root_id]
    named, results = zip_longest(border.output_names(root), root.shape.tuple_shapes), list(root.operand_ids)
    aliases = module.input_output_alias.entries
    return Signature(
        tuple(_tensor(border.input_name(p), p.shape) for p in parameters),
        tuple(_tensor(name or "", shape) for name, shape in named if shape),
        {(alias.output_shape_index[0] if alias.output_shape_index else 0): alias.parameter_number for alias in aliases},
        all(alias.kind == border.MUST_ALIAS for alias in aliases),
        tuple(at for at, i in enumerate(results) if entry[i].opcode == "parameter" or i in results[:at]),
    )


def _instruction_faults(module: Any, calls: bool) -> Iterator[str]:
    roots = {c.id: next(i for i in c.instructions if i.id == c.root_id) for c in module.computations}
    for computation in module.computations:
        body = {i.id: i for i in computation.instructions}
        for instruction in computation.instructions:
            opcode, operands = instruction.opcode, [body[i].shape for i in instruction.operand_ids]
            if opcode not in OPCODES or (opcode == "custom-call" and not calls):
                yield f"it has the operation {opcode}, which no build of its spec writes"
            elif opcode == "custom-call":
                yield from _call_faults(instruction, operands)
            elif opcode in _NO_INTEGERS and operands and operands[0].element_type in _INTEGERS:
                # a scatter may store integers
                stores = opcode == "scatter" and roots[instruction.called_computation_ids[0]].opcode == "parameter"
                if not stores:
                    yield f"it has the operation {opcode} on integers, which no device takes ({_NO_INTEGERS[opcode]})"


def _call_faults(call: Any, operands: list[Any]) -> Iterator[str]:
    """The CPU trusts a launch's text for the memory of operands and results."""
    if call.custom_call_target != TARGET:
        yield f"it calls {call.custom_call_target or 'nothing'}, which no build writes"
        return
    try:
        launch, given = from_text(call.backend_config.decode())
        stated = [given, launch.outputs(given)]
        _ = filled(launch.arguments, given), launch.sums, KERNELS[launch.kernel]
        changed = [(number, len(launch.results) + at) for at, number in enumerate(launch.changed)]
    except _MALFORMED:
        yield "it has a kernel call whose text is no launch (NCC_EVRF059)"
        return
    # one result comes as its memory, several as a list of addresses; a different version gives no text
    several = call.shape.element_type == _TUPLE
    shapes = [
        [_tensor("", s) for s in side] for side in (operands, call.shape.tuple_shapes if several else [call.shape])
    ]
    aliases = [(a.operand_index, a.output_shape_index[0]) for a in call.output_operand_aliasing if a.output_shape_index]
    for wrong, clause in (
        (launch.lnc != LNC, f"on {launch.lnc!r} cores in a graph of {LNC} (NCC_EVRF066)"),
        (several != (len(stated[1]) > 1) or call.custom_call_api_version != API_VERSION, "in a form no build writes"),
        ([[TensorSpec("", *result) for result in side] for side in stated] != shapes, "with a text of other shapes"),
        (sorted(aliases) != sorted(changed), "without what it writes in place"),
    ):
        if wrong:
            yield f"it calls {launch.kernel} {clause}"


class _Walk:
    """A module's computations by id, and what one execution of each runs and reads."""

    def __init__(self, module: Any) -> None:
        self.bodies = {c.id: {i.id: i for i in c.instructions} for c in module.computations}
        self.roots = {c.id: c.root_id for c in module.computations}
        # a layer is called many times and read once
        self.runs = functools.cache(self._runs)
        self.read = functools.cache(lambda computation: frozenset(self._read(computation)))

    def _runs(self, computation: int) -> Counter[tuple[str, Groups]]:
        """How often each collective and each kernel, without groups, runs: calls followed, loops counted."""
        total: Counter[tuple[str, Groups]] = Counter()
        for i in self.bodies[computation].values():
            times = self._trips(computation, i) if i.opcode == "while" else 1
            if i.opcode in COLLECTIVES:
                total[i.opcode, tuple(tuple(group.replica_ids) for group in i.replica_groups)] += 1
            elif i.custom_call_target == TARGET:
                launch = from_text(i.backend_config.decode())[0]
                count, groups = launch.sums
                total += Counter({(launch.kernel, ()): 1, ("all-reduce", groups): count})
            for called in i.called_computation_ids:
                total.update({key: count * times for key, count in self.runs(called).items()})
        return total

    def _trips(self, computation: int, loop: Any) -> int:
        """Rounds of a counted loop as jax writes it: from a constant 0, by a constant 1, below a constant."""
        (body, body_root), (condition, stop) = (
            (self.bodies[c], self.bodies[c][self.roots[c]]) for c in loop.called_computation_ids
        )
        first = self.bodies[computation][loop.operand_ids[0]]
        if (stop.opcode, stop.comparison_direction, first.opcode, body_root.opcode) == (
            "compare",
            "LT",
            *["tuple"] * 2,
        ):
            counter, end = (condition[i] for i in stop.operand_ids)
            at = counter.tuple_index
            begin, following = self.bodies[computation][first.operand_ids[at]], body[body_root.operand_ids[at]]
            counts = _is_item(condition, counter, at) and _is_next(body, following, at)
            if counts and _value(begin) == 0 and 0 <= (times := _value(end)) <= MAX_TRIPS:
                return times
        raise ValueError(f"{loop.name} runs a number of times that cannot be determined, or over {MAX_TRIPS}")

    def _read(self, computation: int) -> Iterator[int]:
        """The parameters of a computation that an instruction reads, calls followed."""
        body = self.bodies[computation]
        numbers = {i.id: i.parameter_number for i in body.values() if i.opcode == "parameter"}
        for instruction in body.values():
            called = self.read(instruction.called_computation_ids[0]) if instruction.opcode == "call" else None
            for at, operand in enumerate(instruction.operand_ids):
                if operand in numbers and (called is None or at in called):
                    yield numbers[operand]


def _is_item(body: dict[int, Any], found: Any, at: int) -> bool:
    """Whether an instruction is this item of its computation's parameter."""
    item = (found.opcode, found.tuple_index) == ("get-tuple-element", at)
    return item and body[found.operand_ids[0]].opcode == "parameter"


def _is_next(body: dict[int, Any], found: Any, at: int) -> bool:
    """Whether an instruction adds 1 to this item of its computation's parameter."""
    terms = [body[i] for i in found.operand_ids]
    added = found.opcode == "add" and len(terms) == 2
    return added and any(_is_item(body, a, at) and _value(b) == 1 for a, b in (terms, terms[::-1]))


def _value(instruction: Any) -> int:
    """The number of a constant; -1 for anything else."""
    numbers = [*instruction.literal.s32s, *instruction.literal.s64s]
    return numbers[0] if instruction.opcode == "constant" and len(numbers) == 1 else -1


def _interface(graph: GraphSpec, found: Signature) -> Iterator[str]:
    yield from _differences(
        "parameter", found.parameters, (*graph.weights, *graph.inputs, *graph.state), border.parameter_names(graph)
    )
    yield from _differences("result", found.results, graph.outputs + graph.state, border.result_names(graph))
    first_state = len(graph.weights) + len(graph.inputs)
    aliases = {len(graph.outputs) + i: first_state + i for i in range(len(graph.state))}
    if found.aliases != aliases:
        yield f"its aliases, result to parameter, are {found.aliases}, expected {aliases}"
    if not found.must_alias:
        yield "its aliases may be dropped, and state stays in one place"
    for at in found.repeated:
        yield f"result {at} is a parameter or another result, and no copy of it"


def _differences(
    what: str, found: tuple[TensorSpec, ...], wanted: Iterable[TensorSpec], names: list[str]
) -> Iterator[str]:
    if len(found) != len(names):
        yield f"it has {len(found)} {what}s, expected {len(names)}"
    for at, (tensor, planned, name) in enumerate(zip(found, wanted, names, strict=False)):
        if tensor != (expected := replace(planned, name=name)):
            one, other = (f"{t.name} {t.dtype} {t.shape}" for t in (tensor, expected))
            yield f"{what} {at} is {one}, expected {other}"


def _collectives(graph: GraphSpec, found: HloSummary, tp: int) -> Iterator[str]:
    counted = Counter[str]()
    for (opcode, groups), times in found.collectives.items():
        counted[opcode] += times
        if sorted(rank for group in groups for rank in group) != list(range(tp)):
            yield f"an {opcode} has the groups {groups}, which do not share out {tp} ranks"
    if counted != Counter({opcode: times for opcode, times in graph.collectives.items() if times}):
        yield f"it runs the collectives {dict(counted)}, expected {graph.collectives}"


def _folded(graph: GraphSpec, found: HloSummary, spec: BundleSpec) -> Iterator[str]:
    halved = graph.key.stage in (Stage.DRAFT, Stage.VERIFY)
    for weight in (w for at, w in enumerate(graph.weights) if at in found.unread and w.name.endswith(".weight")):
        # a half of a step omits some of the draft, and a drafter names others
        model, _, name = weight.name.partition(".")
        if model != "draft_model" or not (halved or spec.drafter_type.unused_weight(graph.key, name)):
            yield f"nothing reads {weight.name}"
    if found.largest_constant > CONSTANT_BYTES:
        yield f"a constant of {found.largest_constant} bytes is folded in, the largest may have {CONSTANT_BYTES}"
