"""Compares a graph's HLO proto with its plan: at a build, in the doctor, and before a loaded graph runs.

A runtime finds parameters, results and aliases by their order, and a collective with wrong groups never ends or sums
the wrong ranks. Source of the codes: compiler/error-codes of the SDK's documents, 2.33.
"""

import functools
import math
import re
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from model.dtypes import FP8
from model.graph_spec import GraphSpec, TensorSpec
from model.nki.launches import API_VERSION, CUSTOM_CALL_TARGET, LNC, filled, from_text
from model.nki.table import KERNELS
from trnspec.bundle import hlo
from trnspec.bundle.spec import BundleSpec

# the operations that builds write
_OPCODES = """
    abs add all-gather all-reduce and broadcast call compare concatenate constant convert copy cosine custom-call divide
    dot exponential gather get-tuple-element iota log maximum minimum multiply negate not or pad parameter power reduce
    remainder reshape rsqrt scatter select shift-left shift-right-arithmetic sign sine slice subtract transpose tuple
    while xor
"""
OPCODES = frozenset(_OPCODES.split())
_COLLECTIVES = ("all-reduce", "all-gather")
# operations on integers that the hardware does not have, with --implicit-integer-downcast=none
_NO_INTEGERS = {"dot": "NCC_EVRF035", "scatter": "NCC_EVRF060", "all-reduce": "NCC_EVRF061"}
# source: enum PrimitiveType of xla/xla_data.proto (openxla/xla)
_ELEMENTS = {
    1: ("pred", 1),
    4: ("int32", 4),
    8: ("uint32", 4),
    11: ("float32", 4),
    16: ("bfloat16", 2),
    28: (FP8.name, 1),
}
_INTEGERS, _TUPLE = frozenset(range(1, 10)), 13
# weights are parameters of a graph. Rotary frequencies are its largest constant; a weight of any real model is larger
CONSTANT_BYTES = 1024
# the most numbers that a graph computes for a row, by the numbers of its parameters and by the ids that it samples
# from: builds compute at most a tenth of it
_MAX_WORK, _SAMPLING_WORK = 32, 1024
_COUNTER = re.escape("get-tuple-element0[](parameter0[]())")
# the first number of a loop's start, of its body's result, and its condition
_LOOP = re.compile(
    rf"constant0\[0\]\(\) add0\[\]\({_COUNTER},constant0\[1\]\(\)\) "
    rf"compareLT0\[\]\({_COUNTER},constant0\[(\d+)\]\(\)\)"
)
_MALFORMED = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, StopIteration, DecodeError)


class Signature(NamedTuple):
    """Parameters and results in order; result -> parameter of each alias, -1 if it is optional."""

    parameters: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    aliases: dict[int, int]


def violations(graph: GraphSpec, proto: bytes | bytearray, spec: BundleSpec) -> list[str]:
    """One clause for each way in which a proto is not the graph that the plan of a spec describes."""
    try:
        module = hlo.parse(bytes(proto))
        faults = sorted(set(_instruction_faults(module, spec))) or list(_interface(graph, signature(module)))
        return faults or list(_work_faults(module, graph, spec))
    except _MALFORMED as error:
        return [f"it cannot be followed ({error})"]


def signature(module: Any) -> Signature:
    entry, aliases = hlo.entry(module), module.input_output_alias.entries
    parameters = sorted((i for i in entry.instructions if i.opcode == "parameter"), key=lambda i: i.parameter_number)
    root = next(i for i in entry.instructions if i.id == entry.root_id)
    return Signature(
        tuple(_tensor(hlo.io_names(p)[0], p.shape) for p in parameters),
        tuple(_tensor(n or "", s) for n, s in zip_longest(hlo.io_names(root), root.shape.tuple_shapes) if s),
        {[*a.output_shape_index, 0][0]: a.parameter_number if a.kind == hlo.MUST_ALIAS else -1 for a in aliases},
    )


def _tensor(name: str, shape: Any) -> TensorSpec:
    kind = _ELEMENTS.get(shape.element_type, (f"element type {shape.element_type}", 0))[0]
    return TensorSpec(name, tuple(shape.dimensions), kind)


def _instruction_faults(module: Any, spec: BundleSpec) -> Iterator[str]:
    ranks, roots = [list(range(spec.tp))], {c.id: c.root_id for c in module.computations}
    opcodes = OPCODES - {"custom-call"} if spec.kernels == "reference" else OPCODES
    bodies = {c.id: {i.id: i for i in c.instructions} for c in module.computations}
    for body in bodies.values():
        for i in body.values():
            operands = [body[operand].shape for operand in i.operand_ids]
            groups = [list(group.replica_ids) for group in i.replica_groups]
            size = math.prod(i.shape.dimensions) * _ELEMENTS.get(i.shape.element_type, ("", 8))[1]
            if i.opcode not in opcodes:
                yield f"it has the operation {i.opcode}, which no build of its spec writes"
            elif i.opcode == "custom-call":
                yield from _call_faults(i, operands, spec.tp)
            elif i.opcode == "constant" and size > CONSTANT_BYTES:
                yield f"a constant of {size} bytes is folded in, the largest may have {CONSTANT_BYTES}"
            elif i.opcode in _COLLECTIVES and groups != ranks:
                yield f"its {i.opcode} has the groups {groups}, expected all {spec.tp} ranks"
            elif i.opcode in _NO_INTEGERS and operands and operands[0].element_type in _INTEGERS:
                # a scatter may store integers
                called = [bodies[c][roots[c]].opcode for c in i.called_computation_ids]
                if i.opcode != "scatter" or called != ["parameter"]:
                    yield f"it has {i.opcode} on integers, which no device takes ({_NO_INTEGERS[i.opcode]})"


