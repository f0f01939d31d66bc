"""HLO protos: ids and names renumbered, the tracer's source places dropped, replica groups where all readers look.

jaxlib writes 64-bit instruction ids; readers built on an older XLA expect 32 bits, with the ids of
computations and instructions in one number space. Its names count the process's earlier
lowerings, and its stack frames hold the builder's own paths: names are numbered anew and frames
dropped, so that one plan gives the same bytes in every build. It writes replica groups in a field that
an older XLA does not know; one that finds no groups takes all ranks as one. So they are written to the
old field too. Only the fields that we read or write are described here; protobuf carries all others through unread.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
# source: the field numbers of xla/service/hlo.proto (openxla/xla)
_MESSAGES: dict[str, list[tuple[str, int, str]]] = {
    "Frames": [],
    "Shape": [("element_type", 2, "int64"), ("dimensions", 3, "int64s"), ("tuple_shapes", 4, "Shape")],
    "Literal": [("s32s", 4, "int64s"), ("s64s", 5, "int64s")],
    "Entry": [("key", 1, "string"), ("value", 2, "string")],
    "Attributes": [("map", 1, "Entry")],
    "Program": [("result", 2, "Shape"), ("parameter_names", 3, "strings")],
    # of a gather and of a scatter: the operand's axes that an index vector gives, and the axis of such vectors
    "Indexed": [("axes", 3, "int64s"), ("index_vector_dim", 4, "int64")],
    "OutputAlias": [("output_shape_index", 1, "int64s"), ("operand_index", 2, "int64")],
    "ReplicaGroup": [("replica_ids", 1, "int64s")],
    "Devices": [("replica_groups", 1, "ReplicaGroup")],
    "Alias": [
        ("output_shape_index", 1, "int64s"),
        ("parameter_number", 2, "int64"),
        ("kind", 4, "int64"),
    ],
    "Aliases": [("entries", 1, "Alias")],
    "Metadata": [
        ("op_name", 2, "string"),
        ("source_file", 3, "string"),
        ("source_line", 4, "int64"),
        ("stack_frame_id", 15, "int64"),
    ],
    "Instruction": [
        ("name", 1, "string"),
        ("opcode", 2, "string"),
        ("shape", 3, "Shape"),
        ("metadata", 7, "Metadata"),
        ("literal", 8, "Literal"),
        ("parameter_number", 9, "int64"),
        ("tuple_index", 13, "int64"),
        ("dimensions", 14, "int64s"),
        ("gather_dimension_numbers", 33, "Indexed"),
        ("gather_slice_sizes", 34, "int64s"),
        ("id", 35, "int64"),
        ("operand_ids", 36, "int64s"),
        ("control_predecessor_ids", 37, "int64s"),
        ("called_computation_ids", 38, "int64s"),
        ("scatter_dimension_numbers", 48, "Indexed"),
        ("replica_groups", 49, "ReplicaGroup"),
        ("custom_call_target", 28, "string"),
        ("backend_config", 43, "bytes"),
        ("comparison_direction", 63, "string"),
        ("frontend_attributes", 68, "Attributes"),
        ("output_operand_aliasing", 74, "OutputAlias"),
        ("custom_call_api_version", 77, "int64"),
        ("collective_device_list", 87, "Devices"),
    ],
    "Computation": [
        ("name", 1, "string"),
        ("instructions", 2, "Instruction"),
        ("program_shape", 4, "Program"),
        ("id", 5, "int64"),
        ("root_id", 6, "int64"),
    ],
    "Module": [
        ("name", 1, "string"),
        ("entry_computation_name", 2, "string"),
        ("computations", 3, "Computation"),
        ("host_program_shape", 4, "Program"),
        ("id", 5, "int64"),
        ("entry_computation_id", 6, "int64"),
        ("input_output_alias", 8, "Aliases"),
        ("stack_frame_index", 17, "Frames"),
    ],
}

_SOURCE_PLACE = ("source_file", "source_line", "stack_frame_id")
# messages that a field holds once; ShapeProto is both, by the field's name
_SINGLE = ("Aliases", "Metadata", "Frames", "Literal", "Devices", "Attributes", "Program", "Indexed")


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="hlo_ids.proto", package="hlo_ids", syntax="proto3")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, number, kind in fields:
            field = described.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
            if kind in ("int64", "int64s"):
                field.type = _Field.TYPE_INT64
            elif kind in ("string", "strings"):
                field.type = _Field.TYPE_STRING
            elif kind == "bytes":
                field.type = _Field.TYPE_BYTES
            else:
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".hlo_ids.{kind}"
            once = kind in _SINGLE or name in ("shape", "result")
            if kind in ("int64s", "strings") or (field.type == _Field.TYPE_MESSAGE and not once):
                field.label = _Field.LABEL_REPEATED
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"hlo_ids.{name}")) for name in _MESSAGES}


_CLASSES = _message_classes()


def parse(proto: bytes) -> Any:
    """The module of a serialized HloModuleProto, as far as its fields are described here."""
    return _CLASSES["Module"].FromString(proto)


def entry(module: Any) -> Any:
    """The computation of a module that runs."""
    return next(c for c in module.computations if c.id == module.entry_computation_id)


def canonical(proto: bytes) -> bytes:
    """The same module with ids 1, 2, 3, ..., names that end in them, and no trace of the tracer's source."""
    module = parse(proto)
    _renumber(module)
    for computation in module.computations:
        computation.name = _numbered(computation)
        if computation.id == module.entry_computation_id:
            module.entry_computation_name = computation.name
        for instruction in computation.instructions:
            instruction.name = _numbered(instruction)
            if not instruction.replica_groups:
                instruction.replica_groups.extend(instruction.collective_device_list.replica_groups)
            if instruction.HasField("metadata"):
                for field in _SOURCE_PLACE:
                    instruction.metadata.ClearField(field)
    module.ClearField("id")
    module.ClearField("stack_frame_index")
    serialized: bytes = module.SerializeToString(deterministic=True)
    return serialized


def _renumber(module: Any) -> None:
    instructions: dict[int, int] = {}
    computations: dict[int, int] = {}
    for computation in module.computations:
        for instruction in computation.instructions:
            instructions[instruction.id] = len(instructions) + len(computations) + 1
        computations[computation.id] = len(instructions) + len(computations) + 1
    for computation in module.computations:
        computation.id = computations[computation.id]
        computation.root_id = instructions[computation.root_id]
        for instruction in computation.instructions:
            instruction.id = instructions[instruction.id]
            instruction.operand_ids[:] = [instructions[i] for i in instruction.operand_ids]
            instruction.control_predecessor_ids[:] = [instructions[i] for i in instruction.control_predecessor_ids]
            instruction.called_computation_ids[:] = [computations[i] for i in instruction.called_computation_ids]
    module.entry_computation_id = computations[module.entry_computation_id]


def _numbered(named: Any) -> str:
    return f"{named.name.split('.')[0]}.{named.id}"
