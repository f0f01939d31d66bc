"""Rewrites two patterns that XLA compiles badly for CPUs; results keep every bit.

- XLA searches the maximum of a row one number after the other. Rewritten as the maxima of columns, then the maximum of
  these, the search runs on vectors; a maximum is exact in any order.
- XLA packs a product number by number if both operands have the summed axis last. With the second one transposed
  first it sums the same products in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

# numbers left of a row after the maxima of its columns: two registers of fp32
_COLUMNS = 16


def rewrite(module: ir.Module) -> None:
    """Change a parsed module's maxima and products of batches."""
    for operation in list(operations(module)):
        if operation.name == "stablehlo.reduce":
            _by_columns(operation)
        elif operation.name == "stablehlo.dot_general":
            _turned_first(operation)


def operations(module: ir.Module) -> Iterator[Any]:
    """The operations of all functions of a module, those inside of others too."""
    return _inside(module.operation)


def _inside(outer: Any) -> Iterator[Any]:
    for region in outer.regions:
        for block in region.blocks:
            for operation in block.operations:
                yield operation.operation
                yield from _inside(operation)


def _by_columns(reduce: Any) -> None:
    """The maximum of long rows along their last axis, in two steps."""
    if len(reduce.results) != 1 or reduce.regions[0].blocks[0].operations[0].operation.name != "stablehlo.maximum":
        return
    row = ir.RankedTensorType(reduce.operands[0].type)
    *others, numbers = row.shape
    if list(reduce.attributes["dimensions"]) != [len(others)] or numbers % _COLUMNS or numbers < 4 * _COLUMNS:
        return
    by_columns = ir.RankedTensorType.get([*others, numbers // _COLUMNS, _COLUMNS], row.element_type)
    with ir.InsertionPoint(reduce), reduce.location:
        first = reduce.clone()
        first.operands[0] = stablehlo.ReshapeOp(by_columns, reduce.operands[0]).result
        first.move_before(reduce)
        first.results[0].set_type(ir.RankedTensorType.get([*others, _COLUMNS], row.element_type))
        # XLA would join the two steps again
        reduce.operands[0] = stablehlo.OptimizationBarrierOp(list(first.results)).results[0]


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
