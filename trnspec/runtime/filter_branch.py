"""On a CPU filters are searched only where a row filters: a graph searches always, as Trainium has no branches."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from model.sampling import removed_by_filters
from trnspec.runtime.quicker import functions_of


def branch(module: ir.Module) -> None:
    """Change the functions of a parsed module that search: where no row filters they remove nothing.

    ValueError if a function of that name takes or returns something else.
    """
    for name, function in functions_of(module, removed_by_filters):
        block = function.regions[0].blocks[0]
        filtering, removed = list(block.arguments)[:1], list(block.operations)[-1].operands
        if [str(tensor.type.element_type) for tensor in (*filtering, *removed)] != ["i1", "i1"]:
            raise ValueError(f"{name} takes or returns something else than ids that filters remove")
        _where_any(block)


def _where_any(block: ir.Block) -> None:
    """Put a function's operations into a branch that runs if its first argument holds any True."""
    *search, return_ = block.operations
    (removed,) = return_.operands
    with return_.location:
        with ir.InsertionPoint(return_):
            chosen = stablehlo.IfOp([removed.type], _any(block.arguments[0]))
        does, does_not = (region.blocks.append() for region in chosen.regions)
        for operation in search:
            does.append(operation)
        with ir.InsertionPoint(does):
            stablehlo.return_([removed])
        with ir.InsertionPoint(does_not):
            stablehlo.return_([_constant(False, removed.type)])
    return_.operands[0] = chosen.result


def _any(filtering_R: Any) -> Any:
    """Whether any of them is True, where the caller inserts."""
    one = ir.RankedTensorType.get([], filtering_R.type.element_type)
    found = stablehlo.ReduceOp([one], [filtering_R], [_constant(False, one)], [0])
    either = found.regions[0].blocks.append(one, one)
    with ir.InsertionPoint(either):
        stablehlo.return_([stablehlo.or_(*either.arguments)])
    return found.results[0]


def _constant(value: bool, type_: Any) -> Any:
    return stablehlo.constant(ir.DenseElementsAttr.get_splat(type_, ir.BoolAttr.get(value)))
