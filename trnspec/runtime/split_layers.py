"""Splits `decode_layers` launches with all-reduces inside, so that nkisim can run them on XLA:CPU.

XLA:CPU custom calls cannot run collectives: they get no rank, and waiting would block a worker thread. Each layer
becomes the launches `decode_attention` and `decode_mlp`, with the same bits (tests/nki_kernels/layer/test_layers.py),
and all-reduces of the graph after each.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from model.nki.launches import API_VERSION, CUSTOM_CALL_TARGET, Groups, Launch, Result, filled, from_text, to_text
from trnspec.runtime.jax_compat import ir, operations, stablehlo

# an MLIR value, and its shape and dtype
Operand = tuple[Any, Result]


def split(module: ir.Module) -> None:
    """Replaces all launches of a module that have all-reduces inside."""
    for operation in list(operations(module.operation)):
        if operation.name == "stablehlo.custom_call" and _text(operation, "call_target_name") == CUSTOM_CALL_TARGET:
            launch, declared = from_text(_text(operation, "backend_config"))
            count, groups = launch.sums
            if count:
                operands = list(zip(operation.operands, declared, strict=True))
                _split(operation, filled(launch.arguments, operands), groups)


def _text(operation: Any, attribute: str) -> str:
    return ir.StringAttr(operation.attributes[attribute]).value


def _split(operation: Any, arguments: Sequence[Any], groups: Groups) -> None:
    x, layers, cos, sin, positions, table, _, eps = arguments
    caches: list[Any] = []
    with ir.InsertionPoint(operation), operation.location:
        for gamma, k_norm, q_norm, qkv, out, mlp_gamma, gate_up, down, *others in layers:
            pools, scales = others[:2], [others[2:4], others[4:]] if others[2:] else []
            attention = (x, gamma, k_norm, q_norm, qkv, out, cos, sin, *pools, positions, table, eps, *scales[:1])
            partial, *written = _call("decode_attention", attention, x, (8, 9))
            caches += written
            x = _residual(x, partial, groups)
            (partial,) = _call("decode_mlp", (x, mlp_gamma, gate_up, down, eps, *scales[1:]), x)
            x = _residual(x, partial, groups)
    for use in list(operation.results[0].uses):
        index = ir.IntegerAttr(use.owner.attributes["index"]).value
        use.owner.results[0].replace_all_uses_with((x[0], *caches)[index])
        use.owner.erase()
    operation.erase()


def _call(kernel: str, arguments: Sequence[Any], like: Operand, aliased: tuple[int, ...] = ()) -> list[Any]:
    """Launches a kernel: returns the partial sum, shaped like the rows, and the updated operands.

    A list among the arguments is the scales of FP8 weights.
    """
    flat = [a for given in arguments for a in (given if isinstance(given, list) else [given])]
    operands = [a for a in flat if isinstance(a, tuple)]

    def named(given: Any) -> Any:
        if isinstance(given, list):
            return [named(a) for a in given]
        return f"#{operands.index(given)}" if isinstance(given, tuple) else given

    launch, values = Launch(kernel, named(list(arguments)), (like[1],), aliased), [value for value, _ in operands]
    aliases = [
        stablehlo.OutputOperandAlias.get(output_tuple_indices=[at + 1], operand_index=number, operand_tuple_indices=[])
        for at, number in enumerate(aliased)
    ]
    call = stablehlo.CustomCallOp(
        [like[0].type, *(values[number].type for number in aliased)], values, CUSTOM_CALL_TARGET,
        backend_config=ir.StringAttr.get(to_text(launch, [declared for _, declared in operands])),
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), API_VERSION),
        output_operand_aliases=ir.ArrayAttr.get(aliases),
    )  # fmt: skip
    return list(call.results)


def _residual(x: Operand, partial: Any, groups: Groups) -> Operand:
    """x plus the all-reduced partial sums."""
    ranks = ir.DenseIntElementsAttr.get(np.array(groups, np.int64))  # type: ignore[call-overload]
    reduce = stablehlo.AllReduceOp([partial.type], [partial], ranks)
    scalar = ir.RankedTensorType.get([], ir.RankedTensorType(partial.type).element_type)
    body = reduce.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(body):
        stablehlo.return_([stablehlo.add(*body.arguments)])
    return stablehlo.add(x[0], reduce.results[0]), x[1]
