"""What neuronx-cc takes in no graph: operations that its notes and its error codes name, and calls of odd kernels.

Source of the operations: the limits that the Neuron SDK states for graphs of JAX and torch_xla
(frameworks/jax/setup/jax-neuronx-known-issues.rst, aws-neuron/aws-neuron-sdk); of the codes: compiler/error-codes of
the SDK's documents, 2.32 and 2.33.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from model.graph_spec import TensorSpec
from model.nki.launches import API_VERSION, LNC, TARGET, filled, from_text

# source: enum PrimitiveType of xla/xla_data.proto (openxla/xla)
ELEMENT = {1: ("pred", 1), 4: ("int32", 4), 8: ("uint32", 4), 11: ("float32", 4), 16: ("bfloat16", 2)}
_INTEGERS = frozenset(range(1, 10))
_S64, _TUPLE = 5, 13
UNSUPPORTED = frozenset((
    "conditional", "reduce-precision", "rng", "rng-bit-generator", "infeed", "outfeed", "send", "recv", "send-done",
    "recv-done", "complex", "real", "imag", "fft",
))  # fmt: skip
# operations whose numbers have no integer path in the hardware, with --implicit-integer-downcast=none
_NO_INTEGERS = {
    "dot": "dot of integers (NCC_EVRF035)",
    "scatter": "scatter that computes with integers (NCC_EVRF060)",
    "all-reduce": "all-reduce of integers (NCC_EVRF061)",
    "reduce-scatter": "reduce-scatter of integers (NCC_EVRF063)",
}
_MOVES = ("broadcast", "reshape", "transpose", "slice", "convert", "copy")
Body = Mapping[int, Any]
Span = tuple[int, int]


def tensor(name: str, shape: Any) -> TensorSpec:
    """An array of a proto."""
    kind = ELEMENT.get(shape.element_type, (f"element type {shape.element_type}", 0))[0]
    return TensorSpec(name, tuple(shape.dimensions), kind)


def of_instruction(instruction: Any, body: Body, bodies: Mapping[int, Body], roots: Mapping[int, int]) -> Iterator[str]:
    """Each reason why the compiler refuses an instruction, whose operands are in `body`."""
    opcode, operands = instruction.opcode, [body[i] for i in instruction.operand_ids]
    if opcode in UNSUPPORTED:
        yield opcode
    elif opcode == "reduce" and len(operands) > 2:
        yield "reduce of several operands"
    elif opcode == "power" and instruction.shape.element_type == _S64:
        yield "power of int64 (NCC_EVRF062)"
    elif opcode == "custom-call":
        yield from _of_call(instruction, operands)
    if opcode in _NO_INTEGERS and _INTEGERS & {o.shape.element_type for o in operands[:1]}:
        inner = [bodies[c][roots[c]] for c in instruction.called_computation_ids] if opcode == "scatter" else []
        # a scatter may store integers
        if opcode != "scatter" or any(i.opcode != "parameter" for i in inner):
            yield _NO_INTEGERS[opcode]
    if opcode in ("scatter", "gather") and _outside(instruction, operands, body):
        yield f"{opcode} outside of its operand (NCC_EVRF0{31 if opcode == 'scatter' else 56})"


def _outside(instruction: Any, operands: list[Any], body: Body) -> bool:
    """Whether an index that follows from the graph alone lies outside of the operand."""
    is_scatter = instruction.opcode == "scatter"
    indexed = instruction.scatter_dimension_numbers if is_scatter else instruction.gather_dimension_numbers
    sizes = list(operands[0].shape.dimensions)
    taken = [1] * len(sizes) if is_scatter else list(instruction.gather_slice_sizes)
    vectors, axis = operands[1], indexed.index_vector_dim
    parts = [vectors] * len(indexed.axes)
    joined = [body[i] for i in vectors.operand_ids] if vectors.opcode == "concatenate" else []
    if len(joined) == len(indexed.axes) and list(vectors.dimensions) == [axis]:
        parts = joined
    spans = [(_span(part, body), sizes[a] - taken[a]) for part, a in zip(parts, indexed.axes, strict=True)]
    return any(span is not None and (span[0] < 0 or span[1] > last) for span, last in spans)


def _span(instruction: Any, body: Body) -> Span | None:
    """The smallest and the largest number of an iota or a constant that is moved and not computed with; else None."""
    # as many steps as there are instructions: a forged graph may go in a circle
    for _ in body:
        if instruction.opcode == "iota":
            return 0, instruction.shape.dimensions[instruction.dimensions[0] if instruction.dimensions else 0] - 1
        if instruction.opcode == "constant":
            held = [*instruction.literal.s32s, *instruction.literal.s64s]
            return (min(held), max(held)) if held else None
        if instruction.opcode not in _MOVES:
            return None
        instruction = body[instruction.operand_ids[0]]
    return None


def _of_call(call: Any, operands: list[Any]) -> Iterator[str]:
    """The faults of a custom call: the CPU trusts its text for the memory of operands and results."""
    if call.custom_call_target != TARGET:
        yield f"call of {call.custom_call_target or 'nothing'}"
        return
    try:
        launch, given = from_text(call.backend_config.decode())
        told = [given, launch.outputs(given)]
        _ = filled(launch.arguments, given), launch.sums
        first = len(launch.results)
        changed = [(number, first + at) for at, number in enumerate(launch.changed)]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        yield "kernel call whose text is no launch (NCC_EVRF059)"
        return
    if launch.lnc != LNC:
        yield f"call of {launch.kernel} on {launch.lnc!r} cores in a graph of {LNC} (NCC_EVRF066)"
    # one result comes as its memory, several as a list of addresses; a different version gives no text
    several = call.shape.element_type == _TUPLE
    shapes = list(call.shape.tuple_shapes) if several else [call.shape]
    if several != (len(told[1]) > 1) or call.custom_call_api_version != API_VERSION:
        yield f"call of {launch.kernel} in a form that no build writes"
    passed = [[tensor("", o.shape) for o in operands], [tensor("", s) for s in shapes]]
    if [[TensorSpec("", *result) for result in side] for side in told] != passed:
        yield f"call of {launch.kernel} whose text has other shapes than its operands"
    aliases = [(a.operand_index, a.output_shape_index[0]) for a in call.output_operand_aliasing if a.output_shape_index]
    if sorted(aliases) != sorted(changed):
        yield f"call of {launch.kernel} that does not say what it writes in place"
