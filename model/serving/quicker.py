"""Rewrites three patterns that XLA compiles badly for CPUs; results keep every bit.

- XLA searches the maximum of a row one number after the other. Rewritten as the maxima of columns, then the maximum of
  these, the search runs on vectors; a maximum is exact in any order.
- XLA packs a product number by number if both operands have the summed axis last. With the second one transposed
  first it sums the same products in the same order.
- The loop over tiles of keys (`model/attention.py`) has a fixed number of rounds, since Trainium's compiler takes no
  other. Here it leaves out the tiles that no row sees: they are the last ones and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo

# numbers left of a row after its columns are reduced: a register of fp32
COLUMNS = 16
# how many tiles of keys begin after the last key that a row sees
_UNSEEN = """func.func private @unseen(%keys: {keys}, %last: {last}) -> tensor<i32> {{
  %none = stablehlo.constant dense<0> : tensor<i32>
  %most = stablehlo.reduce(%last init: %none) applies stablehlo.maximum across dimensions = {axes} :
    ({last}, tensor<i32>) -> tensor<i32>
  %first = stablehlo.slice %keys [0:{tiles}, 0:1] : ({keys}) -> tensor<{tiles}x1xi32>
  %here = stablehlo.broadcast_in_dim %most, dims = [] : (tensor<i32>) -> tensor<{tiles}x1xi32>
  %after = stablehlo.compare GT, %first, %here :
    (tensor<{tiles}x1xi32>, tensor<{tiles}x1xi32>) -> tensor<{tiles}x1xi1>
  %each = stablehlo.convert %after : (tensor<{tiles}x1xi1>) -> tensor<{tiles}x1xi32>
  %count = stablehlo.reduce(%each init: %none) applies stablehlo.add across dimensions = [0, 1] :
    (tensor<{tiles}x1xi32>, tensor<i32>) -> tensor<i32>
  return %count : tensor<i32>
}}"""


def rewrite(module: ir.Module) -> None:
    """Change a parsed module's loops over tiles, maxima and products of batches."""
    for operation in list(operations(module)):
        if operation.name == "stablehlo.while":
            _while_seen(operation, module)
        elif operation.name == "stablehlo.reduce":
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


def _while_seen(loop: Any, module: ir.Module) -> None:
    """A loop over tiles of keys begins its count of rounds with the tiles that no row sees."""
    functions = ir.SymbolTable(module.operation)
    condition, body = (region.blocks[0] for region in loop.regions)
    compared = _compared(body, range(len(loop.operands)), functions)
    if compared is None:
        return
    *_, below, _ = condition.operations
    *_, after = body.operations
    counter, kept = below.operands[0].arg_number, all(after.operands[n] == body.arguments[n] for n in compared)
    keys, last = (loop.operands[number] for number in compared)
    tiles, rounds = keys.type.shape[0], ir.DenseIntElementsAttr(below.operands[1].owner.attributes["value"])[0]
    # the number of the tile is counted apart
    if not kept or tiles != rounds or tiles == 1 or len(list(body.arguments[counter].uses)) != 1:
        return
    sizes = {"keys": keys.type, "last": last.type, "tiles": tiles, "axes": list(range(last.type.rank))}
    unseen = ir.Operation.parse(_UNSEEN.format(**sizes))
    module.body.append(unseen)
    # which gives it a name of its own
    name = functions.insert(unseen).value
    with ir.InsertionPoint(loop), loop.location:
        loop.operands[counter] = func.CallOp([loop.operands[counter].type], name, [keys, last]).result


def _compared(block: ir.Block, numbers: Sequence[int | None], functions: ir.SymbolTable) -> tuple[int, int] | None:
    """The loop's operands, by number, that the rounds compare: keys and the last one of each row.

    `numbers` are those of the block's arguments.
    """
    for operation in block.operations:
        origins = [_origin(operand, numbers) for operand in operation.operands]
        if operation.operation.name == "stablehlo.compare":
            (keys, last), of_ints = origins, "i32>" in str(operation.operands[0].type)
            below = "LE" in str(operation.attributes["comparison_direction"])
            if of_ints and below and keys is not None and last is not None:
                return keys, last
        if operation.operation.name == "func.call":
            called = functions[ir.FlatSymbolRefAttr(operation.attributes["callee"]).value]
            if found := _compared(called.regions[0].blocks[0], origins, functions):
                return found
    return None


def _origin(value: Any, numbers: Sequence[int | None]) -> int | None:
    """The number of the argument that a value is made from, by the first operand of each operation."""
    while not isinstance(value, ir.BlockArgument):
        if not len(value.owner.operands):
            return None
        value = value.owner.operands[0]
    return numbers[value.arg_number]


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
