"""The I/O signature of a graph as text: neuronx-cc and the device's runtime find tensors by name.

A state's parameter and its result share a buffer: the parameter's name ends in `.must_alias_input`, the result has the
name without it. A parameter's name is that of its instruction and an attribute of it; the results' names are one
attribute of the root. The compiler separates inputs from outputs, so a result that is a parameter, or another result,
is a copy. Source: the protos that nkipy writes (aws-neuron/nkipy, nkipy/core/trace.py and core/backend/hlo.py).
"""

from __future__ import annotations

from typing import Any

from model.graph_spec import GraphSpec
from trnspec.bundle import hlo

# frontend attributes
_INPUT, _OUTPUTS = "neff_input_names", "neff_output_names"
STATE = ".must_alias_input"
# source: enum Kind of xla/service/hlo.proto (openxla/xla)
MUST_ALIAS = 2


def parameter_names(graph: GraphSpec) -> list[str]:
    """The names of a graph's parameters, in its order."""
    return [t.name for t in (*graph.weights, *graph.inputs)] + [t.name + STATE for t in graph.state]


def result_names(graph: GraphSpec) -> list[str]:
    """The names of a graph's results, in its order."""
    return [t.name for t in (*graph.outputs, *graph.state)]


def annotate_io(proto: bytes, graph: GraphSpec) -> bytes:
    """A canonical proto with the names of its I/O, its state aliased without a choice, no result twice."""
    module = hlo.parse(proto)
    entry, names = hlo.entry(module), parameter_names(graph)
    parameters = [i for i in entry.instructions if i.opcode == "parameter"]
    root = next(i for i in entry.instructions if i.id == entry.root_id)
    for parameter in parameters:
        parameter.name = names[parameter.parameter_number]
        parameter.ClearField("metadata")
        parameter.frontend_attributes.map.add(key=_INPUT, value=parameter.name)
    root.frontend_attributes.map.add(key=_OUTPUTS, value=",".join(result_names(graph)))
    for shape in (module.host_program_shape, entry.program_shape):
        shape.parameter_names[:] = names
    for alias in module.input_output_alias.entries:
        alias.kind = MUST_ALIAS
    _copy(module, entry, root, {p.id for p in parameters})
    serialized: bytes = module.SerializeToString(deterministic=True)
    return serialized


def input_name(parameter: Any) -> str:
    """The name of a parameter of a proto; "" if it has none."""
    return _get_attribute(parameter, _INPUT)


def output_names(root: Any) -> list[str]:
    """The names of the results of a proto's root."""
    return _get_attribute(root, _OUTPUTS).split(",")


def _get_attribute(instruction: Any, key: str) -> str:
    return next((e.value for e in instruction.frontend_attributes.map if e.key == key), "")


def _copy(module: Any, entry: Any, root: Any, taken: set[int]) -> None:
    """Put a copy before the root for each result that is in `taken`, or a result already."""
    fresh = 1 + max(x.id for c in module.computations for x in (c, *c.instructions))
    for at, operand in enumerate(root.operand_ids):
        if operand in taken:
            copy = entry.instructions.add(id=fresh, name=f"copy.{fresh}", opcode="copy", operand_ids=[operand])
            copy.shape.CopyFrom(root.shape.tuple_shapes[at])
            root.operand_ids[at] = fresh
            fresh += 1
        taken.add(root.operand_ids[at])
    # an operand comes before its user
    entry.instructions.sort(key=lambda i: i.id == entry.root_id)
