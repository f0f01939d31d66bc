"""Launches of several layers that sum over ranks, for a CPU: the halves of each layer, and the graph's own sums.

A custom call of XLA's CPU is given memory and text: it knows no rank, and while it waited for those of the other ranks
it would hold one of the client's threads. The halves have the launch's bits (tests/nki_kernels/layer/test_layers.py),
and a graph's all-reduce meets the other ranks by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from model.nki.launches import API_VERSION, TARGET, Groups, Launch, Result, filled, from_text, to_text

# a value of the graph, and its shape and dtype
Operand = tuple[Any, Result]


def take_apart(operation: Any) -> None:
    """Put halves in the place of a custom call, if it is a launch that sums over ranks."""
    if ir.StringAttr(operation.attributes["call_target_name"]).value != TARGET:
        return
    launch, of_operands = from_text(ir.StringAttr(operation.attributes["backend_config"]).value)
    count, groups = launch.sums
    if not count:
        return
    given = list(zip(operation.operands, of_operands, strict=True))
    x, layers, cos, sin, positions, table, _, eps = filled(launch.arguments, given)
    written: list[Any] = []
    with ir.InsertionPoint(operation), operation.location:
        for gamma, k_norm, q_norm, qkv, out, mlp_gamma, gate_up, down, *pools in layers:
            attention = (x, gamma, k_norm, q_norm, qkv, out, cos, sin, *pools, positions, table, eps)
            part, *changed = _call("decode_attention", attention, x, (8, 9))
            written += changed
            x = _added(x, part, groups)
            (part,) = _call("decode_mlp", (x, mlp_gamma, gate_up, down, eps), x)
            x = _added(x, part, groups)
    for use in list(operation.results[0].uses):
        index = ir.IntegerAttr(use.owner.attributes["index"]).value
        use.owner.results[0].replace_all_uses_with((x[0], *written)[index])
        use.owner.erase()
    operation.erase()


def _call(kernel: str, arguments: Sequence[Any], like: Operand, changed: tuple[int, ...] = ()) -> list[Any]:
    """The results of a half's launch: a partial sum of the rows' form, and what it changes."""
    operands = [a for a in arguments if isinstance(a, tuple)]
    plain = [f"#{operands.index(a)}" if isinstance(a, tuple) else a for a in arguments]
    launch, values = Launch(kernel, plain, (like[1],), changed), [value for value, _ in operands]
    aliases = [
        stablehlo.OutputOperandAlias.get(output_tuple_indices=[at + 1], operand_index=number, operand_tuple_indices=[])
        for at, number in enumerate(changed)
    ]
    call = stablehlo.CustomCallOp(
        [like[0].type, *(values[number].type for number in changed)], values, TARGET,
        backend_config=ir.StringAttr.get(to_text(launch, [of for _, of in operands])),
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), API_VERSION),
        output_operand_aliases=ir.ArrayAttr.get(aliases),
    )  # fmt: skip
    return list(call.results)


def _added(x: Operand, part: Any, groups: Groups) -> Operand:
    """The residual and the sum of the ranks' parts."""
    of_ranks = ir.DenseIntElementsAttr.get(np.array(groups, np.int64))  # type: ignore[call-overload]
    reduce = stablehlo.AllReduceOp([part.type], [part], of_ranks)
    scalar = ir.RankedTensorType.get([], ir.RankedTensorType(part.type).element_type)
    body = reduce.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(body):
        stablehlo.return_([stablehlo.add(*body.arguments)])
    return stablehlo.add(x[0], reduce.results[0]), x[1]