def _call_faults(call: Any, operands: list[Any], tp: int) -> Iterator[str]:
    """The CPU trusts a launch's text for the memory of operands and results."""
    if call.custom_call_target != CUSTOM_CALL_TARGET:
        yield f"it calls {call.custom_call_target or 'nothing'}, which no build writes"
        return
    try:
        launch, given = from_text(call.backend_config.decode())
        stated, (_, groups) = [given, launch.outputs(given)], launch.sums
        _ = filled(launch.arguments, given), KERNELS[launch.kernel]
        changed = [(number, len(launch.results) + at) for at, number in enumerate(launch.changed)]
    except _MALFORMED:
        yield "it has a kernel call whose text is no launch (NCC_EVRF059)"
        return
    # one result comes as its memory, several as a list of addresses; a different version gives no text
    several = call.shape.element_type == _TUPLE
    results = call.shape.tuple_shapes if several else [call.shape]
    shapes = [[_tensor("", s) for s in side] for side in (operands, results)]
    aliases = [(a.operand_index, a.output_shape_index[0]) for a in call.output_operand_aliasing if a.output_shape_index]
    for wrong, clause in (
        (launch.lnc != LNC, f"on {launch.lnc!r} cores in a graph of {LNC} (NCC_EVRF066)"),
        (groups not in ((), (tuple(range(tp)),)), f"with the groups {groups}, expected all {tp} ranks"),
        (several != (len(stated[1]) > 1) or call.custom_call_api_version != API_VERSION, "in a form no build writes"),
        ([[TensorSpec("", *result) for result in side] for side in stated] != shapes, "with a text of other shapes"),
        (sorted(aliases) != sorted(changed), "without what it writes in place"),
    ):
        if wrong:
            yield f"it calls {launch.kernel} {clause}"


def _work_faults(module: Any, graph: GraphSpec, spec: BundleSpec) -> Iterator[str]:
    """A clause if a graph computes more than its parameters and the sampling of its rows need."""
    bodies = {c.id: ({i.id: i for i in c.instructions}, c.root_id) for c in module.computations}

    @functools.cache
    def work(computation: int) -> float:
        body, total = bodies[computation][0], 0.0
        for i in body.values():
            operands, result = [_size(body[operand].shape) for operand in i.operand_ids], _size(i.shape)
            # a dot of (M, K) and (K, N) has M K N products
            total += math.sqrt(math.prod(operands) * result) if i.opcode == "dot" else result
            rounds = _rounds(i, body, bodies) if i.opcode == "while" else 1
            total += sum(operands) * (i.opcode == "reduce") + rounds * sum(map(work, i.called_computation_ids))
        return total

    numbers = sum(math.prod(t.shape) for side in (graph.weights, graph.inputs, graph.state) for t in side)
    rows = graph.key.rows if graph.key.is_prefill else spec.batch * (graph.key.k + 2)
    bound = _MAX_WORK * rows * (numbers + _SAMPLING_WORK * spec.target_config.vocab_size)
    if not (total := work(module.entry_computation_id)) <= bound:
        yield f"it computes {total:.3g} numbers, at most {bound:.3g} are expected"


def _rounds(loop: Any, caller: dict[int, Any], bodies: dict[int, tuple[dict[int, Any], int]]) -> int:
    """The rounds of a loop; ValueError unless its first number counts from 0 to a constant, as in every build."""
    (body, body_root), (condition, root) = (bodies[c] for c in loop.called_computation_ids)
    start, following = caller[loop.operand_ids[0]].operand_ids[0], body[body_root].operand_ids[0]
    forms = _form(caller[start], caller), _form(body[following], body), _form(condition[root], condition)
    if not (match := _LOOP.fullmatch(" ".join(forms))):
        raise ValueError("a loop does not count from 0 to a constant")
    return int(match[1])


def _form(i: Any, body: dict[int, Any], depth: int = 3) -> str:
    """An instruction and its operands as text, for `_LOOP`."""
    operands = [_form(body[operand], body, depth - 1) for operand in i.operand_ids[:2] if depth]
    return f"{i.opcode}{i.comparison_direction}{i.tuple_index}{[*i.literal.s32s]}({','.join(operands)})"


def _size(shape: Any) -> float:
    """The numbers of an array, or of all arrays of a tuple."""
    return (
        sum(map(_size, shape.tuple_shapes)) if shape.element_type == _TUPLE else math.prod(map(float, shape.dimensions))
    )


def _interface(graph: GraphSpec, actual: Signature) -> Iterator[str]:
    for what, tensors, planned in zip(("parameter", "result"), actual[:2], hlo.io_specs(graph), strict=True):
        if len(tensors) != len(planned):
            yield f"it has {len(tensors)} {what}s, expected {len(planned)}"
        for at, pair in enumerate(zip(tensors, planned, strict=False)):
            if pair[0] != pair[1]:
                one, other = (f"{t.name} {t.dtype} {t.shape}" for t in pair)
                yield f"{what} {at} is {one}, expected {other}"
    first_state = len(graph.weights) + len(graph.inputs)
    aliases = {len(graph.outputs) + i: first_state + i for i in range(len(graph.state))}
    if actual.aliases != aliases:
        yield f"its aliases, result to parameter, are {actual.aliases}, expected {aliases}"
