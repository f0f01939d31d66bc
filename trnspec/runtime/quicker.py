"""Rewrites three patterns that XLA compiles badly for CPUs; results keep every bit.

- XLA searches the maximum of a row one number after the other. Rewritten as the maxima of columns, then the maximum of
  these, the search runs on vectors; a maximum is exact in any order.
- XLA packs a product number by number if both operands have the summed axis last. With the second one transposed
  first it sums the same products in the same order.
- XLA computes the cos and sin of angles anew for every head of every layer, in the loops that read them. It joins no
  loop with a product, so they go through one with the identity, which changes no number but the sign of a zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

# numbers left of a row after its columns are reduced: a register of fp32
COLUMNS = 16


def rewrite(module: ir.Module) -> None:
    """Change a parsed module's maxima and products of batches."""
    for operation in list(operations(module)):
        if operation.name == "stablehlo.reduce":
            _by_columns(operation)
        elif operation.name == "stablehlo.dot_general":
            _turned_first(operation)
        elif operation.name in ("stablehlo.cosine", "stablehlo.sine"):
            _once(operation)


def operations(module: ir.Module) -> Iterator[Any]:
    """The operations of all functions of a module, those inside of others too."""
    return _inside(module.operation)


def functions_of(module: ir.Module, function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """The functions of a module that a build has made of this one (`Ops.shared`), each with its name there."""
    numbered = re.compile(rf"{function.__name__}(_\d+)?(\.\d+)?")
    named = [(ir.StringAttr(f.attributes["sym_name"]).value, f) for f in list[Any](module.body.operations)]
    return [(name, f) for name, f in named if numbered.fullmatch(name)]


def _inside(outer: Any) -> Iterator[Any]:
    for region in outer.regions:
        for block in region.blocks:
            for operation in block.operations:
                yield operation.operation
                yield from _inside(operation)


def _by_columns(reduce: Any) -> None:
    """The maximum of long rows along their last axis, in two steps."""
    numbers = along_rows(reduce, "stablehlo.maximum")
    if numbers % COLUMNS or numbers < 4 * COLUMNS:
        return
    with ir.InsertionPoint(reduce), reduce.location:
        first = of_columns(reduce, reduce.operands[0])
        # XLA would join the two steps again
        reduce.operands[0] = stablehlo.OptimizationBarrierOp([first]).results[0]


def along_rows(reduce: Any, name: str) -> int:
    """How many numbers of a row a reduction joins by this operation, 0 if it is a different one or along other axes."""
    if len(reduce.results) != 1 or reduce.regions[0].blocks[0].operations[0].operation.name != name:
        return 0
    *others, numbers = ir.RankedTensorType(reduce.operands[0].type).shape
    return numbers if list(reduce.attributes["dimensions"]) == [len(others)] else 0


def of_columns(reduce: Any, rows: Any) -> Any:
    """(..., 16) the reduction along rows, each of whole columns, of the columns instead; where the caller inserts."""
    row, like = ir.RankedTensorType(rows.type), reduce.clone()
    *others, numbers = row.shape
    by_columns = ir.RankedTensorType.get([*others, numbers // COLUMNS, COLUMNS], row.element_type)
    like.operands[0] = stablehlo.ReshapeOp(by_columns, rows).result
    like.move_before(reduce)
    like.results[0].set_type(ir.RankedTensorType.get([*others, COLUMNS], row.element_type))
    return like.results[0]


def _once(operation: Any) -> None:
    """The fp32 result of an operation, multiplied by the identity: no loop that reads it computes it again."""
    type_ = ir.RankedTensorType(operation.results[0].type)
    if not type_.rank or not isinstance(type_.element_type, ir.F32Type):
        return
    axis, numbers = type_.rank - 1, type_.shape[-1]
    ones = ir.DenseElementsAttr.get(np.eye(numbers, dtype=np.float32))  # type: ignore[call-overload]
    with ir.InsertionPoint.after(operation), operation.location:
        contracted = stablehlo.DotDimensionNumbers.get([], [], [axis], [0])
        same = stablehlo.DotGeneralOp(type_, operation.results[0], stablehlo.ConstantOp(ones).result, contracted)
    operation.results[0].replace_all_uses_except(same.result, same.operation)


def _turned_first(product: Any) -> None:
    """A product of batches of matrices, rows by rows: of rows by columns."""
    left, right = product.operands
    numbers = stablehlo.DotDimensionNumbers(product.attributes["dot_dimension_numbers"])
    rank = len(ir.RankedTensorType(right.type).shape)
    last, batch = [rank - 1], list(range(rank - 2))
    sides = (numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions)
    batches = (numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions)
    rows = ir.RankedTensorType(left.type).shape
    # for one row XLA compiles different code, with different sums
    if not batch or list(map(list, sides)) != [last] * 2 or list(map(list, batches)) != [batch] * 2 or rows[-2] == 1:
        return
    with ir.InsertionPoint(product), product.location:
        turned = stablehlo.TransposeOp(right, ir.DenseI64ArrayAttr.get([*batch, rank - 1, rank - 2]))
        # XLA would transpose it back
        product.operands[1] = stablehlo.OptimizationBarrierOp([turned.result]).results[0]
        product.attributes["dot_dimension_numbers"] = stablehlo.DotDimensionNumbers.get(
            lhs_batching_dimensions=batch,
            rhs_batching_dimensions=batch,
            lhs_contracting_dimensions=last,
            rhs_contracting_dimensions=[rank - 2],
        )
