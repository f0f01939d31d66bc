"""HLO protos: read, made canonical, and given the names of a graph's I/O.

jaxlib writes 64-bit instruction ids, which readers built on an older XLA refuse, and names that count the process's
earlier lowerings. It writes replica groups in a field that an older XLA does not know, which then takes all ranks as
one group: they are written to the old field too. Only fields that are used here are described; protobuf keeps others.
"""

from dataclasses import replace
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from model.graph_spec import GraphSpec, TensorSpec

# source: the field numbers of xla/service/hlo.proto (openxla/xla). `name number type`, `*` for a repeated field
_MESSAGES = {
    "Shape": "element_type 2 int64, dimensions 3 int64*, tuple_shapes 4 Shape*",
    "Entry": "key 1 string, value 2 string",
    "Attributes": "map 1 Entry*",
    "Program": "result 2 Shape, parameter_names 3 string*",
    "OutputAlias": "output_shape_index 1 int64*, operand_index 2 int64",
    "ReplicaGroup": "replica_ids 1 int64*",
    "Devices": "replica_groups 1 ReplicaGroup*",
    "Alias": "output_shape_index 1 int64*, parameter_number 2 int64, kind 4 int64",
    "Aliases": "entries 1 Alias*",
    "Literal": "s32s 4 int64*",
    "Instruction": "name 1 string, opcode 2 string, shape 3 Shape, literal 8 Literal, parameter_number 9 int64, "
    "tuple_index 13 int64, custom_call_target 28 string, id 35 int64, operand_ids 36 int64*, "
    "control_predecessor_ids 37 int64*, called_computation_ids 38 int64*, comparison_direction 63 string, "
    "backend_config 43 bytes, replica_groups 49 ReplicaGroup*, frontend_attributes 68 Attributes, "
    "output_operand_aliasing 74 OutputAlias*, custom_call_api_version 77 int64, collective_device_list 87 Devices",
    "Computation": "name 1 string, instructions 2 Instruction*, program_shape 4 Program, id 5 int64, root_id 6 int64",
    "Module": "name 1 string, entry_computation_name 2 string, computations 3 Computation*, "
    "host_program_shape 4 Program, id 5 int64, entry_computation_id 6 int64, input_output_alias 8 Aliases",
}
# frontend attributes with the name of a parameter, and at the root those of the results: neuronx-cc and the device's
# runtime find tensors by name. A state's parameter and its result share a buffer, and their names differ by STATE.
# Source: the protos that nkipy writes (aws-neuron/nkipy, nkipy/core/trace.py and core/backend/hlo.py)
_INPUT, _OUTPUTS, STATE = "neff_input_names", "neff_output_names", ".must_alias_input"
# source: enum Kind of xla/service/hlo.proto (openxla/xla)
MUST_ALIAS = 2


def _module_class() -> Any:
    field = descriptor_pb2.FieldDescriptorProto
    scalars = {"int64": field.TYPE_INT64, "string": field.TYPE_STRING, "bytes": field.TYPE_BYTES}
    file = descriptor_pb2.FileDescriptorProto(name="trnspec_hlo.proto", package="trnspec_hlo", syntax="proto3")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, number, kind in (text.split() for text in fields.split(", ")):
            base, label = kind.rstrip("*"), field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
            reference = {} if base in scalars else {"type_name": f".trnspec_hlo.{base}"}
            kind_number = scalars.get(base, field.TYPE_MESSAGE)
            described.field.add(name=name, number=int(number), label=label, type=kind_number, **reference)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("trnspec_hlo.Module"))


_MODULE = _module_class()


def parse(proto: bytes) -> Any:
    """The module of a serialized HloModuleProto, as far as its fields are described here."""
    return _MODULE.FromString(proto)


def entry(module: Any) -> Any:
    return next(c for c in module.computations if c.id == module.entry_computation_id)


def canonical(proto: bytes) -> Any:
    """The module of a proto with ids 1, 2, 3, ... and names that end in them."""
    module = parse(proto)
    _renumber(module)
    for computation in module.computations:
        for named in (computation, *computation.instructions):
            named.name = f"{named.name.split('.')[0]}.{named.id}"
        for instruction in computation.instructions:
            if not instruction.replica_groups:
                instruction.replica_groups.extend(instruction.collective_device_list.replica_groups)
    module.entry_computation_name = entry(module).name
    module.ClearField("id")
    return module


def _renumber(module: Any) -> None:
    """Computations and instructions share one number space, a computation after its instructions."""
    nodes = [(node, node is not c) for c in module.computations for node in (*c.instructions, c)]
    numbers = {(is_instruction, node.id): at for at, (node, is_instruction) in enumerate(nodes, 1)}
    for node, is_instruction in nodes:
        node.id = numbers[is_instruction, node.id]
        if is_instruction:
            for ids in (node.operand_ids, node.control_predecessor_ids):
                ids[:] = [numbers[True, i] for i in ids]
            node.called_computation_ids[:] = [numbers[False, i] for i in node.called_computation_ids]
        else:
            node.root_id = numbers[True, node.root_id]
    module.entry_computation_id = numbers[False, module.entry_computation_id]


def io_specs(graph: GraphSpec) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """A graph's parameters and its results in order, with their names in the proto."""
    inputs = (replace(tensor, name=tensor.name + STATE) for tensor in graph.state)
    return [*graph.weights, *graph.inputs, *inputs], [*graph.outputs, *graph.state]


def annotated(module: Any, graph: GraphSpec) -> bytes:
    """The proto of a canonical module with the names of its I/O, and its state aliased without a choice.

    The compiler separates inputs from outputs, so a result that is a parameter, or another result, is copied.
    """
    body, (names, results) = entry(module), ([tensor.name for tensor in side] for side in io_specs(graph))
    parameters = [i for i in body.instructions if i.opcode == "parameter"]
    root = next(i for i in body.instructions if i.id == body.root_id)
    for parameter in parameters:
        parameter.name = names[parameter.parameter_number]
        parameter.frontend_attributes.map.add(key=_INPUT, value=parameter.name)
    root.frontend_attributes.map.add(key=_OUTPUTS, value=",".join(results))
    for shape in (module.host_program_shape, body.program_shape):
        shape.parameter_names[:] = names
    for alias in module.input_output_alias.entries:
        alias.kind = MUST_ALIAS
    fresh, taken = 1 + max(x.id for c in module.computations for x in (c, *c.instructions)), {p.id for p in parameters}
    for at, operand in enumerate(root.operand_ids):
        if operand in taken:
            copy = body.instructions.add(id=fresh, name=f"copy.{fresh}", opcode="copy", operand_ids=[operand])
            copy.shape.CopyFrom(root.shape.tuple_shapes[at])
            root.operand_ids[at] = fresh
            fresh += 1
        taken.add(root.operand_ids[at])
    # an operand comes before its user
    body.instructions.sort(key=lambda i: i.id == body.root_id)
    return module.SerializeToString(deterministic=True)


def io_names(instruction: Any) -> list[str]:
    """The name of a parameter, or those of a root's results."""
    named = (e.value for e in instruction.frontend_attributes.map if e.key in (_INPUT, _OUTPUTS))
    return next(named, "").split(",")
